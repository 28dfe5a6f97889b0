"""Faults of checkpoints: typed errors on every rank, nothing half-written, nothing changed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine_api.capabilities import Capability
from engine_api.config import OptimizerConfig
from engine_api.contract import Engine
from engine_api.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    CheckpointWriteError,
    EngineError,
)
from engine_api.manifest import seal
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    raised_everywhere,
    same_step,
    training_matches,
)
from engine_conformance.cases._ranks import (
    Trained,
    caught,
    digest,
    opened,
    save,
    step,
    summary,
    train,
    whole_weights,
)
from engine_conformance.cases._state import assert_same_state, read_manifest, read_rank_files
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases._written import written_weights
from engine_conformance.compare import assert_bitwise, assert_weights_close
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import read_safetensors
from engine_conformance.ranks import RankError, RankPool
from engine_conformance.tolerances import weight_tolerance

TYPES = (LM, VALUE)
OTHER = OptimizerConfig(name="torch.optim.SGD", lr=1e-2, clip_norm=None, kwargs={"momentum": 0.9})
_SMALL = 60_000  # bytes: more than any file of a checkpoint but the tensors


Loads = tuple[list[EngineError | None], list[str], Trained]


def load_all(
    setup: Setup, damaged: Sequence[Path], folders: Sequence[Path], batch: PackedDocuments
) -> Loads:
    """Take a step, load every damaged checkpoint between two looks, and take another step.

    Return each load's error. A look is the weights' digest, and a save where folders
    are given.
    """
    with opened(setup) as engine:
        outputs = [step(engine, setup, batch)]
        digests = [digest(whole_weights(engine))]
        for folder in folders[:1]:
            save(engine, folder)
        errors = [caught(lambda place=place: engine.load_checkpoint(place)) for place in damaged]
        digests.append(digest(whole_weights(engine)))
        for folder in folders[1:]:
            save(engine, folder)
        outputs.append(step(engine, setup, batch))
        return errors, digests, summary(engine, outputs)


def _tensors(folder: Path) -> Path:
    """Return the largest file, which holds tensors."""
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncated(folder: Path) -> None:
    file = _tensors(folder)
    os.truncate(file, file.stat().st_size // 2)


def _alter(name: str) -> Callable[[Path], None]:
    """Return a function that alters one bit of a checkpoint's file, in its middle."""

    def alter(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        # JSON stays readable if a digit becomes another: 0x30 to 0x39 differ from each other in
        # their last bit by pairs.
        places = range(len(content) // 2, len(content))
        text = name.endswith(".json")
        place = next(i for i in places if not text or chr(content[i]).isdigit())
        content[place] ^= 1
        (folder / name).write_bytes(content)

    return alter


def _each_altered(folder: Path) -> dict[str, tuple[Callable[[Path], None], type[CheckpointError]]]:
    """Return a damage for each file that the manifest lists."""
    files = sorted(read_manifest(folder)["files"])
    return {
        f"altered {name.replace('/', '-')}": (_alter(name), CheckpointCorrupt) for name in files
    }


def _incomplete(folder: Path) -> None:
    _tensors(folder).unlink()


def _half_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:200])


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    # The manifest is sealed again, so that only its content is wrong, not its checksum.
    seal(folder)


def _newer(folder: Path) -> None:
    _edit(folder, lambda m: m.update(contract="99.0"))


