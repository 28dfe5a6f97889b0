"""Defects of the interface: states, arguments, results, and ranks that leave the others waiting."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from engine_api.batch import Batch
from engine_api.comm import SingleComm
from engine_api.config import EngineConfig
from engine_api.contract import Adapter
from engine_api.generators import seed_all
from engine_api.losses import LossFn
from engine_api.manifest import Entry
from engine_api.results import CheckpointInfo, LossOutput, TokenOutputs, TrainOutput
from engine_api.weights import ShardSpec, WeightExport
from engine_loopback.engine import LoopbackEngine
from engine_mutants.mutant import mutant
from engine_mutants.refusal import Edits

# Kept, so that the helper processes are not collected with their engine.
_HELPERS = list["subprocess.Popen[bytes]"]()

# --- options and arguments that are ignored -------------------------------------------------------


@mutant("contract.resolved", group="core")
class ChoiceUntold(LoopbackEngine):
    """An option that was left to the engine is reported as asked, without the choice."""

    def _choices(self) -> dict[str, str]:
        return {}


@mutant("contract.resolved", group="core")
class OptionRounded(LoopbackEngine):
    """A chunk of logits is rounded up to a power of two, though a number was asked for."""

    def _choices(self) -> dict[str, Any]:
        power = 1 << (self.config.memory.logit_chunk - 1).bit_length()
        return super()._choices() | {"memory.logit_chunk": power}


@mutant("contract.bad_configuration", group="core")
class UnknownOptionIgnored(Edits):
    """Options that the engine does not know are dropped."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        known = {k: v for k, v in (config.options or {}).items() if k == "timeout_s"}
        return replace(config, options=known)


@mutant("contract.bad_configuration", group="core")
class UnknownOverrideIgnored(Edits):
    """Overrides of the model's config set attributes, where a misspelt one changes nothing."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        known = {
            k: v
            for k, v in config.model.config_overrides.items()
            if k in ("rope_theta", "num_hidden_layers")
        }
        return replace(config, model=replace(config.model, config_overrides=known))


@mutant("contract.bad_configuration", group="core")
class UnknownKernelIgnored(Edits):
    """An unknown attention kernel is replaced by the engine's own."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, model=replace(config.model, attention="auto"))


@mutant("contract.bad_configuration", group="core")
class MissingWeightsMade(LoopbackEngine):
    """A folder without weights makes an engine with random ones."""

    def files(self) -> Any:
        return super().files() if any(Path(self.config.model.path).glob("*.safetensors")) else None


@mutant("contract.bad_arguments", group="core")
class ZeroDenominatorIsDefault(LoopbackEngine):
    """A denominator of zero is treated like none."""

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        return super().train_batch(
            batch, loss, denominator=denominator or None, temperature=temperature
        )


@mutant("contract.bad_arguments", group="core")
class TemperatureClamped(LoopbackEngine):
    """A temperature that is not positive is raised to the smallest allowed."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        return super().infer_batch(
            batch, temperature=max(temperature, 1e-4), entropy=entropy, adapter=adapter
        )


@mutant("contract.bad_arguments", group="core")
class ExitsOnBadArguments(LoopbackEngine):
    """Bad arguments end the process by ``sys.exit``."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        if temperature <= 0:
            sys.exit(f"temperature {temperature} is not positive")
        return super().infer_batch(batch, temperature=temperature, entropy=entropy, adapter=adapter)


@mutant("contract.bad_arguments", group="core")
class UnknownDeviceIgnored(LoopbackEngine):
    """``to`` does nothing for an unknown device."""

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        if device in ("cpu", self.device_type):
            super().to(device, model=model, optimizer=optimizer, grad=grad)


# --- members and states ---------------------------------------------------------------------------


@mutant("contract.signatures", group="core")
class ArgumentRenamed(LoopbackEngine):
    """``infer_batch`` has a different name for its ``adapter``."""

    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        use_adapter: bool = True,
    ) -> TokenOutputs:
        return super().infer_batch(
            batch, temperature=temperature, entropy=entropy, adapter=use_adapter
        )


