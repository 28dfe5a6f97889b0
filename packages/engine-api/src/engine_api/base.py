"""What backends share: state machine, micro-batching, loss normalisation, the optimizer step, checkpoints.

A backend derives from ``BaseEngine`` and implements the hooks at the end of the class;
a full engine adds ``forward_step``. A third party may derive from it, and need not.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api import checkpoint
from engine_api.batch import Batch
from engine_api.capabilities import Capability, refuse_undeclared, unsupported
from engine_api.comm import Comm
from engine_api.config import EngineConfig
from engine_api.defaults import EngineDefaults
from engine_api.errors import ConfigError, EngineStateError
from engine_api.losses import LossFn, coefficients_of, needs_of
from engine_api.manifest import Entry, Manifest
from engine_api.prepare import MicroBatches, prepare
from engine_api.results import (
    CheckpointHandle,
    CheckpointInfo,
    ForwardBackwardOutput,
    LossOutput,
    StepOutput,
    TokenOutputs,
    Topology,
    TrainOutput,
)
from engine_api.schedule import lr_factor
from engine_api.weights import ShardSpec

if TYPE_CHECKING:
    import torch

    from engine_api.registry import Resolution


@dataclass(frozen=True, slots=True)
class _Work:
    """A forward and backward that was given to the device."""

    micro_batches: MicroBatches
    denominator: float  # 0: nothing carried loss
    outputs: Sequence[LossOutput]


class BaseEngine(EngineDefaults):
    """The infrastructure of an engine; see ``engine_api.contract.Engine`` for what the members promise."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        self.config = config
        self.device_type = resolution.device
        self.resolution = resolution
        self._name = resolution.plugin.name
        self._state = "created"
        self._step = 0
        self._pending: list[float] = []  # losses of the forward_backward calls since the last step
        self._saving: Future[CheckpointInfo] | None = None
        refuse_undeclared(config, self.capabilities, self._name)

    # --- what a caller sees -------------------------------------------------------------------

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the plug-in declares."""
        return self.resolution.plugin.capabilities

    @property
    def weight_version(self) -> int:
        """Optimizer steps applied."""
        return self._step

    def initialize(self) -> None:
        """Build everything; once."""
        self._expect("initialize", "created")
        self._build()
        if self.topology.dp_size > 1 and Capability.DP not in self.capabilities:
            self._release()  # only now it is known how many ranks there are
            raise unsupported(Capability.DP, self._name, self.capabilities)
        self._state = "ready"

    def train_batch(
        self, batch: Batch, loss: LossFn, *, denominator: float | None = None, temperature: float = 1.0
    ) -> TrainOutput:
        """See ``Engine.train_batch``."""
        self._expect("train_batch", "ready")
        self._drop_gradients()
        work = self._compute("train_batch", batch, loss, denominator, temperature)
        # The norm before the loss: reading either waits for the device, and this way it waits once.
        norm = self._clip()
        forward = self._gather_results(work)
        step = self._step_with(norm)
        return TrainOutput(
            loss=forward.loss, metrics=forward.metrics, denominator=forward.denominator,
            num_tokens=forward.num_tokens, num_micro_batches=forward.num_micro_batches,
            grad_norm=step.grad_norm, lr=step.lr, weight_version=step.weight_version, skipped=step.skipped,
        )  # fmt: skip

    def forward_backward(
        self, batch: Batch, loss: LossFn, *, denominator: float | None = None, temperature: float = 1.0
    ) -> ForwardBackwardOutput:
        """See ``Engine.forward_backward``."""
        self._expect("forward_backward", "ready")
        return self._gather_results(self._compute("forward_backward", batch, loss, denominator, temperature))

    def optimizer_step(self) -> StepOutput:
        """See ``Engine.optimizer_step``."""
        self._expect("optimizer_step", "ready")
        self._require_optimizer("optimizer_step")
        if not self._pending:
            raise EngineStateError("optimizer_step", "without a gradient", "past a forward_backward")
        return self._step_with(self._clip())

    def _step_with(self, norm: float) -> StepOutput:
        optimizer = self._require_optimizer("optimizer_step")
        lr = optimizer.lr * lr_factor(self.config.schedule, self._step)
        skipped = self._why_skip(norm)
        if skipped is None:
            self._apply_optimizer(lr)
            self._step += 1
        self._drop_gradients()
        return StepOutput(grad_norm=norm, lr=lr, weight_version=self._step, skipped=skipped)

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        """See ``Engine.infer_batch``."""
        self._expect("infer_batch", "ready")
        _check_call(None, temperature)
        if not adapter and self.config.lora is None:
            raise unsupported(Capability.LORA, self._name, self.capabilities) if Capability.LORA not in self.capabilities \
                else ConfigError("lora", "adapter=False, but there is no adapter", remedy="set lora.rank, or leave adapter on")  # fmt: skip
        micro_batches = self._prepare(batch, needs_weight=False)
        needs = self._inference_needs(entropy)
        with self._inference(adapter):
            parts = [self.forward_step(part, needs=needs, temperature=temperature) for part in micro_batches.parts]
        return micro_batches.merge(parts)

    def save_checkpoint(self, directory: Path | str, *, extra: Mapping[str, Any] | None = None) -> CheckpointHandle:
        """See ``Engine.save_checkpoint``."""
        self._expect("save_checkpoint", "ready")
        self._wait_for_save()
        asynchronous = self.config.checkpoint.async_save
        write = self._checkpoint_writer(copied=asynchronous)
        arguments: dict[str, Any] = {
            "comm": self._checkpoint_comm, "rank_state": self._rng_state(), "step": self._step,
            "engine": self._name, "topology": dict(self.topology.sizes), "extra": dict(extra or {}),
        }  # fmt: skip
        handle: Future[CheckpointInfo] = Future()
        if asynchronous:
            handle = self._writer.submit(write, Path(directory), **arguments)
            self._saving = handle
        else:
            handle.set_result(write(Path(directory), **arguments))
        return handle

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        """See ``Engine.load_checkpoint``."""
        self._expect("load_checkpoint", "ready")
        self._wait_for_save()
        folder, manifest = checkpoint.find(Path(directory), self._checkpoint_comm)
        install = self._read_checkpoint(folder, manifest)
        rank_state = checkpoint.read_rank_state(folder, manifest, self._checkpoint_comm, self.topology.rank)
        # From here on nothing can fail: all is read and checked, on every rank.
        install()
        self._step = manifest.step
        self._drop_gradients()
        if rank_state is not None and manifest.engine == self._name:  # each engine writes its own
            self._set_rng_state(rank_state)
        return CheckpointInfo(path=folder, step=manifest.step, extra=manifest.extra, num_bytes=manifest.num_bytes)

    def close(self) -> None:
        """Wait for a save that still runs, then give everything back; idempotent."""
        if self._state == "closed":
            return
        was_ready = self._state == "ready"
        self._state = "closed"
        try:
            self._wait_for_save()
        finally:
            if self._writer_pool is not None:
                self._writer_pool.shutdown()
            if was_ready:
                self._release()

    # --- shared steps -------------------------------------------------------------------------

    _has_gradient = False
    _writer_pool: ThreadPoolExecutor | None = None

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        memory = self.config.memory
        return prepare(batch, comm=self.comm, topology=self.topology, max_tokens=memory.max_tokens,
                       vocab_size=self.vocab_size, needs_weight=needs_weight)  # fmt: skip

    def _compute(self, called: str, batch: Batch, loss: LossFn, denominator: float | None, temperature: float) -> _Work:
        """Forward and backward; nothing is read back from the device yet."""
        self._require_optimizer(called)
        _check_call(denominator, temperature)
        self._check_needs(needs_of(loss))
        micro_batches = self._prepare(batch, needs_weight=denominator is None)
        total = denominator or micro_batches.loss_weight or 0.0
        if not micro_batches.num_tokens or micro_batches.loss_weight == 0.0 or total == 0.0:
            # Nothing carries loss anywhere: no gradient, no collective, no NaN.
            return _Work(micro_batches, 0.0, ())
        try:
            outputs = self._run_train(micro_batches.parts, loss, total, temperature)
        except BaseException:  # Ctrl-C too: half a gradient must not meet the next step
            self._abort()
            self._drop_gradients()
            raise
        self._has_gradient = True
        return _Work(micro_batches, total, outputs)

    def _gather_results(self, work: _Work) -> ForwardBackwardOutput:
        sums = self._sum_over_data_parallel(work.outputs) if work.outputs else {"loss": 0.0}
        value = sums.pop("loss") / (work.denominator or 1.0)
        self._pending.append(value)
        return ForwardBackwardOutput(
            loss=value, metrics=sums, denominator=work.denominator, num_tokens=work.micro_batches.num_tokens,
            num_micro_batches=len(work.outputs),
        )  # fmt: skip

    def _clip(self) -> float:
        return self._clip_gradients(self._require_optimizer("clip").clip_norm) if self._has_gradient else 0.0

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        """Forward and backward over the micro-batches. A pipeline engine overrides this."""
        needs = needs_of(loss)
        results: list[LossOutput] = []
        for index, part in enumerate(parts):
            with self._accumulation(last=index == len(parts) - 1):
                known = coefficients_of(loss, part) if part.num_tokens else None
                outputs = self.forward_step(part, needs=needs, temperature=temperature, coefficients=known)
                result = loss(outputs, part.to(_device_of(outputs))) if part.num_tokens else _no_loss(outputs)
                (result.loss / denominator).backward()
                results.append(LossOutput(loss=result.loss.detach(), metrics=result.metrics))
        return results

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        sums: dict[str, float] = {"loss": 0.0}
        for output in outputs:
            for name, value in {"loss": output.loss, **output.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        rows = self.comm.all_gather(sums if self.topology.is_primary else {})
        names = sorted({name for row in rows for name in row})
        return {name: math.fsum(row.get(name, 0.0) for row in rows) for name in names}

    def _why_skip(self, norm: float) -> str | None:
        if not self._has_gradient:
            return "no token carries loss"
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        bad = [loss for loss in self._pending if not math.isfinite(loss)]
        return f"loss is {bad[0]}" if bad else None

    def _drop_gradients(self) -> None:
        self._pending.clear()
        self._has_gradient = False
        self._zero_grad()

    def _expect(self, called: str, state: str) -> None:
        if self._state != state:
            raise EngineStateError(called, self._state, state)

    def _require_optimizer(self, called: str) -> Any:
        if self.config.optimizer is None:
            raise EngineStateError(called, "for inference only (optimizer: null)", "configured with an optimizer")
        return self.config.optimizer

    def _wait_for_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @property
    def _writer(self) -> ThreadPoolExecutor:
        if self._writer_pool is None:
            self._writer_pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self._writer_pool

    # --- checkpoints; an engine with a format of its own beside the portable one overrides these ------------

    def _checkpoint_writer(self, *, copied: bool) -> Callable[..., CheckpointInfo]:
        """What writes the state of now, given the final name and all else that ``checkpoint.write_files`` asks for.

        ``copied``: it is called later, while training goes on and changes the tensors.
        """
        state = self.state_shards()
        if copied:
            state = {
                key: (tensor.detach().to("cpu", copy=True), spec)
                for key, (tensor, spec) in state.items()
                if spec.replica == 0
            }
        return partial(checkpoint.write, state=state)

    def _read_checkpoint(self, folder: Path, manifest: Manifest) -> Callable[[], None]:
        """Read and check the state; what replaces the engine's by it, which cannot fail."""
        tensors = checkpoint.read(folder, manifest, comm=self._checkpoint_comm, layout=self._state_layout)
        return lambda: self._install_state(tensors)

    # --- what a backend provides ---------------------------------------------------------------

    comm: Comm  # control plane over all ranks; ready before _build returns
    topology: Topology
    vocab_size: int

    @property
    def _checkpoint_comm(self) -> Comm:
        """The control plane of checkpoints; an engine that saves asynchronously gives them one of their own."""
        return self.comm

    @abstractmethod
    def _build(self) -> None:
        """Process groups, model, optimizer."""

    @abstractmethod
    def forward_step(
        self, batch: Batch, *, needs: Sequence[str], temperature: float, coefficients: torch.Tensor | None = None
    ) -> TokenOutputs:
        """Run the model on one micro-batch; an empty one must take part in every collective.

        ``coefficients`` ``[T]``: the derivative of the loss (before the denominator) by each log-prob, where it is
        known beforehand; an engine may use it to form gradients in the forward pass.

        Outputs are aligned, float32, the same on every model-parallel rank, with a gradient path to the weights.
        """

    @abstractmethod
    def _clip_gradients(self, max_norm: float | None) -> float:
        """Scale gradients to ``max_norm``; return their global norm before that."""

    @abstractmethod
    def _apply_optimizer(self, lr: float) -> None:
        """One optimizer step at rate ``lr``."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Drop all gradients."""

    def _abort(self) -> None:
        """A forward or backward was left half way by an exception; make the next one possible."""

    @abstractmethod
    def state_shards(self) -> dict[str, tuple[torch.Tensor, ShardSpec]]:
        """The training state as boxes of live tensors, under canonical keys (see docs/contract.md)."""

    @abstractmethod
    def _state_layout(self, entries: Mapping[str, Entry]) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        """Which boxes this rank needs, given what a checkpoint holds; asked before anything is changed.

        Every ``model.`` key of this engine must be in it; ``optim.`` keys follow what was saved.
        """

    @abstractmethod
    def _install_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights and the whole optimizer state by these CPU tensors."""

    @abstractmethod
    def _release(self) -> None:
        """Give memory and process groups back."""


def _given(outputs: TokenOutputs) -> list[torch.Tensor]:
    return [t for t in (outputs.log_probs, outputs.entropy, outputs.values) if t is not None]


def _device_of(outputs: TokenOutputs) -> torch.device:
    return _given(outputs)[0].device


def _no_loss(outputs: TokenOutputs) -> LossOutput:
    # An empty micro-batch takes part in the backward collectives with a zero that depends on the weights.
    tensors = _given(outputs)
    return LossOutput(loss=sum((t.sum() for t in tensors[1:]), start=tensors[0].sum()) * 0.0)


def _check_call(denominator: float | None, temperature: float) -> None:
    if denominator is not None and not (math.isfinite(denominator) and denominator > 0):
        raise ConfigError(
            "denominator", f"{denominator} is not a positive number", remedy="leave it out for Σ loss_weight"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError("temperature", f"{temperature} is not a positive number", remedy="use 1.0")
