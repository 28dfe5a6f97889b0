"""The parts that engines share: state machine, micro-batches, loss, optimizer step, checkpoints.

An engine derives from ``BaseEngine`` and implements the hooks at the end of the class. A third
party may derive from it, and need not.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from engine_api import checkpoint
from engine_api.arguments import (
    check_batch,
    check_device,
    check_extra,
    check_loss,
    check_switches,
    denominator_of,
    folder_of,
    temperature_of,
)
from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.capabilities import Capability, refuse_undeclared, unsupported
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig, flatten_config
from engine_api.contract import Adapter
from engine_api.defaults import EngineDefaults
from engine_api.distillation import (
    DIVERGENCE,
    OutputHead,
    check_head,
    check_taught,
    teaching_of,
)
from engine_api.errors import BatchError, CheckpointCorrupt, ConfigError, EngineStateError
from engine_api.generators import seed_all
from engine_api.heartbeat import TIMEOUT_S, watched
from engine_api.hf_routers import Routing
from engine_api.hf_vision import Vision
from engine_api.losses import LossFn, coefficients_of, evaluate, needs_of, zero_loss
from engine_api.manifest import Entry, Manifest
from engine_api.media import MEDIA
from engine_api.prepare import MicroBatches, prepare
from engine_api.process_groups import ProcessGroupUse
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
from engine_api.torch_defaults import plain_defaults
from engine_api.weights import ShardSpec

if TYPE_CHECKING:
    import torch

    from engine_api.registry import Resolution


@dataclass(frozen=True, slots=True)
class _Work:
    """A forward and backward that was queued on the device."""

    micro_batches: MicroBatches
    denominator: float
    """Divisor of the loss, or 0 where no token carries loss."""
    outputs: Sequence[LossOutput]


def _deep_copy_json(extra: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the caller's JSON that shares no list or mapping with it."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(extra))
    # The writer refuses what is not JSON, on all ranks together.
    except (TypeError, ValueError):
        return extra
    return copy


class BaseEngine(EngineDefaults):
    """The infrastructure of an engine.

    ``engine_api.contract.Engine`` documents the members.
    """

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        self.config = config
        self.device_type = resolution.device
        self.resolution = resolution
        self._name = resolution.plugin.name
        self._state = "created"
        self._step = 0
        # Losses of the forward_backward calls since the last step.
        self._pending: list[float] = []
        self._saving: Future[CheckpointInfo] | None = None
        # The parts ("model", "optimizer") that `to` has moved to the host.
        self._offloaded: set[str] = set()
        refuse_undeclared(config, self.capabilities, self._name)

    # --- members of the contract --------------------------------------------------------------

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that the plug-in declares."""
        return self.resolution.plugin.capabilities

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps applied."""
        return self._step

    def initialize(self) -> None:
        """Build everything, and seed this process's generators for training.

        It is called once.
        """
        self._expect("initialize", "created")
        try:
            with watched("initialize"), plain_defaults():
                self._build()
        # Ctrl-C included: an engine that was not built keeps no process group.
        except BaseException:
            if "comm" in vars(self):
                self.comm.close()
            self._end_process_group()
            raise
        # An engine that only infers draws nothing, and may be created in the middle of a run.
        if self.config.optimizer is not None:
            seed_all(self.config.seed, rank=self._seed_rank)
        # The number of data-parallel ranks is known only after _build.
        if self.topology.dp_size > 1 and Capability.DP not in self.capabilities:
            self._release()
            self._end_process_group()
            raise unsupported(Capability.DP, self._name, self.capabilities)
        self._state = "ready"

    def resolved(self) -> Mapping[str, Any]:
        """Return what the engine does of what was asked (see ``Engine.resolved``)."""
        self._expect("resolved", "ready")
        return flatten_config(self.config, self.topology.world_size) | dict(self._choices())

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        """Apply one optimizer step to a batch.

        See ``Engine.train_batch``.
        """
        self._expect("train_batch", "ready")
        with watched(self._call_name("train_batch")), plain_defaults():
            work = self._compute("train_batch", batch, loss, denominator, temperature, fresh=True)
            # Reading the norm or the loss waits for the device. With the norm first it waits once.
            norm = self._clip()
            forward = self._gather_results(work)
            step = self._apply_clipped_step(norm)
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
        """Run the first half of ``train_batch``.

        See ``Engine.forward_backward``.
        """
        self._expect("forward_backward", "ready")
        with watched(self._call_name("forward_backward")), plain_defaults():
            work = self._compute("forward_backward", batch, loss, denominator, temperature)
            return self._gather_results(work)

    def optimizer_step(self) -> StepOutput:
        """Run the second half of ``train_batch``.

        See ``Engine.optimizer_step``.
        """
        self._expect("optimizer_step", "ready")
        self._require_optimizer("optimizer_step")
        if not self._pending:
            raise EngineStateError(
                "optimizer_step", "without a gradient", "past a forward_backward"
            )
        self._expect_loaded("optimizer_step", "model", "optimizer")
        with watched(self._call_name("optimizer_step")), plain_defaults():
            return self._apply_clipped_step(self._clip())

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        optimizer = self._require_optimizer("optimizer_step")
        lr = optimizer.lr * lr_factor(self.config.schedule, self._step)
        skipped = self._why_skip(norm)
        if skipped is None:
            try:
                self._apply_optimizer(lr)
            # Ctrl-C included: some weights may have been updated, and others not.
            except BaseException:
                self._state = "failed in its optimizer's step, with weights that are undefined"
                raise
            self._step += 1
        self._drop_gradients()
        return StepOutput(grad_norm=norm, lr=lr, weight_version=self._step, skipped=skipped)

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        """Return per-token log-probs, entropy or values.

        See ``Engine.infer_batch``.
        """
        self._expect("infer_batch", "ready")
        self._expect_loaded("infer_batch", "model")
        with watched(self._call_name("infer_batch")), plain_defaults():
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

    def infer_states(self, batch: Batch) -> torch.Tensor:
        """Return the final hidden states.

        See ``Engine.infer_states``.
        """
        self._expect_distillation("infer_states")
        self._expect_loaded("infer_states", "model")
        with watched(self._call_name("infer_states")), plain_defaults():
            together(self.comm, lambda: check_batch(batch))
            micro_batches = self._prepare(batch, needs_weight=False)
            with self._inference(adapter=True):
                parts = [self.states_step(part).cpu() for part in micro_batches.parts]
            return micro_batches.merge_states(parts)

    def output_head(self) -> OutputHead:
        """Return a copy of the whole output head.

        See ``Engine.output_head``.
        """
        self._expect_distillation("output_head")
        self._expect_loaded("output_head", "model")
        with watched(self._call_name("output_head")), plain_defaults():
            return self._whole_head()

    def set_teacher(self, head: OutputHead | None) -> None:
        """Keep a teacher's output head, or drop it.

        See ``Engine.set_teacher``.
        """
        self._expect_distillation("set_teacher")
        if head is not None:
            check_head(head)
            head = self._place_head(head)
        self._teacher_head = head

    def _expect_distillation(self, called: str) -> None:
        if Capability.DISTILLATION not in self.capabilities or self._state != "ready":
            raise self._refusal(called, Capability.DISTILLATION)
        if DIVERGENCE not in self._possible_outputs:
            raise ConfigError(
                called,
                "a value model has no distribution over tokens",
                remedy="call it on the engine of a language model",
            )

    def save_checkpoint(
        self, directory: Path | str, *, extra: Mapping[str, Any] | None = None
    ) -> CheckpointHandle:
        """Write the whole training state.

        See ``Engine.save_checkpoint``.
        """
        self._expect("save_checkpoint", "ready")
        folder = folder_of(directory)
        check_extra(extra)
        with watched(self._call_name("save_checkpoint")), plain_defaults():
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
            "extra": _deep_copy_json(extra) if asynchronous else extra,
        }
        handle: Future[CheckpointInfo] = Future()
        if asynchronous:
            handle = self._writer.submit(write, directory, **arguments)
            self._saving = handle
        else:
            handle.set_result(write(directory, **arguments))
        return handle

    def load_checkpoint(self, directory: Path | str, *, optimizer: bool = True) -> CheckpointInfo:
        """Restore from a checkpoint.

        See ``Engine.load_checkpoint``.

        Args:
            directory: a checkpoint, or a folder of checkpoints.
            optimizer: True loads the optimizer's state too. False leaves it unread, and the
                optimizer starts again; weights, step and generators are loaded.
        """
        self._expect("load_checkpoint", "ready")
        check_switches(optimizer=optimizer)
        with watched(self._call_name("load_checkpoint")), plain_defaults():
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
        # Each engine writes a rank state of its own.
        if manifest.engine != self._name:
            rank_state = None
        if rank_state is not None:
            together(comm, lambda: self._try_rng_state(rank_state, folder))
        # From here on nothing can fail, because everything is read and checked on every rank.
        install()
        self._step = manifest.step
        self._drop_gradients()
        if rank_state is not None:
            self._set_rng_state(rank_state)
        return CheckpointInfo(
            path=folder, step=manifest.step, extra=manifest.extra, num_bytes=manifest.num_bytes
        )

    def close(self) -> None:
        """Wait for a save that still runs, then free everything.

        A second call does nothing.
        """
        if self._state == "closed":
            return
        was_built = self._state != "created"
        self._state = "closed"
        try:
            self._wait_for_save()
        finally:
            if self._writer_pool is not None:
                self._writer_pool.shutdown()
            self._teacher_head = None
            if was_built:
                self._release()
                self._end_process_group()

    # --- shared steps -------------------------------------------------------------------------

    _process_group: ProcessGroupUse | None = None

    def _use_process_group(self, timeout: timedelta | None = None) -> None:
        """Join the launcher's ranks, which `_build` does first (see ``ProcessGroupUse``).

        `close` ends the use, and so does a `_build` that fails. ``timeout`` None is 10 minutes.
        """
        limit = timeout or timedelta(seconds=TIMEOUT_S)
        self._process_group = ProcessGroupUse(self.device_type, limit)

    def _end_process_group(self) -> None:
        if self._process_group is not None:
            self._process_group.end()
            self._process_group = None

    _has_gradient = False
    # Number of tokens of the current training call, over all data-parallel ranks.
    _num_tokens = 0
    _teacher_head: OutputHead | None = None
    # The error that the loss function raised on this rank in the current call.
    _loss_error: Exception | None = None
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
            max_patches=memory.max_patches,
            share_prefixes=memory.share_prefixes,
            check=self._check_contents,
        )

    vision: Vision | None = None
    """The images that the model takes, which an engine that declares ``vision`` sets in ``_build``.

    None is a model without a tower.
    """

    def _check_contents(self, batch: Batch) -> None:
        """Raise ``BatchError`` for experts or images that this engine's model does not take."""
        self._check_replayed(batch)
        if self.vision is not None:
            self.vision.check(batch)
        elif batch.media is not None and batch.media.num_images:
            raise BatchError(
                MEDIA,
                f"{batch.media.num_images} images for a model without a vision tower",
                remedy="train a vision-language model, or leave the images and their tokens out",
            )

    routing: Routing | None = None
    """Layers and experts that ``routed_experts`` of a batch is about.

    An engine that declares ``router_replay`` sets it in ``_build`` where it is configured.
    """

    def _check_replayed(self, batch: Batch) -> None:
        """Raise ``BatchError`` for a field ``routed_experts`` that cannot be replayed."""
        if ROUTED_EXPERTS not in batch.fields:
            return
        if self.routing is None:
            raise BatchError(
                ROUTED_EXPERTS,
                "this engine would not replay it",
                why="it was configured with router_replay: false",
                remedy="set router_replay: true, or leave the field out of the batch",
            )
        self.routing.check(batch)

    def _check_training(
        self, batch: Batch, loss: LossFn, denominator: float | None, temperature: float
    ) -> None:
        check_batch(batch)
        self._check_needs(needs_of(loss))
        check_loss(loss)
        denominator_of(denominator)
        temperature_of(temperature)
        if DIVERGENCE not in needs_of(loss):
            return
        if self.config.memory.share_prefixes:
            raise ConfigError(
                "memory.share_prefixes",
                "expected false for a loss that needs a divergence to a teacher, got true",
                why="documents that begin alike may have teachers that saw different prompts",
                remedy="set memory.share_prefixes: false",
            )
        check_taught(batch, teaching_of(loss), self._teacher_head, self.vocab_size)

    def _check_inference(
        self, batch: Batch, temperature: float, *, entropy: bool, adapter: bool
    ) -> None:
        check_batch(batch)
        temperature_of(temperature)
        check_switches(entropy=entropy, adapter=adapter)
        self._inference_needs(entropy)
        if not adapter and not self._has_adapter():
            raise ConfigError(
                "lora",
                "adapter=False, but there is no adapter",
                remedy="set lora.rank, or leave adapter on",
            )

    def _check_adapter(self, adapter: Adapter) -> None:
        """Raise ``ConfigError`` for an export that is unknown, or needs an adapter without one."""
        known = get_args(Adapter)
        if adapter not in known:
            raise ConfigError(
                "adapter",
                f"unknown export {adapter!r:.100}",
                remedy=f"use one of: {', '.join(known)}",
            )
        if adapter != "merged" and not self._has_adapter():
            raise ConfigError(
                "adapter",
                f"{adapter!r}, but the engine has no adapter",
                remedy="export with adapter='merged'",
            )

    def _has_adapter(self) -> bool:
        """Return whether there is an adapter.

        Raises ``UnsupportedCapability`` if this engine can have none.
        """
        if self.config.lora is None and Capability.LORA not in self.capabilities:
            raise unsupported(Capability.LORA, self._name, self.capabilities)
        return self.config.lora is not None

    def _check_move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> bool:
        """Check the arguments of ``to``, and return whether the parts leave the device."""
        self._expect("to", "ready")
        check_device(device, self.device_type)
        check_switches(model=model, optimizer=optimizer, grad=grad)
        if model and not grad and self._has_gradient:
            raise EngineStateError(
                "to(model=True, grad=False)", "holding gradients", "past optimizer_step"
            )
        return device == "cpu" and self.device_type != "cpu"

    def _mark(self, part: str, away: bool) -> None:
        """Note that ``to`` has moved a part, to the host if ``away``."""
        if away:
            self._offloaded.add(part)
        else:
            self._offloaded.discard(part)

    def _expect_loaded(self, called: str, *parts: str) -> None:
        """Raise ``EngineStateError`` if one of the parts that ``called`` needs is on the host."""
        if away := self._offloaded.intersection(parts):
            raise EngineStateError(
                called,
                f"offloaded ({', '.join(sorted(away))})",
                f"back on its device: call to({self.device_type!r})",
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
        """Run forward and backward without reading anything back from the device.

        ``fresh`` drops earlier gradients, once the arguments of the call are checked.
        """
        self._require_optimizer(called)
        self._expect_loaded(called, "model", "optimizer")
        together(self.comm, lambda: self._check_training(batch, loss, denominator, temperature))
        denominator = denominator_of(denominator)
        temperature = temperature_of(temperature)
        micro_batches = self._prepare(batch, needs_weight=denominator is None)
        if fresh:
            self._drop_gradients()
        total = denominator or micro_batches.loss_weight or 0.0
        if not micro_batches.num_tokens or micro_batches.loss_weight == 0.0 or total == 0.0:
            # Nothing carries loss anywhere: no gradient, no collective, no NaN.
            return _Work(micro_batches, 0.0, ())
        self._num_tokens = micro_batches.num_tokens
        try:
            outputs = self._run_train(micro_batches.parts, loss, total, temperature)
        # Ctrl-C is caught as well, because half a gradient must not reach the next step.
        except BaseException:
            self._loss_error = None
            self._abort()
            self._drop_gradients()
            raise
        self._has_gradient = True
        return _Work(micro_batches, total, outputs)

    def _gather_results(self, work: _Work) -> ForwardBackwardOutput:
        with self._whole_gradient():
            sums = self._sum_over_data_parallel(work.outputs) if work.outputs else {"loss": 0.0}
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
        if not self._has_gradient:
            return 0.0
        with self._whole_gradient():
            return self._clip_gradients(self._require_optimizer("clip").clip_norm)

    @contextmanager
    def _whole_gradient(self) -> Generator[None]:
        """Drop the gradient if the block fails: the loss of some rank, or a half-done clipping."""
        try:
            yield
        # Ctrl-C is caught as well, because half a gradient must not reach the next step.
        except BaseException:
            self._drop_gradients()
            raise

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        """Run forward and backward over the micro-batches.

        A pipeline engine overrides it.
        """
        needs = needs_of(loss)
        teaching = teaching_of(loss) if DIVERGENCE in needs else None
        results: list[LossOutput] = []
        for index, part in enumerate(parts):
            with self._accumulation(last=index == len(parts) - 1):
                if teaching is None:
                    known = coefficients_of(loss, part) if part.num_tokens else None
                    outputs = self.forward_step(
                        part, needs=needs, temperature=temperature, coefficients=known
                    )
                else:
                    outputs = self.taught_step(
                        part, needs=needs, temperature=temperature, teaching=teaching
                    )
                result = self._apply_loss(loss, outputs, part)
                (result.loss / denominator).backward()
                metrics = {**result.metrics, **self._own_metrics()}
                results.append(LossOutput(loss=result.loss.detach(), metrics=metrics))
        return results

    def _apply_loss(self, loss: LossFn, outputs: TokenOutputs, part: Batch) -> LossOutput:
        """Return the loss of one micro-batch, or a zero once the loss function has failed.

        A rank whose loss function raises still takes part in the remaining collectives, because the
        other ranks would wait for it there. The error is raised where the losses are added up, on
        all ranks together.
        """
        if self._loss_error is not None or not part.num_tokens:
            return zero_loss(outputs)
        try:
            # Neither the fields of a teacher nor pixels go to the device again.
            given = part.without_teacher().with_media(None)
            return evaluate(loss, outputs, given.to(outputs.tensors()[0].device))
        # A caller's function may raise anything; `_local_sums` raises it again.
        except Exception as error:
            if self.comm.world_size == 1:
                raise
            self._loss_error = error
            return zero_loss(outputs)

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        rows = together(self.comm, lambda: self._local_sums(outputs))
        names = sorted({name for row in rows for name in row})
        return {name: math.fsum(row.get(name, 0.0) for row in rows) for name in names}

    def _local_sums(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        error = self._loss_error
        self._loss_error = None
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

    def _call_name(self, name: str) -> str:
        """Return the name of a call in the errors that other ranks raise when it fails here."""
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
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    @property
    def _writer(self) -> ThreadPoolExecutor:
        if self._writer_pool is None:
            self._writer_pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self._writer_pool

    # --- checkpoints; an engine that also has a format of its own overrides these ----------------

    def _checkpoint_writer(self, *, copied: bool) -> Callable[..., CheckpointInfo]:
        """Return a function that writes the current state.

        It takes the final name and the remaining arguments of ``checkpoint.write_files``. With
        ``copied`` it may be called later, while training goes on and changes the tensors.
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
        """Read and check a saved state, and return a function that installs it and cannot fail."""
        tensors = checkpoint.read(
            folder, manifest, comm=self._checkpoint_comm, layout=self._state_layout
        )
        return lambda: self._install_state(tensors)

    def _try_rng_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raise ``CheckpointCorrupt`` for generators that cannot be restored.

        The generators are left as they were.
        """
        before = self._rng_state()
        try:
            self._set_rng_state(state)
        # An engine's own generators may raise anything.
        except Exception as error:
            is_known = isinstance(error, CheckpointCorrupt)
            why = error.why if is_known else f"{type(error).__name__}: {error}"
            raise CheckpointCorrupt(
                f"rank {self.topology.rank}'s generators cannot be restored",
                where=str(folder),
                why=why,
                remedy="use an earlier checkpoint",
            ) from error
        finally:
            self._set_rng_state(before)

    # --- hooks that an engine provides -----------------------------------------------------------

    comm: Comm
    """Control plane over all ranks, which is set before ``_build`` returns."""

    topology: Topology
    vocab_size: int

    @property
    def _checkpoint_comm(self) -> Comm:
        """The control plane of checkpoints, a separate one in engines that save asynchronously."""
        return self.comm

    @abstractmethod
    def _build(self) -> None:
        """Build process groups, model and optimizer."""

    @abstractmethod
    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: torch.Tensor | None = None,
    ) -> TokenOutputs:
        """Run the model on one micro-batch.

        An empty micro-batch must take part in every collective. ``coefficients`` ``[T]`` is the
        derivative of the loss (before the denominator) with respect to each log-prob, where it is
        known in advance; an engine may use it to form gradients in the forward pass.

        Outputs are aligned, float32 and the same on every model-parallel rank, with a gradient path
        to the weights.
        """

    @abstractmethod
    def _clip_gradients(self, max_norm: float | None) -> float:
        """Scale gradients to ``max_norm`` and return their global norm before that."""

    @abstractmethod
    def _apply_optimizer(self, lr: float) -> None:
        """Apply one optimizer step at the learning rate ``lr``."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Drop all gradients."""

    def _abort(self) -> None:
        """Clean up after an exception in forward or backward, so that the next call can run."""

    @abstractmethod
    def state_shards(self) -> dict[str, tuple[torch.Tensor, ShardSpec]]:
        """Return the training state as boxes of live tensors under canonical keys.

        docs/contract.md lists the keys.
        """

    @abstractmethod
    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        """Return the boxes that this rank needs from a checkpoint with these entries.

        It is called before anything is changed. Every ``model.`` key of this engine must be in the
        result; the ``optim.`` keys follow the saved ones.
        """

    @abstractmethod
    def _install_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights and the whole optimizer state by these CPU tensors."""

    @abstractmethod
    def _release(self) -> None:
        """Free memory and process groups."""
