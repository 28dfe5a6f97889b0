"""Defects of saving and loading, some of them in functions that all engines share."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine_api import base, checkpoint, manifest
from engine_api.comm import Comm
from engine_api.errors import EngineError
from engine_api.manifest import Entry
from engine_api.results import CheckpointHandle, CheckpointInfo
from engine_api.schedule import lr_factor
from engine_api.weights import ShardSpec
from engine_loopback.engine import LoopbackEngine
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

GROUP = "portable-checkpoint"
Shards = dict[str, tuple[Tensor, ShardSpec]]
Extra = Mapping[str, Any] | None


@contextmanager
def _instead(name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of ``engine_api.checkpoint`` inside the context."""
    with patch.object(checkpoint, name, wrap(getattr(checkpoint, name))):
        yield


# --- state that is restored -----------------------------------------------------------------------


@mutant("checkpoint.resume_bitwise", group=GROUP, seen_in="NeMo-RL #3171, #3345")
class OptimizerNotRestored(LoopbackEngine):
    """A load restores the weights, and the optimizer starts with empty moments."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        super()._install_state(
            {key: value for key, value in tensors.items() if not key.startswith("optim.")}
        )


@mutant("checkpoint.gold", group=GROUP, seen_in="Megatron-Bridge #5680")
class DummyStepOnLoad(LoopbackEngine):
    """The optimizer makes a step at rate zero after a load, which lets its moments decay."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        super()._install_state(tensors)
        for param in self.trained():
            param.grad = torch.zeros_like(param)
        self._apply_optimizer(0.0)
        self._zero_grad()


@mutant("checkpoint.gold", group=GROUP, seen_in="Automodel #3191")
class StepAheadOfMoments(LoopbackEngine):
    """The optimizer's step count is one more after a load, so that the correction is wrong."""

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        super().restore_state(optimizer, weight, field, value + 1 if field == "step" else value)


@mutant("checkpoint.gold", group=GROUP)
class StepCountNotRestored(LoopbackEngine):
    """Moments are restored without their step count: the bias correction starts again."""

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        value = torch.zeros(()) if field == "step" else value
        super().restore_state(optimizer, weight, field, value)


@mutant("checkpoint.foreign", group=GROUP)
class MomentsSwapped(LoopbackEngine):
    """First and second moments are saved and read under each other's names: resuming is right."""

    def state_shards(self) -> Shards:
        return {_other_moment(key): box for key, box in super().state_shards().items()}

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        super()._install_state({_other_moment(key): value for key, value in tensors.items()})


def _other_moment(key: str) -> str:
    stem, _, field = key.rpartition(".")
    swapped = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    return f"{stem}.{swapped.get(field, field)}"


@mutant("checkpoint.resume_moe", group="moe")
class ExpertMomentsReversed(LoopbackEngine):
    """The experts' moments are read in the reverse order of the experts."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        def other(key: str) -> str:
            if not key.startswith("optim."):
                return key
            return re.sub(
                r"experts\.(\d+)", lambda m: f"experts.{self.shape.experts - 1 - int(m[1])}", key
            )

        super()._install_state({key: tensors[other(key)] for key in tensors})


@mutant("checkpoint.foreign", group=GROUP)
class ScheduleStartsAnew(LoopbackEngine):
    """The schedule starts again from its first rate after a load; the right rate is reported."""

    first = 0

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        info = super().load_checkpoint(directory)
        self.first = info.step
        return info

    def _apply_optimizer(self, lr: float) -> None:
        optimizer = self._require_optimizer("step")
        super()._apply_optimizer(
            optimizer.lr * lr_factor(self.config.schedule, self._step - self.first)
        )


@mutant("checkpoint.resume_bitwise", group=GROUP)
class StepNotRestored(LoopbackEngine):
    """``weight_version`` and the schedule start at zero after a load."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        info = super().load_checkpoint(directory)
        self._step = 0
        return info


@mutant("checkpoint.resume_bitwise", group=GROUP)
class OnlyTorchGeneratorRestored(LoopbackEngine):
    """A load restores torch's generator, and leaves those of Python and NumPy as they are."""

    def _set_rng_state(self, state: Mapping[str, Any]) -> None:
        super()._set_rng_state(self._rng_state() | {"torch": state["torch"]})


