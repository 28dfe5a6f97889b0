"""Megatron's distributed checkpoint (``dist_checkpointing``, ``torch_dist``) as the state of a checkpoint, for speed.

Each rank writes what it updates, masters and optimizer state, as flat ranges of Megatron's parameters: nothing is gathered.
A key is ``model.<place>.<parameter>`` or ``optim.<place>.<parameter>.<field>``, a place being the ranks that hold the same
part of the model. So ``dp`` and ``cp`` may be others when it is loaded; all else that divides or names parameters may not.

Megatron's index is a pickle. It is read with an unpickler that knows the index's own classes and nothing else before
Megatron gets to see it; torch reads tensors as weights only.
"""

# Megatron and torch.distributed.checkpoint are not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import errno
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from engine_api import checkpoint
from engine_api.comm import Comm, together
from engine_api.errors import CheckpointCorrupt, CheckpointMismatch
from engine_api.manifest import Entry, Manifest
from engine_api.optimizers import loaded_dtypes
from engine_api.results import CheckpointInfo
from engine_megatron.masters import Masters
from engine_megatron.optimizer import Trainer
from engine_megatron.parallel import Layout, holders_group, is_spread_expert

MEGATRON = "megatron"  # the name of the format in a manifest
_FOLDER = "state"
_INDEX = ".metadata"
_WRITER_THREADS = 2
_CONTAINER = 4096  # bytes at most around a tensor, its part of the index included
_FIXED = ("pp", "tp", "ep", "etp")  # sizes that say which part of the model a rank has


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A parameter that this rank holds: its key without ``model.``, and which range of it is updated here."""

    key: str
    param: nn.Parameter
    start: int
    numel: int
    copy: int  # of the ranks with the same range, the number of this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What this rank writes or reads of one tensor, which is flat; Megatron's scalars have one element."""

    entry: Entry
    part: ShardedTensor

    @property
    def is_written(self) -> bool:
        """Whether it is this rank that writes it."""
        return self.part.replica_id == 0


def held(chunks: nn.Module, layout: Layout, masters: Masters) -> list[Held]:
    """All parameters of this rank, those that other ranks update with an empty range."""
    dense, expert = _places(layout)
    rows: list[Held] = []
    for name, param in chunks.named_parameters():
        shard = masters.shards.get(param)
        start, numel = (0, 0) if shard is None else (shard.start, shard.tensor.numel())
        copy = 0 if masters.spread else dist.get_rank(holders_group(param))
        place = expert if is_spread_expert(param) else dense
        rows.append(Held(key=f"{place}.{name}", param=param, start=start, numel=numel, copy=copy))
    return rows


def _places(layout: Layout) -> tuple[str, str]:
    """Which part of the model the parameters here are of; those of experts that are spread over other ranks."""
    here = layout.here
    return (
        f"stage{here.stage}.tensor{here.tensor}",
        f"stage{here.stage}.expert{here.expert}x{here.expert_tensor}",
    )


def _piece(key: str, row: Held, entry: Entry, value: Tensor) -> Piece:
    """``value``, a range or a scalar, which is written by who has the first range."""
    offset, copy = (row.start, row.copy) if entry.shape else (0, row.copy or int(row.start > 0))
    flat = value.detach().reshape(-1)
    part = ShardedTensor(
        key=key,
        data=flat,
        dtype=flat.dtype,
        local_shape=tuple(flat.shape),
        global_offset=(offset,),
        global_shape=entry.shape or (1,),
        axis_fragmentations=None,
        replica_id=copy,
    )
    return Piece(entry=entry, part=part)


# --- writing -----------------------------------------------------------------------------------


def writer(
    rows: Sequence[Held], masters: Masters, trainer: Trainer | None
) -> Callable[..., CheckpointInfo]:
    """What writes a checkpoint of the live tensors, given what ``checkpoint.write_files`` asks for besides."""
    pieces = dict(_pieces(rows, masters, trainer))

    def write(directory: Path, **about: Any) -> CheckpointInfo:
        own = sum(
            piece.part.data.nbytes + _CONTAINER for piece in pieces.values() if piece.is_written
        )  # type: ignore[union-attr]
        return checkpoint.write_files(
            directory,
            num_bytes=own,
            save=lambda partial: _save(partial, pieces),
            state=MEGATRON,
            **about,
        )

    return write