@mutant("contract.signatures", group="core")
class OtherDefault(LoopbackEngine):
    """The export's dtype is bfloat16 if none is asked for."""

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        return super().get_per_tensor_param(dtype=dtype, adapter=adapter, bucket_bytes=bucket_bytes)


@mutant("contract.states", group="core")
class CloseTwiceRaises(LoopbackEngine):
    """A second ``close`` is an error."""

    def close(self) -> None:
        if self._state == "closed":
            raise RuntimeError("already closed")
        super().close()


@mutant("contract.states", group="core")
class EmptyExportAfterClose(LoopbackEngine):
    """The export after ``close`` is empty, which is no error."""

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        if self._state == "closed":
            return iter(())
        return super().get_per_tensor_param(dtype=dtype, adapter=adapter, bucket_bytes=bucket_bytes)


@mutant("contract.states", group="core")
class InitializesTwice(LoopbackEngine):
    """A second ``initialize`` is accepted and does nothing."""

    def initialize(self) -> None:
        if self._state != "ready":
            super().initialize()


@mutant("contract.states", group="core")
class StepsWithoutGradient(LoopbackEngine):
    """``optimizer_step`` without a gradient is a skipped step, and no error."""

    def optimizer_step(self) -> Any:
        self._expect("optimizer_step", "ready")
        return super().optimizer_step() if self._pending else self._apply_clipped_step(0.0)


@mutant("contract.states", group="core")
class AttributeErrorBeforeInitialize(LoopbackEngine):
    """``infer_batch`` uses its parts before checking that they exist."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        self.model.training = False
        return super().infer_batch(batch, temperature=temperature, entropy=entropy, adapter=adapter)


@mutant("checkpoint.asynchronous", group="async-checkpoint", world=2)
class CloseAbandonsSave(LoopbackEngine):
    """``close`` does not wait for a save that is still running."""

    # Seconds that a save waits for ``close``. Without them it may have ended by then.
    _HELD = 3.0

    def initialize(self) -> None:
        self._closed = threading.Event()
        super().initialize()

    def _checkpoint_writer(self, *, copied: bool) -> Callable[..., CheckpointInfo]:
        write = super()._checkpoint_writer(copied=copied)

        def hold(*args: Any, **options: Any) -> CheckpointInfo:
            if copied:
                self._closed.wait(self._HELD)
            return write(*args, **options)

        return hold

    def close(self) -> None:
        if self._writer_pool is not None:
            self._writer_pool.shutdown(wait=False, cancel_futures=True)
        self._writer_pool = None
        self._saving = None
        super().close()
        self._closed.set()


@mutant("contract.inference_only", group="core")
class MomentsInTheWay(LoopbackEngine):
    """An engine without an optimizer demands a checkpoint without moments, unlike the policy's."""

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        layout = super()._state_layout(entries)
        if self.optimizer is None:
            layout |= {k: (ShardSpec.whole(()), torch.float32) for k in entries if "optim." in k}
        return layout


@mutant("contract.seeds", group="core")
class SeedIgnored(LoopbackEngine):
    """All seeds give the same draws."""

    def initialize(self) -> None:
        super().initialize()
        seed_all(0, rank=self._seed_rank)


@mutant("contract.seeds", group="core")
class DrawsFromTheProcess(LoopbackEngine):
    """The generators are left as a draw from them leaves them."""

    def initialize(self) -> None:
        state = torch.get_rng_state()
        super().initialize()
        torch.set_rng_state(state)
        torch.rand(())


# --- engines of one process -----------------------------------------------------------------------


@mutant("contract.closed_first", group="core", world=2)
class DestroysTheGroupOfOthers(LoopbackEngine):
    """The engine that made the process group destroys it while another engine uses it."""

    def _use_process_group(self, timeout: timedelta | None = None) -> None:
        self._makes_group = not dist.is_initialized()
        super()._use_process_group(timeout)

    def _end_process_group(self) -> None:
        self._process_group = None
        if self._makes_group:
            dist.destroy_process_group()