@mutant("checkpoint.resume_bitwise", group=GROUP, world=2)
class GeneratorsOfRankZero(LoopbackEngine):
    """Rank 0's generators are saved for every rank."""

    def _rng_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.comm.all_gather(super()._rng_state())[0]
        return state


@mutant("checkpoint.resume_bitwise", group=GROUP)
class LoadKeepsGradients(LoopbackEngine):
    """A load keeps the gradients of before."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        with patch.object(self, "_drop_gradients", lambda: None):
            return super().load_checkpoint(directory)


@mutant("checkpoint.resume_bitwise", group=GROUP)
class ExtraDropped(LoopbackEngine):
    """The caller's ``extra`` of ``save_checkpoint`` is not written."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        del extra
        return super().save_checkpoint(directory)


@mutant("faults.links", group="core")
class SavedThroughLink(LoopbackEngine):
    """A save to a name that links to an earlier checkpoint replaces that checkpoint."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        place = Path(directory)
        if place.is_symlink() and self.layout.rank == 0:
            shutil.rmtree(place.resolve(), ignore_errors=True)
        return super().save_checkpoint(place.resolve(), extra=extra)


@mutant("checkpoint.into_stepped", group=GROUP)
class StepCountOfBefore(LoopbackEngine):
    """A load into an engine that has stepped keeps the optimizer's step count of before."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        states = {} if self.optimizer is None else self.optimizer.state
        before = {param: state["step"].clone() for param, state in states.items()}
        super()._install_state(tensors)
        for param, count in before.items():
            states[param]["step"] = count


@mutant("checkpoint.into_stepped", group=GROUP)
class MomentsOfBefore(LoopbackEngine):
    """A load installs moments only where there are none yet."""

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        value = self.before.get(weight.name, {}).get(field, value)
        super().restore_state(optimizer, weight, field, value)

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        states = {} if self.optimizer is None else self.optimizer.state
        self.before: dict[str, Mapping[str, Tensor]] = {
            weight.name: {k: v for k, v in states[weight.held].items() if k != "step"}
            for weight in self.held_and_trained()
            if weight.held in states
        }
        super()._install_state(tensors)


@mutant("checkpoint.into_stepped", group=GROUP)
class ScheduleOfBefore(LoopbackEngine):
    """A load into an engine that has stepped leaves the schedule where it was."""

    position = 0

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        stepped = self.position
        info = super().load_checkpoint(directory)
        self.position = stepped or info.step
        return info

    def _apply_optimizer(self, lr: float) -> None:
        optimizer = self._require_optimizer("step")
        super()._apply_optimizer(optimizer.lr * lr_factor(self.config.schedule, self.position))
        self.position += 1


@mutant("checkpoint.into_stepped", group=GROUP)
class LatestByText(LoopbackEngine):
    """Of two checkpoints the one whose name comes last in the alphabet is the latest."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        steps = sorted(Path(directory).glob("step-*/manifest.json"))
        return super().load_checkpoint(steps[-1].parent if steps else directory)


@mutant("checkpoint.into_stepped", group=GROUP)
class LatestBelieved(LoopbackEngine):
    """The checkpoint that ``latest`` names is loaded, even if a newer one stands next to it."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        pointer = Path(directory) / "latest"
        named = Path(directory) / pointer.read_text().strip() if pointer.is_file() else directory
        return super().load_checkpoint(named)


@mutant("checkpoint.into_stepped", group=GROUP)
class SecondSaveNotWritten(LoopbackEngine):
    """A save under the name of an earlier one is not written."""

    def _save_checkpoint(self, directory: Path, extra: dict[str, Any]) -> CheckpointHandle:
        handle: Future[CheckpointInfo] = Future()
        if not (directory / "manifest.json").exists():
            return super()._save_checkpoint(directory, extra)
        handle.set_result(
            CheckpointInfo(path=directory, step=self.weight_version, extra=extra, num_bytes=0)
        )
        return handle


