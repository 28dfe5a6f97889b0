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
from engine_api.arguments import (
    check_batch,
    check_extra,
    check_loss,
    check_switches,
    denominator_of,
    folder_of,
    temperature_of,
)
from engine_api.batch import Batch
from engine_api.capabilities import Capability, refuse_undeclared, unsupported
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig
from engine_api.defaults import EngineDefaults
from engine_api.errors import CheckpointCorrupt, ConfigError, EngineStateError
from engine_api.generators import seed_all
from engine_api.heartbeat import watched
from engine_api.losses import LossFn, coefficients_of, evaluate, needs_of
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
        """Build everything, and seed this process's generators for training; once."""
        self._expect("initialize", "created")
        with watched("initialize"):
            self._build()
        if (
            self.config.optimizer is not None
        ):  # an engine that only infers draws nothing, and may be made in mid-run
            seed_all(self.config.seed, rank=self._seed_rank)
        if self.topology.dp_size > 1 and Capability.DP not in self.capabilities:
            self._release()  # only now it is known how many ranks there are
            raise unsupported(Capability.DP, self._name, self.capabilities)
        self._state = "ready"

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        """See ``Engine.train_batch``."""
        self._expect("train_batch", "ready")
        with watched(self._called("train_batch")):
            work = self._compute("train_batch", batch, loss, denominator, temperature, fresh=True)
            # The norm before the loss: reading either waits for the device, and this way it waits once.
            norm = self._clip()
            forward = self._gather_results(work)
            step = self._step_with(norm)
        return TrainOutput(
            loss=forward.loss,
            metrics=forward.metrics,
            denominator=forward.denominator,
            num_tokens=forward.num_tokens,
            num_micro_batches=forward.num_micro_batches,
            grad_norm=step.grad_norm,
            lr=step.lr,
            weight_version=step.weight_version,
            skipped=step.skipped,
        )

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> ForwardBackwardOutput:
        """See ``Engine.forward_backward``."""
        self._expect("forward_backward", "ready")
        with watched(self._called("forward_backward")):
            return self._gather_results(
                self._compute("forward_backward", batch, loss, denominator, temperature)
            )

    def optimizer_step(self) -> StepOutput:
        """See ``Engine.optimizer_step``."""
        self._expect("optimizer_step", "ready")
        self._require_optimizer("optimizer_step")
        if not self._pending:
            raise EngineStateError(
                "optimizer_step", "without a gradient", "past a forward_backward"
            )
        with watched(self._called("optimizer_step")):
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
        with watched(self._called("infer_batch")):
            together(
                self.comm,
                lambda: self._check_inference(batch, temperature, entropy=entropy, adapter=adapter),
            )
            temperature = temperature_of(temperature)
            micro_batches = self._prepare(batch, needs_weight=False)
            needs = self._inference_needs(entropy)
            with self._inference(adapter):
                parts = [
                    self.forward_step(part, needs=needs, temperature=temperature)
                    for part in micro_batches.parts
                ]
            return micro_batches.merge(parts)

    def save_checkpoint(
        self, directory: Path | str, *, extra: Mapping[str, Any] | None = None
    ) -> CheckpointHandle:
        """See ``Engine.save_checkpoint``."""
        self._expect("save_checkpoint", "ready")
        folder = folder_of(directory)
        check_extra(extra)
        with watched(self._called("save_checkpoint")):
            return self._save_checkpoint(folder, dict(extra or {}))

    def _save_checkpoint(self, directory: Path, extra: dict[str, Any]) -> CheckpointHandle:
        self._wait_for_save()
        asynchronous = self.config.checkpoint.async_save
        write = self._checkpoint_writer(copied=asynchronous)
        arguments: dict[str, Any] = {
            "comm": self._checkpoint_comm,
            "rank_state": self._rng_state(),
            "step": self._step,
            "engine": self._name,
            "topology": dict(self.topology.sizes),
            "extra": extra,
        }
        handle: Future[CheckpointInfo] = Future()
        if asynchronous:
            handle = self._writer.submit(write, directory, **arguments)
            self._saving = handle
        else:
            handle.set_result(write(directory, **arguments))
        return handle

    def load_checkpoint(self, directory: Path | str, *, optimizer: bool = True) -> CheckpointInfo:
        """See ``Engine.load_checkpoint``.

        Args:
            directory: A checkpoint, or a folder of them.
            optimizer: Whether the optimizer's state is loaded too. False leaves it unread, and the optimizer begins
                again; weights, step and generators are loaded.
        """
        self._expect("load_checkpoint", "ready")
        check_switches(optimizer=optimizer)
        with watched(self._called("load_checkpoint")):
            return self._load_checkpoint(folder_of(directory), optimizer=optimizer)

    def _load_checkpoint(self, directory: Path, *, optimizer: bool) -> CheckpointInfo:
        self._wait_for_save()
        comm = self._checkpoint_comm
        folder, manifest = checkpoint.find(directory, comm)
        wanted = manifest if optimizer else checkpoint.without_optimizer(manifest)
        if optimizer and self.config.optimizer is not None:
            together(
                comm,
                lambda: checkpoint.check_optimizer_state(
                    folder, manifest, self._optimizer_fields()
                ),
            )
        install = self._read_checkpoint(folder, wanted)
        rank_state = checkpoint.read_rank_state(folder, manifest, comm, self.topology.rank)
        if manifest.engine != self._name:  # each engine writes its own
            rank_state = None
        if rank_state is not None:
            together(comm, lambda: self._try_rng_state(rank_state, folder))
        # From here on nothing can fail: all is read and checked, on every rank.
        install()
        self._step = manifest.step
        self._drop_gradients()
        if rank_state is not None:
            self._set_rng_state(rank_state)
        return CheckpointInfo(
            path=folder, step=manifest.step, extra=manifest.extra, num_bytes=manifest.num_bytes
        )

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
    _loss_error: Exception | None = None  # of this rank, in the call that runs
    _writer_pool: ThreadPoolExecutor | None = None

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        memory = self.config.memory
        return prepare(
            batch,
            comm=self.comm,
            topology=self.topology,
            max_tokens=memory.max_tokens,
            vocab_size=self.vocab_size,
            needs_weight=needs_weight,
        )

    def _check_training(
        self, batch: Batch, loss: LossFn, denominator: float | None, temperature: float
    ) -> None:
        check_batch(batch)
        self._check_needs(needs_of(loss))
        check_loss(loss)
        denominator_of(denominator)
        temperature_of(temperature)

    def _check_inference(
        self, batch: Batch, temperature: float, *, entropy: bool, adapter: bool
    ) -> None:
        check_batch(batch)
        temperature_of(temperature)
        check_switches(entropy=entropy, adapter=adapter)
        self._inference_needs(entropy)
        if adapter or self.config.lora is not None:
            return
        if Capability.LORA not in self.capabilities:
            raise unsupported(Capability.LORA, self._name, self.capabilities)
        raise ConfigError(
            "lora",
            "adapter=False, but there is no adapter",
            remedy="set lora.rank, or leave adapter on",
        )

    def _compute(
        self,
        called: str,
        batch: Batch,
        loss: LossFn,
        denominator: float | None,
        temperature: float,
        *,
        fresh: bool = False,
    ) -> _Work:
        """Run forward and backward; nothing is read back from the device yet.

        ``fresh``: earlier gradients are dropped, once the call is known to be a good one.
        """
        self._require_optimizer(called)
        together(self.comm, lambda: self._check_training(batch, loss, denominator, temperature))
        denominator, temperature = denominator_of(denominator), temperature_of(temperature)
        micro_batches = self._prepare(batch, needs_weight=denominator is None)
        if fresh:
            self._drop_gradients()
        total = denominator or micro_batches.loss_weight or 0.0
        if not micro_batches.num_tokens or micro_batches.loss_weight == 0.0 or total == 0.0:
            # Nothing carries loss anywhere: no gradient, no collective, no NaN.
            return _Work(micro_batches, 0.0, ())
        try:
            outputs = self._run_train(micro_batches.parts, loss, total, temperature)
        except BaseException:  # Ctrl-C too: half a gradient must not meet the next step
            self._loss_error = None
            self._abort()
            self._drop_gradients()
            raise
        self._has_gradient = True
        return _Work(micro_batches, total, outputs)

    def _gather_results(self, work: _Work) -> ForwardBackwardOutput:
        try:
            sums = self._sum_over_data_parallel(work.outputs) if work.outputs else {"loss": 0.0}
        except (
            Exception
        ):  # the loss failed, here or on another rank: what was added up is no gradient
            self._drop_gradients()
            raise
        value = sums.pop("loss") / (work.denominator or 1.0)
        self._pending.append(value)
        return ForwardBackwardOutput(
            loss=value,
            metrics=sums,
            denominator=work.denominator,
            num_tokens=work.micro_batches.num_tokens,
            num_micro_batches=len(work.outputs),
        )

    def _clip(self) -> float:
        return (
            self._clip_gradients(self._require_optimizer("clip").clip_norm)
            if self._has_gradient
            else 0.0
        )

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        """Forward and backward over the micro-batches. A pipeline engine overrides this."""
        needs = needs_of(loss)
        results: list[LossOutput] = []
        for index, part in enumerate(parts):
            with self._accumulation(last=index == len(parts) - 1):
                known = coefficients_of(loss, part) if part.num_tokens else None
                outputs = self.forward_step(
                    part, needs=needs, temperature=temperature, coefficients=known
                )
                result = self._apply_loss(loss, outputs, part)
                (result.loss / denominator).backward()
                results.append(LossOutput(loss=result.loss.detach(), metrics=result.metrics))
        return results

    def _apply_loss(self, loss: LossFn, outputs: TokenOutputs, part: Batch) -> LossOutput:
        """Return the loss of one micro-batch; none once it has failed.

        A rank whose loss raises takes part in the collectives that are left, or the others would wait there for it. The
        error is raised where the losses are added up, on all ranks together.
        """
        if self._loss_error is not None or not part.num_tokens:
            return _no_loss(outputs)
        try:
            return evaluate(loss, outputs, part.to(_device_of(outputs)))
        except (
            Exception
        ) as error:  # whatever a caller's function raises; raised again by `_own_sums`
            if self.comm.world_size == 1:
                raise
            self._loss_error = error
            return _no_loss(outputs)

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        rows = together(self.comm, lambda: self._own_sums(outputs))
        names = sorted({name for row in rows for name in row})
        return {name: math.fsum(row.get(name, 0.0) for row in rows) for name in names}

    def _own_sums(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        error, self._loss_error = self._loss_error, None
        if error is not None:
            raise error
        sums: dict[str, float] = {"loss": 0.0}
        for output in outputs:
            for name, value in {"loss": output.loss, **output.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums if self.topology.is_primary else {}

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

    def _called(self, name: str) -> str:
        """Return what other ranks read of a call when this one fails in it."""
        return f"{name} at step {self._step}"

    def _expect(self, called: str, state: str) -> None:
        if self._state != state:
            raise EngineStateError(called, self._state, state)

    def _require_optimizer(self, called: str) -> Any:
        if self.config.optimizer is None:
            raise EngineStateError(
                called, "for inference only (optimizer: null)", "configured with an optimizer"
            )
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
        tensors = checkpoint.read(
            folder, manifest, comm=self._checkpoint_comm, layout=self._state_layout
        )
        return lambda: self._install_state(tensors)

    def _try_rng_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raise ``CheckpointCorrupt`` for generators that cannot be restored; they are left as they were."""
        before = self._rng_state()
        try:
            self._set_rng_state(state)
        except Exception as error:  # an engine's own generators may raise anything
            raise CheckpointCorrupt(
                f"rank {self.topology.rank}'s generators cannot be restored",
                where=str(folder),
                why=error.why
                if isinstance(error, CheckpointCorrupt)
                else f"{type(error).__name__}: {error}",
                remedy="use an earlier checkpoint",
            ) from error
        finally:
            self._set_rng_state(before)

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
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: torch.Tensor | None = None,
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
    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
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