def _one_bit(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"step": 1', '"step": 3', 1))


def _drop(folder: Path, is_gone: Callable[[str], bool]) -> None:
    """Take the tensors from the manifest whose keys are told to be gone."""

    def keep(manifest: dict[str, Any]) -> None:
        tensors = manifest["tensors"]
        manifest["tensors"] = {key: tensors[key] for key in tensors if not is_gone(key)}

    _edit(folder, keep)


def _half_state(folder: Path) -> None:
    of_optimizer = next(key for key in read_manifest(folder)["tensors"] if _is_state(key))
    name = of_optimizer.rpartition(".")[0]
    _drop(folder, lambda key: key.rpartition(".")[0] == name)


def _no_state(folder: Path) -> None:
    _drop(folder, _is_state)


def _is_state(key: str) -> bool:
    return key.startswith("optim.")


def _no_state_of_old(folder: Path) -> None:
    """Take all state, and the record of steps, which earlier releases did not write."""
    _no_state(folder)

    def forget(manifest: dict[str, Any]) -> None:
        for entry in manifest["tensors"].values():
            entry.pop("stepped", None)

    _edit(folder, forget)


def _without_field(name: str) -> Callable[[Path], None]:
    """Return a function that takes one field of the optimizer's state from all weights."""
    return lambda folder: _drop(folder, lambda key: _is_state(key) and key.endswith(f".{name}"))


def _each_field(folder: Path) -> dict[str, tuple[Callable[[Path], None], type[CheckpointError]]]:
    """Return a damage for each field of the optimizer's state, which no weight then has."""
    saved = read_manifest(folder)["tensors"]
    fields = sorted({key.rpartition(".")[2] for key in saved if _is_state(key)})
    return {f"no {one} of any weight": (_without_field(one), CheckpointMismatch) for one in fields}


def _elsewhere(folder: Path) -> None:
    def lead_out(manifest: dict[str, Any]) -> None:
        shards = [shard for tensor in manifest["tensors"].values() for shard in tensor["shards"]]
        for shard in shards:
            shard["file"] = f"../good/{shard['file']}"

    _edit(folder, lead_out)


def _scalar_moment(folder: Path) -> None:
    """Replace a moment by a number, in the file and in the manifest, which is sealed again."""

    def replace(manifest: dict[str, Any]) -> None:
        key = next(key for key in manifest["tensors"] if key.endswith(".exp_avg"))
        entry = manifest["tensors"][key]
        name = entry["shards"][0]["file"]
        tensors = load_file(folder / name) | {key: torch.tensor(0.5)}
        save_file(tensors, folder / name)
        content = (folder / name).read_bytes()
        entry |= {"shape": [], "shards": [{"file": name, "offset": [], "shape": []}]}
        checksum = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"bytes": len(content), "sha256": checksum}

    _edit(folder, replace)


