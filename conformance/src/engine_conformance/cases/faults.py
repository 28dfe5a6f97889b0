"""What may go wrong with a checkpoint: typed errors on every rank, nothing half-written, nothing changed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from engine_api.capabilities import Capability
from engine_api.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    CheckpointWriteError,
    EngineError,
)
from engine_api.losses import sft_loss
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents, oracle_of, oracle_training, raised_everywhere, training_matches
from engine_conformance.cases._ranks import Trained, caught, local_batch, opened, save, summary, train
from engine_conformance.cases._state import read_rank_files, read_state
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.ranks import RankError, RankPool

PORTABLE = (Capability.PORTABLE_CHECKPOINT,)
_SMALL = 60_000  # bytes: more than any file of a checkpoint but the tensors


def load_all(
    setup: Setup, folders: Sequence[Path], work: Path, batch: PackedDocuments
) -> tuple[list[EngineError | None], Trained]:
    """A step, every damaged checkpoint between two saves, and another step; with each load's error."""
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        outputs = [engine.train_batch(mine, sft_loss)]
        save(engine, work / "before")
        errors = [caught(lambda folder=folder: engine.load_checkpoint(folder)) for folder in folders]
        save(engine, work / "after")
        outputs.append(engine.train_batch(mine, sft_loss))
        return errors, summary(engine, outputs)


def _tensors(folder: Path) -> Path:
    """The largest file, which holds tensors."""
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncated(folder: Path) -> None:
    file = _tensors(folder)
    os.truncate(file, file.stat().st_size // 2)


def _altered(folder: Path) -> None:
    with _tensors(folder).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def _incomplete(folder: Path) -> None:
    _tensors(folder).unlink()


def _half_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:200])


def _edit(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _newer(folder: Path) -> None:
    _edit(folder, lambda m: m.update(contract="99.0"))


def _pickled(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    torch.save({"model": {}}, folder / "model.pt")


DAMAGE: Mapping[str, tuple[Callable[[Path], None], type[CheckpointError]]] = {
    "truncated": (_truncated, CheckpointCorrupt),
    "altered": (_altered, CheckpointCorrupt),
    "incomplete": (_incomplete, CheckpointCorrupt),
    "half a manifest": (_half_manifest, CheckpointCorrupt),
    "newer": (_newer, CheckpointMismatch),
    "pickled": (_pickled, CheckpointMissing),
    "empty": (shutil.rmtree, CheckpointMissing),
}


@case(id="faults.failed_load", requires=PORTABLE)
def failed_load(target: Target) -> float:
    """A load that fails MUST raise its typed error on every rank, and leave weights, moments, step and generators.

    Truncated, altered by one bit, incomplete, of a newer contract, of another model, a pickle, absent.

    If this fails: tensors are copied in before all are checked; a rank that read its own good file goes on alone.
    """
    model, other, work = target.model(), target.model(num_layers=1, seed=4), target.scratch()
    batches = [documents(60, "uneven")]
    target.run(train, target.config(model), batches=batches, save_to=work / "good")
    target.run(train, target.config(other), batches=batches, save_to=work / "another model")
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(work / "good", work / name)
        damage(work / name)
    expected = {name: error for name, (_, error) in DAMAGE.items()} | {"another model": CheckpointMismatch}
    ranks = target.run(
        load_all,
        target.config(model),
        folders=[work / name for name in expected],
        work=work,
        batch=documents(61, "uneven"),
    )
    for index, (name, error) in enumerate(expected.items()):
        raised_everywhere(name, [errors[index] for errors, _ in ranks], error, faulty=_faulty(ranks, index))
    must(read_rank_files(work / "before") == read_rank_files(work / "after"), "generators", "moved by a failed load")
    assert_bitwise(read_state(work / "after"), read_state(work / "before"), name="state after failed loads")
    batch = documents(61, "uneven")
    want = oracle_training(str(model), (batch, batch))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


def _faulty(ranks: Sequence[tuple[list[EngineError | None], Trained]], index: int) -> list[int]:
    """Which ranks saw the fault themselves: at least one must; the others hear of it."""
    return [rank for rank, (errors, _) in enumerate(ranks) if isinstance(errors[index], CheckpointError)] or [0]


def save_without_room(
    setup: Setup, folder: Path, batch: PackedDocuments
) -> tuple[list[EngineError | None], list[bool], Trained]:
    """A save, two that find no room on one rank, one more, one to a name that is taken; with the errors.

    The limit on the size of a file stands for a full disk: writing fails in the middle of a file.
    """
    with opened(setup) as engine:
        outputs = [engine.train_batch(local_batch(engine, batch, setup.device), sft_loss)]
        save(engine, folder / "one")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        errors, left = [], []
        for rank in (0, engine.topology.world_size - 1):
            if engine.topology.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL, hard))
            errors.append(caught(lambda rank=rank: save(engine, folder / f"failed-{rank}")))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            left.append((folder / f"failed-{rank}").exists())
        save(engine, folder / "two")
        errors.append(caught(lambda: save(engine, folder / "two")))
        return errors, left, summary(engine, outputs)