@mutant("checkpoint.resume_bfloat16", group="bf16")
class MomentsInComputedDtype(LoopbackEngine):
    """Moments are kept in the dtype of the computation, not in the masters'."""

    def _apply_optimizer(self, lr: float) -> None:
        super()._apply_optimizer(lr)
        if self.optimizer is None or self.config.precision.compute == "float32":
            return
        for state in self.optimizer.state.values():
            for field, value in state.items():
                state[field] = value.bfloat16().to(value.dtype) if value.dim() else value


@mutant("checkpoint.resume_bfloat16", group="bf16")
class MomentsLoadedInComputedDtype(LoopbackEngine):
    """A load rounds the moments of float32 masters if the computation is in bfloat16."""

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        if value.dim() and self.config.precision.compute == "bfloat16":
            value = value.bfloat16().to(value.dtype)
        super().restore_state(optimizer, weight, field, value)


# --- state that is written ------------------------------------------------------------------------


@mutant("checkpoint.resume_bitwise", group=GROUP)
class MomentsSavedInBfloat16(LoopbackEngine):
    """Moments are rounded to bfloat16 on their way to the file, which says float32."""

    def state_shards(self) -> Shards:
        state = super().state_shards()
        return {
            k: (t.bfloat16().to(t.dtype) if k.startswith("optim.") else t, s)
            for k, (t, s) in state.items()
        }


@mutant("checkpoint.resume_moe", group=GROUP, seen_in="NeMo-RL #3544")
class UnusedMomentsBecomeNan(LoopbackEngine):
    """Second moments that are zero, of rows that no token used, are saved as NaN."""

    def state_shards(self) -> Shards:
        state = super().state_shards()
        return {
            k: (t * (t / t) if k.endswith(".exp_avg_sq") else t, s) for k, (t, s) in state.items()
        }


@mutant("checkpoint.keys", group=GROUP)
class WrapperInKeys(LoopbackEngine):
    """Keys carry a wrapper's ``module.``, on saving and on loading."""

    def key_of(self, weight: Weight) -> str:
        return super().key_of(weight).replace("model.", "model.module.", 1)


@mutant("checkpoint.keys", group=GROUP, seen_in="NeMo-RL #227")
class TiedHeadSaved(LoopbackEngine):
    """A head that is tied to the embedding is written as well."""

    def state_shards(self) -> Shards:
        state = super().state_shards()
        value, box = state["model.model.embed_tokens.weight"]
        if self.shape.tied:
            state["model.lm_head.weight"] = (value.clone(), box)
        return state


@mutant("parallel.pp_checkpoint", group="pp", world=2, seen_in="Megatron-LM #7452, NeMo-RL #671")
class LayersNumberedWithinStage(LoopbackEngine):
    """A pipeline stage saves its layers under its own numbers."""

    def state_shards(self) -> Shards:
        first = self.model.own_layers().start
        own = {key: box for key, box in super().state_shards().items() if not box[1].is_empty}
        return {
            re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - first}", key): own[key]
            for key in own
        }


@mutant(
    "parallel.tp_checkpoint",
    group="tp",
    world=2,
    seen_in="verl, miles and AReaL state it as a limit",
)
class ShardsWithoutPlace(LoopbackEngine):
    """Each rank saves its shard as a whole: only the same ranks could put the weights together."""

    def state_shards(self) -> Shards:
        return {
            key: (value, ShardSpec.whole(value.shape))
            for key, (value, _) in super().state_shards().items()
        }


@mutant("checkpoint.keys", group=GROUP, world=2)
class CopiesSaved(LoopbackEngine):
    """Every data-parallel rank writes its copy of the weights."""

    def state_shards(self) -> Shards:
        return {
            key: (value, replace(box, replica=0))
            for key, (value, box) in super().state_shards().items()
        }


@mutant("checkpoint.resume_bitwise", group=GROUP)
class SaveDraws(LoopbackEngine):
    """A save draws a temporary file's name from torch's generator after noting its state."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        handle = super().save_checkpoint(directory, extra=extra)
        torch.randint(1 << 30, ())
        return handle


@mutant("faults.no_room", group=GROUP)
class WrittenUnderFinalName(LoopbackEngine):
    """The folder has its final name before anything is in it."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        with _instead(
            "_prepare",
            lambda prepare: lambda final, partial: (prepare(final, partial), final.mkdir()),
        ):
            return super().save_checkpoint(directory, extra=extra)