def _pieces(
    rows: Sequence[Held], masters: Masters, trainer: Trainer | None
) -> Iterator[tuple[str, Piece]]:
    for row in (row for row in rows if row.numel):
        values = {f"model.{row.key}": masters.shards[row.param].tensor}
        if trainer is not None:
            values |= {
                f"optim.{row.key}.{field}": value
                for field, value in trainer.own_state(row.param).items()
            }
        for key, value in values.items():
            dtype = str(value.dtype).removeprefix("torch.")
            entry = Entry(dtype=dtype, shape=(row.param.numel(),) if value.dim() else (), shards=())
            yield key, _piece(key, row, entry, value)


def _save(partial: Path, pieces: Mapping[str, Piece]) -> tuple[dict[str, Entry], Sequence[str]]:
    folder, rank = partial / _FOLDER, dist.get_rank()
    parts = {key: piece.part for key, piece in pieces.items()}
    try:
        dist_checkpointing.save(
            parts, str(folder), sharded_strategy=_InThisProcess("torch_dist", 1)
        )
    except CheckpointException as error:  # a BaseException, on all ranks
        codes = [
            failure[0].errno
            for failure in error.failures.values()
            if isinstance(failure[0], OSError)
        ]
        raise OSError(next(iter(codes), errno.EIO), _failures(error)) from error
    files = [
        f.name
        for f in folder.iterdir()
        if f.name.startswith(f"__{rank}_") or (rank == 0 and f.name[:2] != "__")
    ]
    return {key: piece.entry for key, piece in pieces.items()}, [
        f"{_FOLDER}/{name}" for name in files
    ]


def _failures(error: CheckpointException) -> str:
    return "; ".join(
        f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
    )


