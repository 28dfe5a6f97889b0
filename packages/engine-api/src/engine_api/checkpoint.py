"""The portable checkpoint: safetensors shards keyed by Hugging Face names, and a manifest.

::

    step-000120/            written as step-000120.partial, renamed when complete
      manifest.json         contract, engine, topology, tensors, sizes and checksums
      manifest.sha256       the manifest's own checksum
      state/00000.safetensors   rank 0's boxes of model.<name>, optim.<name>.exp_avg, …
      rank-00000.json       rank 0's RNG
    latest                  the newest folder's name, replaced atomically after the rename

A process that is killed between the rename and the replacement leaves an outdated ``latest``:
`locate` takes the newest complete ``step-N`` all the same, and `repair` updates the pointer.

A reader asks for boxes; the rank, engine and layout that wrote them do not matter. An engine with a
format of its own for the files under ``state`` uses `write_files` and `verify`; everything else is
the same. torch.distributed.checkpoint is not used because its index is a pickle, and reading a
pickle runs code.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api.comm import Comm, together
from engine_api.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
    CheckpointWriteError,
    ConfigError,
)
from engine_api.folders import give_common_mode, sync, sync_folders, write_text
from engine_api.manifest import (
    DIGEST,
    MANIFEST,
    PORTABLE,
    Entry,
    Manifest,
    Shard,
    field_of,
    fingerprint,
    is_inside,
    read_manifest,
    verify_files,
    weight_of,
)
from engine_api.results import CheckpointInfo
from engine_api.weights import ShardSpec

if TYPE_CHECKING:
    import torch

log = logging.getLogger("engine_api")

LATEST = "latest"
# It matches a folder's whole name; of two checkpoints the one with the higher number is newer.
_STEP = re.compile(r"step-(\d+)")
State = Mapping[str, "tuple[torch.Tensor, ShardSpec]"]
# A function that writes one rank's part into the unfinished folder, and returns the entries of its
# tensors and the names of its files.
Save = Callable[[Path], tuple[dict[str, Entry], Sequence[str]]]


def write(
    directory: Path,
    *,
    comm: Comm,
    state: State,
    rank_state: Mapping[str, Any],
    step: int,
    engine: str,
    topology: Mapping[str, int],
    extra: Mapping[str, Any],
) -> CheckpointInfo:
    """Write a portable checkpoint.

    See `write_files` for the other arguments and the errors.

    Args:
        state: key → (this rank's box on any device, its place in the whole tensor). Replicas are
            written once.
    """
    own = {key: box for key, box in state.items() if box[1].replica == 0 and not box[1].is_empty}
    return write_files(
        directory,
        comm=comm,
        num_bytes=sum(tensor.nbytes for tensor, _ in own.values()),
        save=lambda partial: _save_boxes(partial, comm.rank, own),
        rank_state=rank_state,
        step=step,
        engine=engine,
        topology=topology,
        extra=extra,
    )


def write_files(
    directory: Path,
    *,
    comm: Comm,
    num_bytes: int,
    save: Save,
    rank_state: Mapping[str, Any],
    step: int,
    engine: str,
    topology: Mapping[str, int],
    extra: Mapping[str, Any],
    state: str = PORTABLE,
) -> CheckpointInfo:
    """Write a checkpoint on all ranks together and give it its final name.

    Args:
        directory: the final name; ``directory.partial`` is used until everything is written.
        comm: the control plane over all ranks.
        num_bytes: size in bytes of the files that ``save`` writes on this rank.
        save: called on all ranks; a collective in it must raise on all of them.
        rank_state: state of this rank alone, as JSON.
        step: number of optimizer steps applied.
        engine: name of the plug-in.
        topology: sizes of the kinds of parallelism by name.
        extra: the caller's own JSON, the same on all ranks.
        state: name of the format that ``save`` writes.

    Raises:
        CheckpointWriteError: on the rank where it failed (``RankFailure`` on the other ranks);
            nothing half-written stays under the final name, and the folder of an earlier checkpoint
            is untouched.
    """
    partial = directory.with_name(directory.name + ".partial")
    try:
        together(comm, lambda: _check_extra(extra))
        together(comm, lambda: _prepare(directory, partial) if comm.rank == 0 else None)
        need = sum(together(comm, lambda: num_bytes))
        # Writing a memory-mapped file on a full disk ends the process with SIGBUS, so the free
        # space for all ranks is checked first.
        together(comm, lambda: require_room(partial, need))
        parts = together(comm, lambda: _write_rank(partial, comm.rank, save, rank_state))
        manifest = _merge(
            parts,
            step=step,
            engine=engine,
            world_size=comm.world_size,
            topology=topology,
            extra=extra,
            state=state,
        )
        together(comm, lambda: _commit(directory, partial, manifest) if comm.rank == 0 else None)
    except OSError as error:
        raise _write_error(directory, error) from error
    finally:
        # Every rank is past its last write here, on success and on failure alike.
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return CheckpointInfo(
        path=directory, step=step, extra=dict(extra), num_bytes=manifest.num_bytes
    )


def _prepare(directory: Path, partial: Path) -> None:
    if directory.exists():
        raise CheckpointWriteError(
            "a checkpoint already exists there",
            where=str(directory),
            remedy="choose another name, or remove it first",
        )
    # A killed save may have left an unfinished folder.
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "state").mkdir(parents=True)
    later = [
        path.name for number, path in steps(directory.parent).items() if number > _number(directory)
    ]
    if later and _number(directory) >= 0:
        log.warning(
            "%s is saved next to %s, which counts as newer: loading %s without a step's name "
            "gives %s",
            directory.name,
            later[-1],
            directory.parent,
            later[-1],
        )


def _check_extra(extra: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "extra",
            "cannot be written as JSON",
            why=str(error),
            remedy="give save_checkpoint numbers, strings, lists and mappings of them",
        ) from error


def _write_rank(
    partial: Path, rank: int, save: Save, rank_state: Mapping[str, Any]
) -> tuple[dict[str, Entry], dict[str, dict[str, Any]]]:
    entries, names = save(partial)
    own = f"rank-{rank:05d}.json"
    (partial / own).write_text(json.dumps(dict(rank_state)))
    files = {name: fingerprint(partial / name) for name in (*names, own)}
    for file in files:
        sync(partial / file)
    return entries, files


def _save_boxes(partial: Path, rank: int, own: State) -> tuple[dict[str, Entry], Sequence[str]]:
    from safetensors import SafetensorError

    # safetensors annotates PathLike without its parameter.
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    name = f"state/{rank:05d}.safetensors"
    try:
        save_file({key: _storable(tensor) for key, (tensor, _) in own.items()}, partial / name)
        give_common_mode(partial / name)
    # safetensors raises its own class for every I/O error.
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(partial / name)) from error
    return {key: _describe(name, tensor, spec) for key, (tensor, spec) in own.items()}, (name,)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    # Tensors that were split from one parameter share its scalar state (a step count), and
    # safetensors refuses shared tensors.
    host = tensor.detach().cpu().contiguous()
    return host if host.dim() else host.clone()


def _describe(file: str, tensor: torch.Tensor, spec: ShardSpec) -> Entry:
    shard = Shard(file=file, offset=spec.offset, shape=spec.shape)
    return Entry(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=spec.global_shape, shards=(shard,)
    )


def require_room(folder: Path, need: int) -> None:
    """Raise ``OSError`` (ENOSPC) unless ``folder``'s file system has ``need`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{need} bytes needed, {free} free", str(folder))


def _merge(
    parts: list[tuple[dict[str, Entry], dict[str, dict[str, Any]]]], **about: Any
) -> Manifest:
    tensors: dict[str, Entry] = {}
    files: dict[str, dict[str, Any]] = {}
    for entries, written in parts:
        files |= written
        for key, entry in entries.items():
            before = tensors[key].shards if key in tensors else ()
            tensors[key] = Entry(dtype=entry.dtype, shape=entry.shape, shards=before + entry.shards)
    return Manifest(tensors=_with_steps(tensors), files=files, **about)


def _with_steps(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Record for each weight whether it has optimizer state, so that a load can detect a loss."""
    stepped = {kept[0] for key in tensors if (kept := field_of(key)) is not None}
    return {
        key: entry if (name := weight_of(key)) is None else replace(entry, stepped=name in stepped)
        for key, entry in tensors.items()
    }


def _commit(directory: Path, partial: Path, manifest: Manifest) -> None:
    manifest.write(partial)
    # Everything that can fail on a full disk comes before the rename.
    (partial / LATEST).write_text(directory.name)
    # After a loss of power the new name must not exist without its files. The other files are on
    # the disk already, because the ranks that wrote them synchronized them.
    for name in (MANIFEST, DIGEST, LATEST):
        sync(partial / name)
    sync_folders(partial)
    partial.rename(directory)
    sync(directory.parent)
    (directory / LATEST).replace(directory.parent / LATEST)
    sync(directory.parent)


def _write_error(directory: Path, error: OSError) -> CheckpointWriteError:
    full = error.errno == errno.ENOSPC
    advice = "free disk space" if full else "check path and permissions"
    return CheckpointWriteError(
        "the checkpoint could not be written",
        where=str(directory),
        why=str(error),
        remedy=f"{advice}; earlier checkpoints are untouched",
    )


def locate(directory: Path) -> Path:
    """Return the checkpoint at ``directory``, or the latest of a folder of checkpoints.

    The latest checkpoint is the one that ``latest`` names, or a complete ``step-N`` with a higher
    number: a save that was killed right after its rename has not updated ``latest``.

    Raises ``CheckpointMissing`` if the named folder does not exist, and ``CheckpointCorrupt`` for a
    ``latest`` that does not hold a folder's name.
    """
    # Such a killed save also leaves a file `latest` inside a complete checkpoint.
    if (directory / MANIFEST).is_file():
        return directory
    pointer = directory / LATEST
    named = _read_pointer(pointer) if pointer.is_file() else None
    own = steps(directory)
    newest = own[max(own)] if own else None
    if named is None:
        return newest or directory
    if not named.is_dir():
        raise CheckpointMissing(
            f"`latest` names {named.name}, which does not exist",
            where=str(directory),
            remedy="name one of its step folders",
        )
    if newest is not None and 0 <= _number(named) < _number(newest):
        return newest
    return named


def steps(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints ``step-N`` of a folder by number, the lowest first."""
    found = {
        _number(path): path for path in directory.glob("step-*") if (path / MANIFEST).is_file()
    }
    return {number: found[number] for number in sorted(found) if number >= 0}


def repair(directory: Path) -> Path | None:
    """Make ``latest`` name the newest complete ``step-N``, and return that folder.

    It corrects the pointer after a save that was killed before it replaced ``latest``. Only the one
    process that writes to the folder may call it, while no save is running.
    """
    own = steps(directory)
    if not own:
        return None
    newest = own[max(own)]
    pointer = directory / LATEST
    if not pointer.is_file() or pointer.read_bytes() != newest.name.encode():
        write_text(pointer, newest.name)
    (newest / LATEST).unlink(missing_ok=True)
    return newest


def _number(folder: Path) -> int:
    """Return N of ``step-N``, and -1 for other names."""
    match = _STEP.fullmatch(folder.name)
    return -1 if match is None else int(match[1])


def _read_pointer(pointer: Path) -> Path:
    try:
        name = pointer.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _foreign_pointer(pointer, str(error)) from error
    if not is_inside(name) or "/" in name:
        raise _foreign_pointer(pointer, f"it holds {name[:80]!r}")
    return pointer.parent / name


def _foreign_pointer(pointer: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "it does not name a folder next to it",
        where=str(pointer),
        why=why,
        remedy="name one of its step folders",
    )


Layout = Mapping[str, "tuple[ShardSpec, torch.dtype]"]


def read(
    folder: Path, manifest: Manifest, *, comm: Comm, layout: Callable[[Mapping[str, Entry]], Layout]
) -> dict[str, torch.Tensor]:
    """Read boxes into new CPU tensors, on all ranks together.

    Every check is made before anything is returned.

    Args:
        folder: as `find` returned it.
        manifest: as `find` returned it.
        comm: the control plane over all ranks.
        layout: a function from the checkpoint's entries to key → (the box that this rank needs, its
            dtype).

    Raises:
        CheckpointError: the checkpoint is corrupt, of a different model or in a different format
            (``RankFailure`` on ranks that saw no fault).
    """
    together(comm, lambda: _check_portable(folder, manifest))
    wanted: dict[str, tuple[ShardSpec, torch.dtype]] = {}
    together(comm, lambda: wanted.update(layout(manifest.tensors)))
    together(comm, lambda: _check_keys(folder, manifest, wanted))
    verify(folder, manifest, comm)
    tensors: dict[str, torch.Tensor] = {}
    together(comm, lambda: tensors.update(_read_boxes(folder, manifest, wanted)))
    return tensors


def find(directory: Path, comm: Comm) -> tuple[Path, Manifest]:
    """Return the folder of the checkpoint at ``directory`` and its manifest, as rank 0 sees them.

    Raises:
        CheckpointError: as `locate` and ``read_manifest`` (``RankFailure`` on ranks that saw no
            fault).
    """
    folder = together(comm, lambda: locate(directory))[0]
    return folder, together(comm, lambda: read_manifest(folder))[0]


def verify(folder: Path, manifest: Manifest, comm: Comm) -> None:
    """Raise ``CheckpointCorrupt`` if a file is missing or altered.

    Each file is checked by one rank only.
    """
    mine = dict(sorted(manifest.files.items())[comm.rank :: comm.world_size])
    together(comm, lambda: verify_files(folder, mine))


def read_rank_state(
    folder: Path, manifest: Manifest, comm: Comm, rank: int
) -> dict[str, Any] | None:
    """Return the state that rank ``rank`` wrote of itself, or None for a different world size.

    Raises ``CheckpointCorrupt`` if the state cannot be read.
    """
    if manifest.world_size != comm.world_size:
        return None
    return together(comm, lambda: _read_rank_file(folder, manifest, rank))[comm.rank]


def _check_portable(folder: Path, manifest: Manifest) -> None:
    if manifest.state != PORTABLE:
        sizes = ", ".join(f"{name} {size}" for name, size in manifest.topology.items())
        raise CheckpointMismatch(
            f"the checkpoint is in a format of {manifest.engine}'s own",
            where=str(folder),
            why=f"its state is {manifest.state!r}, not {PORTABLE!r}; "
            f"{manifest.world_size} ranks wrote it: {sizes}",
            remedy=f"load it with {manifest.engine} in that layout, "
            f"and save it again as {PORTABLE}",
        )


def _read_rank_file(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    name = f"rank-{rank:05d}.json"
    if name not in manifest.files:
        raise CheckpointCorrupt(
            f"{name} is not in the manifest", where=str(folder), remedy="use an earlier checkpoint"
        )
    try:
        state = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(folder / name, error) from error
    if not isinstance(state, dict):
        raise _unreadable(folder / name, f"expected a mapping, got {type(state).__name__}")
    return state  # pyright: ignore[reportUnknownVariableType] - JSON's keys are strings


def _unreadable(path: Path, why: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "it cannot be read", where=str(path), why=str(why), remedy="use an earlier checkpoint"
    )


def check_optimizer_state(folder: Path, manifest: Manifest, fields: Collection[str]) -> None:
    """Raise ``CheckpointMismatch`` if a weight that has had a step lacks optimizer state.

    Args:
        folder: as `find` returned it.
        manifest: as `find` returned it.
        fields: names of the state that the engine's optimizer keeps of a weight that has had a
            step. It is empty for an optimizer that keeps nothing, and where the names are not
            known: then the checkpoint must have the same fields for each weight, and at least one
            where it says that the weight has had a step.
    """
    saved: dict[str, set[str]] = {}
    for key in manifest.tensors:
        if (kept := field_of(key)) is not None:
            saved.setdefault(kept[0], set()).add(kept[1])
    weights = {
        name: entry
        for key, entry in manifest.tensors.items()
        if (name := weight_of(key)) is not None
    }
    # Earlier releases did not record which weights had had a step. In their checkpoints a weight
    # without any state may have had none.
    needed = saved.keys() | {name for name, entry in weights.items() if entry.stepped}
    # A weight that has had a step has state, so that one without any is a loss also where no name
    # of a field is known.
    every = {kept for own in saved.values() for kept in own} or set(fields) or {"*"}
    if not needed and fields and manifest.step > 0:
        needed = weights.keys()
    missing = [
        f"optim.{name}.{kept}"
        for name in sorted(needed)
        for kept in sorted(every - saved.get(name, set[str]()))
    ]
    if missing:
        raise CheckpointMismatch(
            "the checkpoint lacks optimizer state",
            where=str(folder),
            why=f"missing: {_abbreviate(missing)}; "
            f"the weights are those after step {manifest.step}",
            remedy="use a complete checkpoint, or load everything but the optimizer's state: "
            "load_checkpoint(…, optimizer=False)",
        )


def without_optimizer(manifest: Manifest) -> Manifest:
    """Return the manifest as if no optimizer state had been saved."""
    return replace(
        manifest, tensors={key: e for key, e in manifest.tensors.items() if field_of(key) is None}
    )


def _check_keys(folder: Path, manifest: Manifest, wanted: Layout) -> None:
    missing = sorted(set(wanted) - set(manifest.tensors))
    # An engine without an optimizer leaves the moments of a training run unread.
    trains = any(key.startswith("optim.") for key in wanted)
    unknown = sorted(
        k for k in set(manifest.tensors) - set(wanted) if trains or not k.startswith("optim.")
    )
    differ = [
        f"{key}: checkpoint {tuple(manifest.tensors[key].shape)}, model {spec.global_shape}"
        for key, (spec, _) in wanted.items()
        if key in manifest.tensors and tuple(manifest.tensors[key].shape) != spec.global_shape
    ]
    kinds = [
        f"{key}: checkpoint {manifest.tensors[key].dtype}, "
        f"model {str(dtype).removeprefix('torch.')}"
        for key, (_, dtype) in wanted.items()
        if key in manifest.tensors
        and _is_floating(manifest.tensors[key].dtype) != dtype.is_floating_point
    ]
    problems = {"missing": missing, "unknown": unknown, "shapes": differ, "dtypes": kinds}
    if any(problems.values()):
        raise CheckpointMismatch(
            "expected a checkpoint of this model and optimizer, got one whose tensors differ",
            where=str(folder),
            why="; ".join(
                f"{name}: {_abbreviate(keys)}" for name, keys in problems.items() if keys
            ),
            remedy="load it with the model and optimizer that it was saved with",
        )


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_boxes(folder: Path, manifest: Manifest, wanted: Layout) -> dict[str, torch.Tensor]:
    import torch
    from safetensors import SafetensorError, safe_open

    out = {key: torch.empty(spec.shape, dtype=dtype) for key, (spec, dtype) in wanted.items()}
    by_file: dict[str, list[tuple[str, Shard]]] = {}
    holes: list[str] = []
    why = ""
    for key, (spec, _) in wanted.items():
        shards = _find_intersecting(manifest.tensors[key].shards, spec)
        if not _covers_once(shards, spec):
            holes.append(key)
            boxes = [(shard.offset, shard.shape) for shard in shards]
            if len(set(boxes)) < len(boxes):
                why = "several ranks stored the same box: each of them said that it is replica 0"
        for shard in shards:
            by_file.setdefault(shard.file, []).append((key, shard))
    if holes:
        raise CheckpointCorrupt(
            f"the shards do not cover {_abbreviate(sorted(holes))} exactly once",
            where=str(folder),
            why=why,
            remedy="use an earlier checkpoint",
        )
    for file, shards in by_file.items():
        try:
            # safe_open is not annotated.
            reader: Any = safe_open(folder / file, framework="pt")
            with reader as handle:
                for key, shard in shards:
                    _copy_overlap(
                        handle, key, shard, wanted[key][0], out[key], manifest.tensors[key].dtype
                    )
        except (OSError, ValueError, SafetensorError) as error:
            raise _unreadable(folder / file, error) from error
    return out


def _find_intersecting(shards: Sequence[Shard], spec: ShardSpec) -> list[Shard]:
    """Return the shards that share at least one element with the box."""
    return [shard for shard in shards if all(low < high for low, high in _overlap(shard, spec))]


def _overlap(shard: Shard, spec: ShardSpec) -> list[tuple[int, int]]:
    """Return the intersection of shard and box as (first, after the last) in each dimension."""
    sides = zip(shard.offset, shard.shape, spec.offset, spec.shape, strict=True)
    return [(max(a, b), min(a + n, b + m)) for a, n, b, m in sides]


def _covers_once(shards: Sequence[Shard], spec: ShardSpec) -> bool:
    """Return whether each element of the box is in exactly one of its intersecting shards."""
    import torch

    overlaps = [_overlap(shard, spec) for shard in shards]
    covered = sum(math.prod(high - low for low, high in box) for box in overlaps)
    if covered != (0 if spec.is_empty else math.prod(spec.shape)):
        return False
    if len(overlaps) < 2:
        return True
    # The overlaps have as many elements as the box. All elements are covered once, unless some are
    # covered twice and others never: then two overlaps intersect.
    corners = torch.tensor(overlaps)  # [shards, dimensions, 2]
    low = torch.maximum(corners[:, None, :, 0], corners[None, :, :, 0])
    high = torch.minimum(corners[:, None, :, 1], corners[None, :, :, 1])
    return int((low < high).all(-1).sum()) == len(overlaps)


def _copy_overlap(
    handle: Any, key: str, shard: Shard, spec: ShardSpec, target: torch.Tensor, dtype: str
) -> None:
    stored = handle.get_slice(key)
    shape = tuple(stored.get_shape())
    if shape != shard.shape:
        raise ValueError(f"{key} is {shape}, the manifest says {shard.shape}")
    if not shape:
        source = handle.get_tensor(key)
    else:
        sides = zip(_overlap(shard, spec), shard.offset, strict=True)
        source = stored[tuple(slice(low - offset, high - offset) for (low, high), offset in sides)]
    if (found := str(source.dtype).removeprefix("torch.")) != dtype:
        raise ValueError(f"{key} is {found}, the manifest says {dtype}")
    sides = zip(_overlap(shard, spec), spec.offset, strict=True)
    box = tuple(slice(low - offset, high - offset) for (low, high), offset in sides)
    target[box] = source.to(target.dtype)