def _pickled(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    torch.save({"model": {}}, folder / "model.pt")


DAMAGE: Mapping[str, tuple[Callable[[Path], None], type[CheckpointError]]] = {
    "truncated": (_truncated, CheckpointCorrupt),
    "incomplete": (_incomplete, CheckpointCorrupt),
    "empty": (shutil.rmtree, CheckpointMissing),
}
# Where the format is the contract's.
DAMAGE_OF_FORMAT: Mapping[str, tuple[Callable[[Path], None], type[CheckpointError]]] = {
    "half a manifest": (_half_manifest, CheckpointCorrupt),
    "one bit of the manifest": (_one_bit, CheckpointCorrupt),
    "no state of one weight": (_half_state, CheckpointMismatch),
    "no state of any weight": (_no_state, CheckpointMismatch),
    "no state of any weight, nor a record of steps": (_no_state_of_old, CheckpointMismatch),
    "a moment that is a number": (_scalar_moment, CheckpointError),
    "files of another checkpoint": (_elsewhere, CheckpointCorrupt),
    "newer": (_newer, CheckpointMismatch),
    "pickled": (_pickled, CheckpointMissing),
}


@case(id="faults.failed_load", model_types=TYPES)
def failed_load(target: Target) -> float:
    """A failed load MUST raise its typed error on every rank and change nothing.

    Weights, moments, step and generators stay as they are. Truncated, altered by one
    bit in each file of the manifest in turn, incomplete, of a newer contract, of another
    model or optimizer, a pickle, absent; its optimizer state without one weight's, without a field
    of all weights, absent as a whole or of another shape, its tensors in another checkpoint's
    files.

    If this fails: tensors are copied in before all are checked; a rank that read its
    own good file goes on alone; files of the ranks' generators are trusted; state that
    is missing is made up; files are read wherever the manifest says.
    """
    model = target.model()
    other = target.model(num_layers=1, seed=4)
    work = target.scratch()
    batch = documents(61, "uneven")
    portable = Capability.PORTABLE_CHECKPOINT in target.capabilities
    target.run(
        train, target.config(model), batches=[documents(60, "uneven")], save_to=work / "good"
    )
    damages = {**DAMAGE, **_each_altered(work / "good")}
    if portable:
        damages |= {**DAMAGE_OF_FORMAT, **_each_field(work / "good")}
    target.run(
        train,
        target.config(other),
        batches=[documents(60, "uneven")],
        save_to=work / "another model",
    )
    other_optimizer = target.config(model, optimizer=OTHER)
    target.run(
        train,
        other_optimizer,
        batches=[documents(60, "uneven")],
        save_to=work / "another optimizer",
    )
    for name, (damage, _) in damages.items():
        shutil.copytree(work / "good", work / name)
        damage(work / name)
    mismatches = dict.fromkeys(("another model", "another optimizer"), CheckpointMismatch)
    expected = {name: error for name, (_, error) in damages.items()} | mismatches
    looks = [work / "before", work / "after"] if portable else []
    ranks = target.run(
        load_all,
        target.config(model),
        damaged=[work / name for name in expected],
        folders=looks,
        batch=batch,
    )
    for index, (name, error) in enumerate(expected.items()):
        raised_everywhere(
            name, [errors[index] for errors, _, _ in ranks], error, faulty=_faulty(ranks, index)
        )
    undisturbed = target.run(train, target.config(model), batches=[batch, batch])
    for rank, (_, digests, trained) in enumerate(ranks):
        must(digests[0] == digests[1], "weights", "changed by a failed load", where=f"rank {rank}")
        same_step(trained, undisturbed[rank], rank, after="a failed load")
    if portable:
        must(
            read_rank_files(looks[0]) == read_rank_files(looks[1]),
            "generators",
            "moved by a failed load",
        )
        assert_same_state(looks[1], looks[0], name="state after failed loads")
    want = oracle_training(str(model), (batch, batch))
    return training_matches(
        target, [trained for _, _, trained in ranks], want, oracle_of(str(model))
    )


def _faulty(ranks: Sequence[Loads], index: int) -> list[int]:
    """Return the ranks that saw the fault themselves, of which there must be at least one."""
    return [
        rank
        for rank, (errors, *_) in enumerate(ranks)
        if isinstance(errors[index], CheckpointError)
    ] or [0]


NoRoom = tuple[list[EngineError | None], list[str], Trained]


def save_without_room(setup: Setup, folder: Path, batch: PackedDocuments) -> NoRoom:
    """Save, then once for each rank without free space, once more, and once to a taken name.

    Return the errors, and ``latest`` after each save. The limit on the size of a file
    stands for a full disk: writing fails in the middle of a file.
    """
    with opened(setup) as engine:
        outputs = [step(engine, setup, batch)]
        save(engine, folder / "one")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        errors = []
        latest = [_latest(folder)]
        for rank in range(engine.topology.world_size):
            if engine.topology.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL, hard))
            errors.append(caught(lambda rank=rank: save(engine, folder / f"full-{rank}")))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            latest.append(_latest(folder))
        save(engine, folder / "two")
        errors.append(caught(lambda: save(engine, folder / "two")))
        return errors, latest, summary(engine, outputs)


def _latest(folder: Path) -> str:
    """Return the newest checkpoint's name according to the folder.

    It is nothing where the format is the engine's own.
    """
    file = folder / "latest"
    return file.read_text().strip() if file.is_file() else ""