@mutant("faults.killed_while_saving", group=GROUP)
class LatestBeforeRename(LoopbackEngine):
    """``latest`` names the new checkpoint before it is written."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        def early(prepare: Callable[..., None]) -> Callable[..., Any]:
            return lambda final, partial: (
                prepare(final, partial),
                (final.parent / "latest").write_text(final.name),
            )

        with _instead("_prepare", early):
            return super().save_checkpoint(directory, extra=extra)


# --- asynchronous saves ---------------------------------------------------------------------------


@mutant("checkpoint.asynchronous", group="async-checkpoint")
class AsyncSaveReadsLiveTensors(LoopbackEngine):
    """An asynchronous save writes the tensors themselves, which the next step changes."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        live = self.state_shards()
        with _instead(
            "write", lambda write: lambda place, **rest: write(place, **rest | {"state": live})
        ):
            return super().save_checkpoint(directory, extra=extra)


@mutant("checkpoint.asynchronous", group="async-checkpoint")
class ExtraAsItIsLater(LoopbackEngine):
    """An asynchronous save writes the caller's ``extra`` as it is later."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        with patch.object(base, "_deep_copy_json", lambda given: given):
            return super().save_checkpoint(directory, extra=extra)


@mutant("checkpoint.asynchronous_failure", group="async-checkpoint")
class CloseSwallowsFailure(LoopbackEngine):
    """``close`` waits for a save, and says nothing if it has failed."""

    def close(self) -> None:
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.exception()
        super().close()


@mutant("checkpoint.asynchronous_failure", group="async-checkpoint")
class AsyncFailureSwallowed(LoopbackEngine):
    """The failure of an asynchronous save is not reported by the next call."""

    def _wait_for_save(self) -> None:
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.exception()


@mutant("checkpoint.asynchronous", group="async-checkpoint")
class SaveWaits(LoopbackEngine):
    """An asynchronous save returns when its files are written."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        handle = super().save_checkpoint(directory, extra=extra)
        # A failure is the next call's, as it is the engine's.
        with suppress(EngineError):
            handle.result()
        return handle


@mutant("checkpoint.asynchronous", group="async-checkpoint")
class HandleDoneEarly(LoopbackEngine):
    """The handle of an asynchronous save is done as soon as the save has begun."""

    def save_checkpoint(self, directory: Path | str, *, extra: Extra = None) -> CheckpointHandle:
        super().save_checkpoint(directory, extra=extra)
        early: Future[CheckpointInfo] = Future()
        early.set_result(
            CheckpointInfo(
                path=Path(directory), step=self._step, extra=dict(extra or {}), num_bytes=0
            )
        )
        return early


# --- loads that must fail -------------------------------------------------------------------------


@mutant("faults.failed_load", group=GROUP)
class ChecksumNotChecked(LoopbackEngine):
    """A load checks the manifest only, and trusts the files."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        with _instead("verify_files", lambda _: lambda *_: None):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class SizeOnlyChecked(LoopbackEngine):
    """A load compares the sizes of files without their checksums: one altered bit passes."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        def sizes(verify: Callable[..., None]) -> Callable[..., None]:
            def has_size(path: Path, size: int) -> bool:
                return path.is_file() and path.stat().st_size == size

            def verify_others(folder: Path, files: Mapping[str, Any]) -> None:
                others = {
                    name: wanted
                    for name, wanted in files.items()
                    if not has_size(folder / name, wanted["bytes"])
                }
                verify(folder, others)

            return verify_others

        with _instead("verify_files", sizes):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class GeneratorsTrusted(LoopbackEngine):
    """A load verifies the files of tensors, and trusts those of the ranks' generators."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        def tensors(verify: Callable[..., None]) -> Callable[..., None]:
            return lambda folder, files: verify(
                folder, {name: f for name, f in files.items() if not name.startswith("rank-")}
            )

        with _instead("verify_files", tensors):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP, world=2)
class FirstFileChecked(LoopbackEngine):
    """A load verifies the first rank's files, and trusts those of the other ranks."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        def first(verify: Callable[..., None]) -> Callable[..., None]:
            return lambda folder, files: verify(
                folder, {name: f for name, f in files.items() if "00000" in name}
            )

        with _instead("verify_files", first):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class StateDroppedBeforeRead(LoopbackEngine):
    """The optimizer's state is dropped before a checkpoint is read, which may then fail."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        if self.optimizer is not None:
            self.optimizer.state.clear()
        return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class OtherModelAccepted(LoopbackEngine):
    """Weights that a checkpoint lacks keep their values, as with ``strict=False``."""

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        return {key: box for key, box in super()._state_layout(entries).items() if key in entries}

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        own = {self.key_of(weight): weight.local.clone() for weight in self.weights.values()}
        super()._install_state(own | dict(tensors))


@mutant("faults.failed_load", group=GROUP)
class OtherOptimizerAccepted(LoopbackEngine):
    """The state of a different optimizer is installed as the engine's own."""

    def same_optimizer(self, fields: set[str]) -> None:
        del fields