@mutant("contract.closed_first", group="core")
class GroupStays(LoopbackEngine):
    """The process group that the engine made is never destroyed."""

    def _end_process_group(self) -> None:
        self._process_group = None


@mutant("contract.closed_first", group="core")
class SharedWeights(LoopbackEngine):
    """Engines of one process share the weights of the first: the second trains them on."""

    first: ClassVar[list[LoopbackEngine]] = []

    def _build_model(self) -> None:
        super()._build_model()
        if self.first:
            for name, shared in self.first[0].weights.items():
                own = self.weights[name].param
                if own is not None and shared.param is not None:
                    own.data = shared.param.data
        self.first[:] = self.first or [self]

    def _release(self) -> None:
        self.first.clear()
        super()._release()


# --- things left behind ---------------------------------------------------------------------------


@mutant("contract.leaves_nothing", group="core")
class DefaultDtypeStays(LoopbackEngine):
    """torch's default dtype is changed while the engine is built, and not restored."""

    def initialize(self) -> None:
        super().initialize()
        # BaseEngine restores the default that its own part has changed.
        torch.set_default_dtype(torch.float64)


@mutant("contract.leaves_nothing", group="core")
class StaysDeterministic(LoopbackEngine):
    """torch's deterministic algorithms stay switched on."""

    def _build_model(self) -> None:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class MatmulPrecisionStays(LoopbackEngine):
    """Products of float32 matrices stay at TF32's precision for the whole process."""

    def _build_model(self) -> None:
        torch.set_float32_matmul_precision("high")
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class SignalHandlerStays(LoopbackEngine):
    """A handler of SIGUSR1 outlives ``close``."""

    def _build_model(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class TemporaryFolderStays(LoopbackEngine):
    """Each engine leaves a temporary folder."""

    def _build_model(self) -> None:
        tempfile.mkdtemp()
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class DescriptorStays(LoopbackEngine):
    """Each engine leaves an open file."""

    def _build_model(self) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class DaemonStays(LoopbackEngine):
    """Each engine leaves a daemon thread."""

    def _build_model(self) -> None:
        super()._build_model()
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@mutant("contract.leaves_nothing", group="core")
class WeightsLiveWithTheEngine(LoopbackEngine):
    """``close`` frees nothing: weights live as long as the caller has the engine."""

    def _release(self) -> None:
        self.kept = list(self.weights.values())
        super()._release()


@mutant("contract.leaves_nothing", group="core")
class FlatBufferLivesWithTheEngine(LoopbackEngine):
    """A flat copy of all weights lives as long as the caller has the engine."""

    def _release(self) -> None:
        held = [one.param for one in self.weights.values() if one.param is not None]
        self.flat = torch.cat([one.detach().flatten() for one in held])
        super()._release()


@mutant("contract.leaves_nothing", group="core")
class ThreadStays(LoopbackEngine):
    """A thread that watches the ranks outlives ``close``."""

    def _build_model(self) -> None:
        super()._build_model()
        threading.Thread(target=threading.Event().wait, args=(20,)).start()


@mutant("contract.leaves_nothing", group="core")
class ChildStays(LoopbackEngine):
    """A helper process outlives ``close``."""

    def _build_model(self) -> None:
        super()._build_model()
        # The helper ends by itself when its pipe does: at the latest when the rank ends.
        _HELPERS.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


@mutant("contract.leaves_nothing", group="core")
class EnvironmentChanged(LoopbackEngine):
    """The engine hides devices from this process by the environment, and does not undo it."""

    def _build_model(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        super()._build_model()


@mutant("contract.leaves_nothing", group="core")
class VariableOfItsModule(LoopbackEngine):
    """A module of the engine changes the environment when it is imported."""

    def _build_model(self) -> None:
        importlib.import_module("engine_mutants.own_variable")
        super()._build_model()


@mutant("contract.leaves_nothing", group="core", world=2)
class GroupsLeft(LoopbackEngine):
    """``close`` does not destroy the process groups that the engine made."""

    def _close_groups(self) -> None:
        """Destroy nothing."""


# --- results --------------------------------------------------------------------------------------


class _Answers(LoopbackEngine):
    """An engine that changes the results of ``infer_batch``."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        given = super().infer_batch(
            batch, temperature=temperature, entropy=entropy, adapter=adapter
        )
        named = {f.name: getattr(given, f.name) for f in fields(TokenOutputs)}
        return TokenOutputs(
            **{k: None if v is None else self.changed(v, batch) for k, v in named.items()}
        )

    def changed(self, value: Tensor, batch: Batch) -> Tensor | None:
        del batch
        return value


@mutant("forward.one_token_documents", group="core")
class NanAtOneTokenDocuments(_Answers):
    """A document of one token gets NaN, the mean over nothing."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor:
        single = torch.repeat_interleave(
            torch.tensor(batch.lengths) == 1, torch.tensor(batch.lengths)
        )
        return value.masked_fill(single, float("nan"))


@mutant("forward.loss_weight", group="core")
class OutputsInFloat64(_Answers):
    """Outputs are float64."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor:
        return value.double()


@mutant("forward.loss_weight", group="core")
class OutputsNotDetached(_Answers):
    """Outputs are still attached to a graph."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor:
        return value.clone().requires_grad_()


@mutant("forward.loss_weight", group="core")
class OutputsPadded(_Answers):
    """Outputs keep the padding to a multiple of eight."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor:
        return pad(value, (0, -len(value) % 8))


@mutant("parallel.ulysses", group="ulysses", world=2)
class PrimaryAnswersAlone(_Answers):
    """Only the primary of the ranks that share documents returns outputs."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor | None:
        return value if self.topology.is_primary else None


@mutant("forward.pure", group="core")
class InferenceCounts(_Answers):
    """``weight_version`` increases with an inference."""

    def changed(self, value: Tensor, batch: Batch) -> Tensor:
        self._step += 1
        return value


@mutant("train.uneven_ranks", group="dp", world=2)
class LossOfOwnRank(LoopbackEngine):
    """Each rank reports the loss of its own tokens."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        comm = self.comm
        self.comm = SingleComm()
        try:
            return super()._sum_over_data_parallel(outputs)
        finally:
            self.comm = comm


@mutant("train.schedules", group="core")
class LossIsTensor(LoopbackEngine):
    """``train_batch`` reports its loss as a tensor."""

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        given = super().train_batch(batch, loss, denominator=denominator, temperature=temperature)
        return replace(given, loss=torch.tensor(given.loss))  # type: ignore[arg-type] - the defect


# --- ranks that leave the others waiting ----------------------------------------------------------


class _Empty(LoopbackEngine):
    """An engine that behaves differently on a rank without documents."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        if not batch.num_tokens:
            return self.without_documents()
        return super().infer_batch(batch, temperature=temperature, entropy=entropy, adapter=adapter)

    def without_documents(self) -> TokenOutputs:
        return TokenOutputs(log_probs=torch.zeros(0), entropy=torch.zeros(0))


@mutant("forward.no_documents", group="dp", world=2, deadline=0.05)
class EmptyRankSkipsCollectives(_Empty):
    """A rank without documents returns at once, and all other ranks wait for it."""


@mutant("forward.no_documents", group="dp", world=2)
class EmptyRankRaises(_Empty):
    """A rank without documents raises, and all other ranks wait for it."""

    def without_documents(self) -> TokenOutputs:
        raise IndexError("list index out of range")


@mutant("forward.no_documents", group="dp", world=2)
class EmptyRankDies(_Empty):
    """A rank without documents ends its process."""

    def without_documents(self) -> TokenOutputs:
        os._exit(6)


@mutant("forward.no_documents", group="dp", world=2, deadline=0.05)
class EmptyRankStalls(_Empty):
    """A rank without documents waits for a batch that never comes."""

    def without_documents(self) -> TokenOutputs:
        threading.Event().wait()
        return super().without_documents()