def _without_room(target: Target, ranks: Sequence[NoRoom], folder: Path) -> list[str]:
    """Check each save without free space and return the names of those that succeeded.

    A rank that writes no large file is not disturbed.
    """
    saved = []
    for rank in range(target.world):
        name = f"full-{rank}"
        errors = [errors[rank] for errors, _, _ in ranks]
        if any(errors):
            raised_everywhere(
                f"no room on rank {rank}", errors, CheckpointWriteError, faulty=[rank]
            )
            must(
                not (folder / name).exists(),
                "checkpoint",
                "a failed save left a folder under its final name",
            )
            looks = [latest[rank] == latest[rank + 1] for _, latest, _ in ranks]
            must(all(looks), "latest", "a failed save has changed it", where=str(folder))
        else:
            must(
                (folder / name).exists(),
                "checkpoint",
                "a save raised nothing and wrote nothing",
                where=name,
            )
            saved.append(name)
    must(len(saved) < target.world, "no room", "nothing was raised, whichever rank could not write")
    return saved


@case(id="faults.no_room", model_types=TYPES)
def no_room(target: Target) -> float:
    """A save that cannot be written MUST raise on every rank and keep the earlier one the latest.

    No folder under the final name, the engine goes on, the next save succeeds, a taken
    name is refused. Each rank is without room in turn; one that writes no large file
    need not notice.

    If this fails: rank 0 renames before the others have written; ``latest`` is replaced
    first; a stall is a rank that raised while the others wait for it.
    """
    model = target.model(vocab_size=2048)
    folder = target.scratch()
    batch = documents(62, "uneven")
    ranks = target.run(save_without_room, target.config(model), folder=folder, batch=batch)
    saved = _without_room(target, ranks, folder)
    raised_everywhere(
        "taken name", [errors[-1] for errors, _, _ in ranks], CheckpointWriteError, faulty=[0]
    )
    if Capability.PORTABLE_CHECKPOINT in target.capabilities:
        names = sorted(path.name for path in folder.iterdir())
        wanted = sorted(["latest", "one", "two", *saved])
        must(names == wanted, "folder", f"holds {names}, not {wanted}")
    for place in (folder, *(folder / name for name in saved)):
        again = target.run(train, target.config(model), batches=[], load=place)
        must(
            again[0].digest == ranks[0][2].digest,
            "weights",
            "the checkpoint is not what was saved",
            where=str(place),
        )
    want = oracle_training(str(model), (batch,))
    return training_matches(
        target, [trained for _, _, trained in ranks], want, oracle_of(str(model))
    )


def die_while_saving(setup: Setup, folder: Path, batch: PackedDocuments, rank: int) -> None:
    """Save, take a step, then kill ``rank`` in the middle of writing a file.

    It is killed only if it writes a large one.
    """
    with opened(setup) as engine:
        save(engine, folder / "one")
        step(engine, setup, batch)
        if engine.topology.rank == rank:
            _die_past_small_files()
        save(engine, folder / "two")


def _die_past_small_files() -> None:
    """Let the kernel kill this process when it writes a large file."""
    # The kernel kills whoever writes past the limit, unless the signal is ignored, as Python does.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (_SMALL, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


@case(id="faults.killed_while_saving", world=(1, 2), slow=True)
def killed_while_saving(target: Target) -> float:
    """A save killed halfway MUST keep the earlier checkpoint the latest and the next save possible.

    If this fails: files are written under their final name.
    """
    model = target.model(vocab_size=2048)
    batch = documents(63, "uneven")
    # An engine may save from one rank alone: which one is found by trying, from the last.
    tries = {rank: target.scratch() for rank in reversed(range(target.world))}
    killed = next(
        (
            r
            for r, place in tries.items()
            if _dies(target, model, "die_while_saving", folder=place, batch=batch, rank=r)
        ),
        None,
    )
    must(
        killed is not None,
        "fixture",
        "the save of a tensor file of this size wrote no large file on any rank",
    )
    folder = tries[killed or 0]
    must(
        not (folder / "two").exists(),
        "checkpoint",
        "a half-written one stands under its final name",
    )
    # The folder's latest must be the first one, of no step: only then one step ends in the oracle's
    # weights.
    ranks = target.run(
        train, target.config(model), batches=[batch], load=folder, save_to=folder / "two"
    )
    again = target.run(train, target.config(model), batches=[], load=folder)
    must(
        again[0].digest == ranks[0].digest,
        "latest",
        "the folder's newest checkpoint is not the new one",
    )
    want = oracle_training(str(model), (batch,))
    return training_matches(target, ranks, want, oracle_of(str(model)))