@case(id="faults.no_room", requires=PORTABLE)
def no_room(target: Target) -> float:
    """A save that cannot be written MUST raise on every rank and leave the earlier checkpoint the latest.

    No folder under the final name, the engine goes on, the next save succeeds, a taken name is refused.

    If this fails: rank 0 renames before the others have written; ``latest`` is replaced first; a stall is a rank
    that raised while the others wait for it.
    """
    model, folder, batch = target.model(vocab_size=2048), target.scratch(), documents(62, "uneven")
    ranks = target.run(save_without_room, target.config(model), folder=folder, batch=batch)
    for index, faulty in enumerate(([0], [target.world - 1])):
        raised_everywhere("no room", [errors[index] for errors, _, _ in ranks], CheckpointWriteError, faulty=faulty)
    raised_everywhere("taken name", [errors[2] for errors, _, _ in ranks], CheckpointWriteError, faulty=[0])
    must(not any(any(left) for _, left, _ in ranks), "checkpoint", "a failed save left a folder under its final name")
    names = sorted(path.name for path in folder.iterdir())
    must(names == ["latest", "one", "two"], "folder", f"holds {names}, not latest, one and two")
    again = target.run(train, target.config(model), batches=[], load=folder)
    must(again[0].digest == ranks[0][2].digest, "weights", "the checkpoint after a failed one is not what was saved")
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, _, trained in ranks], want, oracle_of(str(model)))


def die_while_saving(setup: Setup, folder: Path, batch: PackedDocuments) -> None:
    """A save; a step; then the last rank is killed in the middle of writing a file."""
    with opened(setup) as engine:
        save(engine, folder / "one")
        engine.train_batch(local_batch(engine, batch, setup.device), sft_loss)
        if engine.topology.rank == engine.topology.world_size - 1:
            # The kernel kills whoever writes past the limit, unless the signal is ignored, as Python does.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save(engine, folder / "two")


@case(id="faults.killed_while_saving", requires=PORTABLE, world=(1, 2), slow=True)
def killed_while_saving(target: Target) -> float:
    """A save killed in the middle of a file MUST leave the earlier checkpoint the latest, and the next save possible.

    If this fails: files are written under their final name.
    """
    model, folder, batch = target.model(vocab_size=2048), target.scratch(), documents(63, "uneven")
    setup = target.setup(target.config(model))
    died = False
    with RankPool(target.world, device=target.device) as pool:  # its own: it dies
        try:
            pool.run(f"{__name__}:die_while_saving", setup=setup, folder=folder, batch=batch)
        except RankError as error:
            died = any(failure.kind == "died" for failure in error.failures)
            text = str(error)
            must(died, "fixture", f"no rank died while saving: {text}")
    must(died, "fixture", "the save of a tensor file of this size wrote no large file")
    must(not (folder / "two").exists(), "checkpoint", "a half-written one stands under its final name")
    must((folder / "latest").read_text().strip() == "one", "latest", "does not name the earlier checkpoint")
    ranks = target.run(train, target.config(model), batches=[batch], load=folder, save_to=folder / "two")
    must((folder / "latest").read_text().strip() == "two", "latest", "does not name the new checkpoint")
    want = oracle_training(str(model), (batch,))
    return training_matches(target, ranks, want, oracle_of(str(model)))