@mutant("faults.failed_load", group=GROUP)
class MissingStateMadeUp(LoopbackEngine):
    """Optimizer state that a checkpoint lacks starts with zeros."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        with _instead("check_optimizer_state", lambda _: lambda *_: None):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class AllStateMadeUp(LoopbackEngine):
    """A checkpoint without the state of any weight is loaded, and the optimizer starts again."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        def if_any(check: Callable[..., None]) -> Callable[..., None]:
            def check_some(folder: Path, found: manifest.Manifest, fields: Any) -> None:
                if any(key.startswith("optim.") for key in found.tensors):
                    check(folder, found, fields)

            return check_some

        with _instead("check_optimizer_state", if_any):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class FilesReadAnywhere(LoopbackEngine):
    """Tensors are read from any file that the manifest names, listed or not."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        def anywhere(raw: dict[str, Any], *_: Any) -> manifest.Shard:
            return manifest.Shard(
                file=raw["file"], offset=tuple(raw["offset"]), shape=tuple(raw["shape"])
            )

        with patch.object(manifest, "_shard", anywhere):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class ManifestNotChecked(LoopbackEngine):
    """The files of a checkpoint are checked against the manifest, the manifest against nothing."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        with patch.object(manifest, "_check_seal", lambda *_: True):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class NewerContractAccepted(LoopbackEngine):
    """A checkpoint of a newer contract is read like one of this contract."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        with patch.object(manifest, "contract_problem", lambda _: None):
            return super().load_checkpoint(directory)


@mutant("faults.failed_load", group=GROUP)
class PickleAccepted(LoopbackEngine):
    """A pickle is loaded from a folder without a manifest."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        file = Path(directory) / "model.pt"
        if not file.exists():
            return super().load_checkpoint(directory)
        for name, tensor in torch.load(file, weights_only=False)["model"].items():
            self.weights[name].local.copy_(tensor)
        return CheckpointInfo(path=file, step=self._step, extra={}, num_bytes=file.stat().st_size)


class _Alone:
    """A control plane whose ranks receive nothing from each other."""

    def __init__(self, comm: Comm) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def close(self) -> None:
        """Do nothing, since nothing was made."""


@mutant("faults.failed_load", group=GROUP, world=2)
class ErrorOnOneRank(LoopbackEngine):
    """A rank that finds its file damaged raises alone, and all others use the new weights."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        comm = self._save_comm
        self._save_comm = _Alone(comm)
        try:
            return super().load_checkpoint(directory)
        finally:
            self._save_comm = comm


@mutant("checkpoint.asynchronous_steps", group="async-checkpoint", world=2, deadline=0.2)
class SaveInTheTrainingsGroup(LoopbackEngine):
    """The ranks of an asynchronous save exchange messages in the process group of the training.

    The messages come late, as on a busy machine.
    """

    @property
    def _checkpoint_comm(self) -> Comm:
        return self.comm

    def _checkpoint_writer(self, *, copied: bool) -> Callable[..., CheckpointInfo]:
        write = super()._checkpoint_writer(copied=copied)

        def write_later(*args: Any, **kwargs: Any) -> CheckpointInfo:
            time.sleep(0.3)
            return write(*args, **kwargs)

        return write_later