def _dies(target: Target, model: Path, function: str, **arguments: Any) -> bool:
    """Return whether a rank died in a function of this module, and not all ended well."""
    with RankPool(target.world, device=target.device) as pool:  # its own: it dies
        try:
            pool.run(
                f"{__name__}:{function}",
                setup=target.setup(target.config(model)),
                **arguments,
            )
        except RankError as error:
            died = any(failure.kind == "died" for failure in error.failures)
            must(died, "fixture", f"no rank died while saving: {error}")
            return True
    return False


def save_onto_file(
    setup: Setup, folder: Path, batch: PackedDocuments
) -> tuple[list[EngineError | None], Trained]:
    """Save to, and load, a path that is a file or lies in one, then step and save well."""
    file = folder / "file"
    with opened(setup) as engine:
        if engine.topology.rank == 0:
            file.write_text("kept")
        errors = [
            caught(lambda place=place: save(engine, place)) for place in (file, file / "inside")
        ]
        errors.append(caught(lambda: engine.load_checkpoint(file)))
        if Capability.SAVE_HF in engine.capabilities:
            errors.append(caught(lambda: engine.save_hf(file / "inside")))
        output = step(engine, setup, batch)
        save(engine, folder / "good")
        return errors, summary(engine, [output])


@case(id="faults.file_in_the_way", model_types=TYPES)
def file_in_the_way(target: Target) -> float:
    """A save to a path that is or lies in a file MUST raise ``CheckpointWriteError``.

    It is raised on every rank, and the file is kept. ``save_hf`` raises as well.

    If this fails: rank 0 raises while the others wait for it; the file is overwritten.
    """
    model = target.model()
    folder = target.scratch()
    batch = documents(64, "uneven")
    ranks = target.run(save_onto_file, target.config(model), folder=folder, batch=batch)
    for index, name in enumerate(("a save to a file", "a save inside a file")):
        raised_everywhere(
            name, [errors[index] for errors, _ in ranks], CheckpointWriteError, faulty=[0]
        )
    raised_everywhere(
        "a load of a file", [errors[2] for errors, _ in ranks], CheckpointError, faulty=[0]
    )
    for index in range(3, len(ranks[0][0])):
        written = [errors[index] for errors, _ in ranks]
        raised_everywhere("save_hf inside a file", written, EngineError, faulty=[0])
    must((folder / "file").read_text() == "kept", "file", "was changed")
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


Folders = Mapping[str, Mapping[str, str]]