class _InThisProcess(SaveShardedStrategy):
    """Megatron's format, written by threads.

    Its own strategy starts two processes: one imports the main module again, which for a script without a guard is the
    whole training; the other is a fork of a process that uses CUDA.
    """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """There are none."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        own = {key: [part] for key, part in sharded_state_dict.items() if part.replica_id == 0}
        files = FileSystemWriter(checkpoint_dir, thread_count=_WRITER_THREADS)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(own), storage_writer=files, planner=planner)


# --- reading -----------------------------------------------------------------------------------


def read(
    folder: Path,
    manifest: Manifest,
    rows: Sequence[Held],
    *,
    comm: Comm,
    layout: Layout,
    trainer: Trainer | None,
) -> dict[str, Tensor]:
    """This rank's ranges as new CPU tensors, by key; all is checked, on all ranks together, before anything is returned.

    Raises:
        CheckpointError: corrupt, or of another layout or model (``RankFailure`` on ranks that saw no fault).
    """
    wanted: dict[str, Piece] = {}
    tensors: dict[str, Tensor] = {}
    together(comm, lambda: wanted.update(_wanted(folder, manifest, rows, layout, trainer)))
    checkpoint.verify(folder, manifest, comm)
    together(comm, lambda: check_index(folder / _FOLDER / _INDEX) if comm.rank == 0 else None)
    together(comm, lambda: tensors.update(_load(folder, wanted)))
    return tensors


def _wanted(
    folder: Path, manifest: Manifest, rows: Sequence[Held], layout: Layout, trainer: Trainer | None
) -> dict[str, Piece]:
    if any(manifest.topology.get(name) != layout.sizes[name] for name in _FIXED):
        raise _mismatch(folder, manifest, f"this engine has {_sizes(layout.sizes)}")
    own: Mapping[str, torch.dtype] = {}
    if trainer is not None:
        own = loaded_dtypes(trainer.parts[0].inner, trainer.masters.dtype, manifest.tensors)
    by_key = {row.key: row for row in rows}
    problems = [f"{key} is missing" for key in by_key if f"model.{key}" not in manifest.tensors]
    wanted: dict[str, Piece] = {}
    for key, entry in manifest.tensors.items():
        kind, _, name = key.partition(".")
        row = by_key.get(name if kind == "model" else name.rpartition(".")[0])
        if row is None:
            problems += [f"{key} is unknown"] * name.startswith(
                tuple(f"{place}." for place in _places(layout))
            )
        elif entry.shape not in ((row.param.numel(),), () if kind == "optim" else None):
            problems.append(f"{key} has {entry.shape} elements, here {row.param.numel()}")
        elif row.numel and (kind == "model" or trainer is not None):
            # A weight in the dtype that was saved: its master takes it in its own. A moment is taken as it comes.
            dtype = getattr(torch, entry.dtype) if kind == "model" else own[key.rpartition(".")[2]]
            room = torch.empty(row.numel if entry.shape else 1, dtype=dtype, device="cpu")
            wanted[key] = _piece(key, row, entry, room)
    if problems:
        raise _mismatch(folder, manifest, "; ".join(problems[:3]))
    return wanted


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _mismatch(folder: Path, manifest: Manifest, why: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "the checkpoint is of another layout or model, in Megatron's own format",
        where=str(folder),
        why=f"{manifest.world_size} ranks wrote it with {_sizes(manifest.topology)}; {why}",
        remedy="load it with the layout, layer spec and model that wrote it, and save it again with options.checkpoint: "
        "portable; dp and cp alone may change",
    )


def _load(folder: Path, wanted: Mapping[str, Piece]) -> dict[str, Tensor]:
    parts = {key: piece.part for key, piece in wanted.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # Megatron calls torch's function by its old name
            # What each rank asks for was compared with the manifest.
            found: Any = dist_checkpointing.load(
                parts, str(folder / _FOLDER), validate_access_integrity=False
            )
    except (CheckpointException, CheckpointingException, pickle.UnpicklingError) as error:
        why = _failures(error) if isinstance(error, CheckpointException) else str(error)
        raise CheckpointCorrupt(
            "Megatron cannot read it",
            where=str(folder),
            why=why,
            remedy="use an earlier checkpoint",
        ) from error
    return {
        key: found[key] if piece.entry.shape else found[key].reshape(())
        for key, piece in wanted.items()
    }


_DCP = "torch.distributed.checkpoint."
# What the index of flat tensors is made of. Not BytesStorageMetadata: torch unpickles what that describes.
_INDEX_CLASSES = {
    f"{_DCP}metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}filesystem": {"_StorageInfo"},
    "torch": {
        "Size",
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},  # where it was written; in Python 3.13 of another module
    "pathlib._local": {"PosixPath"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index; a pickle that names anything else is refused before that is called."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_index(path: Path) -> None:
    """Raise ``CheckpointCorrupt`` for an index that would run or describe anything but flat tensors when it is unpickled."""
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ImportError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise _foreign(path, str(error)) from error
    if not isinstance(index, Metadata):
        raise _foreign(path, f"it is a {type(index).__name__}")


def _foreign(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "Megatron's index is not one that this engine wrote",
        where=str(path),
        why=why,
        remedy="use a checkpoint whose origin you know",
    )


# --- installing --------------------------------------------------------------------------------


@torch.no_grad()
def install(
    rows: Sequence[Held], masters: Masters, trainer: Trainer | None, tensors: Mapping[str, Tensor]
) -> None:
    """Copy loaded ranges into the masters, replace the optimizer's state, and give every rank the new weights."""
    for row in (row for row in rows if row.numel):
        master = masters.shards[row.param].tensor
        master.copy_(tensors[f"model.{row.key}"].view(master.shape))
    if trainer is None:
        masters.publish()
    else:
        trainer.install_own(_state(rows, tensors))
        trainer.publish()


def _state(
    rows: Sequence[Held], tensors: Mapping[str, Tensor]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    by_key = {row.key: row for row in rows}
    result: dict[nn.Parameter, dict[str, Tensor]] = {row.param: {} for row in rows if row.numel}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "optim":
            name, _, field = name.rpartition(".")
            result[by_key[name].param][field] = value
    return result