def _looks(place: Path) -> Folders:
    """Return the SHA-256 of every file in each folder of a place, by folder and name."""
    return {
        folder.name: {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for folder in sorted(place.iterdir())
    }


def write_without_room(setup: Setup, place: Path) -> tuple[list[list[EngineError | None]], Folders]:
    """Write a Hugging Face folder over another and under a new name, one rank short of disk space.

    Return the errors by the rank that has none, and what is there after all of them. The last write
    has disk space on every rank.
    """
    with opened(setup) as engine:
        _connect(engine, place.with_name(f"{place.name}-first"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        errors = list[list[EngineError | None]]()
        for rank in range(engine.topology.world_size):
            if engine.topology.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL, hard))
            errors.append(
                [
                    caught(lambda name=name: engine.save_hf(place / name))
                    for name in ("over", f"new-{rank}")
                ]
            )
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        there = _looks(place)
        engine.save_hf(place / "over")
        return errors, there


@case(id="faults.save_hf", since="1.4", requires=(Capability.SAVE_HF,), world=(1, 2))
def save_hf_without_room(target: Target) -> float:
    """A ``save_hf`` that fails MUST raise on every rank and leave the folder as it was.

    A folder that was not there is not there after it, and nothing else is. The next one succeeds.

    If this fails: files are written under their final names, so that a served model's folder has
    half of its weights; an unfinished folder stays beside it.
    """
    model = target.model(vocab_size=2048)
    place = target.scratch()
    shutil.copytree(target.model(vocab_size=2048, seed=9), place / "over")
    (place / "over" / "README.md").write_text("of the user")
    before = _looks(place)
    ranks = target.run(write_without_room, target.config(model), place=place)
    wrote = list[int]()
    for rank in range(target.world):
        for index in range(2):
            errors = [errors[rank][index] for errors, _ in ranks]
            if any(errors):
                name = f"save_hf without room on rank {rank}"
                raised_everywhere(name, errors, EngineError, faulty=[rank])
            else:
                wrote.append(rank)
    must(
        set(wrote) != set(range(target.world)),
        "fixture",
        "a tensor file of this size was written without room on each rank",
    )
    # A rank that writes no large file is not disturbed, and what it wrote is complete.
    if not wrote:
        for rank, (_, there) in enumerate(ranks[:1]):
            must(there == before, "save_hf", _difference(there, before), where=f"rank {rank}")
    else:
        left = {name for name in ranks[0][1] if name not in before}
        whole = {f"new-{rank}" for rank in wrote}
        must(left == whole, "save_hf", f"{sorted(left - whole)} stays after one that failed")
    return assert_bitwise(
        written_weights(place / "over"), read_safetensors(model), name="the next save_hf"
    )


def _difference(there: Folders, before: Folders) -> str:
    """Return the folders and files in which two looks differ."""
    found = [name for name in {*there, *before} if there.get(name) != before.get(name)]
    files = [
        f"{name}/{file}"
        for name in found
        for file in {*there.get(name, {}), *before.get(name, {})}
        if there.get(name, {}).get(file) != before.get(name, {}).get(file)
    ]
    return f"{', '.join(sorted(files or found)[:5])} differ after one that failed"


def die_while_writing(setup: Setup, folder: Path, rank: int) -> None:
    """Write a Hugging Face folder, and kill ``rank`` in the middle of a file.

    It is killed only if it writes a large one.
    """
    with opened(setup) as engine:
        _connect(engine, folder.with_name("first"))
        if engine.topology.rank == rank:
            _die_past_small_files()
        engine.save_hf(folder)


def _connect(engine: Engine, folder: Path) -> None:
    """Write a folder while nothing limits the size of files.

    NCCL connects a group at its first use through files of shared memory, which the limit on the
    size of files is meant to spare.
    """
    engine.save_hf(folder)


@case(
    id="faults.killed_in_save_hf",
    since="1.4",
    requires=(Capability.SAVE_HF,),
    world=(1,),
    slow=True,
)
def killed_in_save_hf(target: Target) -> float:
    """A ``save_hf`` that is killed halfway MUST leave the folder as it was, and the next succeed.

    If this fails: files are written under their final names; remains of the killed one are in the
    way of the next.
    """
    model = target.model(vocab_size=2048)
    place = target.scratch()
    shutil.copytree(target.model(vocab_size=2048, seed=9), place / "over")
    before = _looks(place)
    died = _dies(target, model, "die_while_writing", folder=place / "over", rank=0)
    must(died, "fixture", "a folder of this size was written without a large file")
    there = {name: files for name, files in _looks(place).items() if name in before}
    must(there == before, "save_hf", _difference(there, before))
    target.run(write_folder, target.config(model), folder=place / "over")
    return assert_bitwise(
        written_weights(place / "over"), read_safetensors(model), name="the next save_hf"
    )


def write_folder(setup: Setup, folder: Path) -> None:
    """Write a Hugging Face folder."""
    with opened(setup) as engine:
        engine.save_hf(folder)


LinkSaves = tuple[dict[str, EngineError | None], Trained]


def save_through_links(setup: Setup, place: Path, batch: PackedDocuments) -> LinkSaves:
    """Go on from a checkpoint, and save where links are in the way, then under a free name.

    Return the error of each save, and the step before them.
    """
    checkpoints = place / "checkpoints"
    with opened(setup) as engine:
        engine.load_checkpoint(checkpoints / "one")
        output = step(engine, setup, batch)
        errors = {
            name: caught(lambda name=name: save(engine, checkpoints / name))
            for name in ("linked", "dangling")
        }
        if Capability.SAVE_HF in engine.capabilities:
            errors["served"] = caught(lambda: engine.save_hf(place / "served"))
        save(engine, checkpoints / "two")
        return errors, summary(engine, [output])


@case(id="faults.links", since="1.4", model_types=TYPES, world=(1, 2))
def links(target: Target) -> float:
    """A save whose name is a link MUST keep what the link names, or be refused on every rank.

    A checkpoint that a link names stays as it is, bit for bit, and so does a link that is refused,
    which may lead nowhere. ``save_hf`` through a link to a folder, as a server has one, writes that
    folder, keeps its other files and the link, or changes nothing. No other file is left.

    If this fails: an earlier checkpoint is overwritten or removed through the link; the link is
    replaced by a folder, so that the server goes on with the weights of before.
    """
    model = target.model()
    place = target.scratch()
    checkpoints = place / "checkpoints"
    batches = (documents(65, "uneven"), documents(66, "uneven"))
    target.run(train, target.config(model), batches=batches[:1], save_to=checkpoints / "one")
    (checkpoints / "linked").symlink_to("one")
    (checkpoints / "dangling").symlink_to("gone")
    checkpoint = _look(checkpoints / "one")
    (place / "disk").mkdir()
    served = place / "disk" / "model"
    shutil.copytree(target.model(seed=9), served)
    (served / "README.md").write_text("of the user")
    (place / "served").symlink_to(served)
    folder = _look(served)

    ranks: list[LinkSaves] = target.run(
        save_through_links, target.config(model), place=place, batch=batches[1]
    )
    errors = {name: [one[name] for one, _ in ranks] for name in ranks[0][0]}
    for name, raised in errors.items():
        if any(raised):
            raised_everywhere(f"a save to the link {name}", raised, EngineError, faulty=[0])
    there = _look(checkpoints / "one")
    must(there == checkpoint, "the checkpoint that a link names", "was changed")
    for name, leads in (("linked", "one"), ("dangling", "gone")):
        link = checkpoints / name
        stays = link.is_symlink() and link.readlink() == Path(leads)
        must(stays or not any(errors[name]), f"the link {name}", "was changed by a refused save")
    if "served" in errors:
        _serves(place, served, folder, errors["served"], ranks[0][1].weights)
    _is_tidy(place, {"checkpoints", "disk", "served"})
    _is_tidy(place / "disk", {"model"})
    _is_tidy(checkpoints, {"one", "two", "linked", "dangling", "gone", "latest"})
    want = oracle_training(str(model), batches)
    trained = target.run(train, target.config(model), batches=[], load=checkpoints / "two")
    oracle = oracle_of(str(model))
    bounds = weight_tolerance(want, target.torch_dtype, layers=oracle.config.num_layers)
    return assert_weights_close(
        trained[0].weights, want.params, bounds, start=oracle.trainable, factors={}
    )


def _look(folder: Path) -> Mapping[str, str]:
    """Return the SHA-256 of every file in a folder, by name."""
    return _looks(folder.parent)[folder.name]


def _is_tidy(place: Path, expected: set[str]) -> None:
    more = {path.name for path in place.iterdir()} - expected
    must(not more, "a save to a link", f"leaves {sorted(more)} behind")


def _serves(
    place: Path,
    served: Path,
    before: Mapping[str, str],
    errors: Sequence[EngineError | None],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Require the folder behind a link to be written through it, or left alone."""
    link = place / "served"
    stays = link.is_symlink() and link.readlink() == served
    must(stays, "save_hf", "the link to a folder is no such link any more")
    after = _look(served)
    if any(errors):
        must(after == before, "save_hf", "changed the folder behind a link, and was refused")
        return
    must(
        after.get("README.md") == before["README.md"],
        "save_hf",
        "another file of the folder behind a link was changed",
    )
    assert_bitwise(written_weights(served), weights, name="save_hf through a link")
