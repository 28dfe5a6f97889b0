"""Megatron's distributed checkpoint format as the state of a checkpoint, for speed.

The format is ``torch_dist`` of ``dist_checkpointing``. Each rank writes the masters and optimizer
state that it updates, as flat ranges of Megatron's parameters, so nothing is gathered. A key is
``model.<place>.<parameter>`` or ``optim.<place>.<parameter>.<field>``, where a place names the
ranks that hold the same part of the model. So ``dp`` and ``cp`` may differ when it is loaded; all
other sizes that divide or name parameters must be the same.

Megatron's index is a pickle. Before Megatron sees it, it is read with an unpickler that accepts the
index's own classes only; torch reads tensors as weights only.
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
from engine_megatron.optimizer import StageOptimizer
from engine_megatron.parallel import Layout, holders_group, is_spread_expert

# The name of the format in a manifest.
MEGATRON = "megatron"
_FOLDER = "state"
_INDEX = ".metadata"
_WRITER_THREADS = 2
# The most bytes that a tensor takes in addition to its values, its part of the index included.
_CONTAINER = 4096
# The parallel sizes that decide which part of the model a rank has.
_FIXED = ("pp", "tp", "ep", "etp")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """A parameter that this rank holds, and the range of it that this rank updates.

    Attributes:
        key: the checkpoint key without ``model.``.
        start, numel: the range, in elements of the flat parameter.
        copy: this rank's number among the ranks with the same range.
    """

    key: str
    param: nn.Parameter
    start: int
    numel: int
    copy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatRange:
    """The flat range of one tensor that this rank writes or reads (one element of a scalar)."""

    entry: Entry
    part: ShardedTensor

    @property
    def is_written(self) -> bool:
        """True if this rank writes the range."""
        return self.part.replica_id == 0


def local_parameters(chunks: nn.Module, layout: Layout, masters: Masters) -> list[LocalParameter]:
    """Return all parameters of this rank, with an empty range where other ranks update them."""
    dense, expert = _places(layout)
    parameters: list[LocalParameter] = []
    for name, param in chunks.named_parameters():
        shard = masters.shards.get(param)
        place = expert if is_spread_expert(param) else dense
        parameters.append(
            LocalParameter(
                key=f"{place}.{name}",
                param=param,
                start=0 if shard is None else shard.start,
                numel=0 if shard is None else shard.tensor.numel(),
                copy=0 if masters.divides(param) else dist.get_rank(holders_group(param)),
            )
        )
    return parameters


def _places(layout: Layout) -> tuple[str, str]:
    """Return the names of the parts of the model here, of dense weights and of spread experts."""
    here = layout.here
    return (
        f"stage{here.stage}.tensor{here.tensor}",
        f"stage{here.stage}.expert{here.expert}x{here.expert_tensor}",
    )


def _flat_range(key: str, parameter: LocalParameter, entry: Entry, value: Tensor) -> FlatRange:
    """Build the flat range of ``value``, a range of a tensor or a scalar.

    The rank with the first range writes a scalar.
    """
    flat = value.detach().reshape(-1)
    part = ShardedTensor(
        key=key,
        data=flat,
        dtype=flat.dtype,
        local_shape=tuple(flat.shape),
        global_offset=(parameter.start if entry.shape else 0,),
        global_shape=entry.shape or (1,),
        axis_fragmentations=None,
        replica_id=parameter.copy if entry.shape else parameter.copy or int(parameter.start > 0),
    )
    return FlatRange(entry=entry, part=part)


# --- writing -----------------------------------------------------------------------------------


def writer(
    parameters: Sequence[LocalParameter], masters: Masters, optimizer: StageOptimizer | None
) -> Callable[..., CheckpointInfo]:
    """Return the function that writes a checkpoint of the live tensors.

    It takes the folder and the remaining arguments of ``checkpoint.write_files``.
    """
    ranges = dict(_flat_ranges(parameters, masters, optimizer))

    def write(directory: Path, **about: Any) -> CheckpointInfo:
        written: list[Any] = [flat.part.data for flat in ranges.values() if flat.is_written]
        return checkpoint.write_files(
            directory,
            num_bytes=sum(data.nbytes + _CONTAINER for data in written),
            save=lambda partial: _save(partial, ranges),
            state=MEGATRON,
            **about,
        )

    return write


def _flat_ranges(
    parameters: Sequence[LocalParameter], masters: Masters, optimizer: StageOptimizer | None
) -> Iterator[tuple[str, FlatRange]]:
    """Yield (key, flat range) of each weight and each optimizer state that this rank updates."""
    for parameter in (parameter for parameter in parameters if parameter.numel):
        values = {f"model.{parameter.key}": masters.shards[parameter.param].tensor}
        if optimizer is not None:
            values |= {
                f"optim.{parameter.key}.{field}": value
                for field, value in optimizer.own_state(parameter.param).items()
            }
        for key, value in values.items():
            dtype = str(value.dtype).removeprefix("torch.")
            shape = (parameter.param.numel(),) if value.dim() else ()
            entry = Entry(dtype=dtype, shape=shape, shards=())
            yield key, _flat_range(key, parameter, entry, value)


def _save(partial: Path, ranges: Mapping[str, FlatRange]) -> tuple[dict[str, Entry], Sequence[str]]:
    """Write this rank's ranges under ``partial``, and return their entries and the rank's files."""
    folder = partial / _FOLDER
    parts = {key: flat.part for key, flat in ranges.items()}
    try:
        dist_checkpointing.save(
            parts, str(folder), sharded_strategy=_InThisProcess("torch_dist", 1)
        )
    # It is a BaseException, and is raised on all ranks.
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        codes = [cause.errno for cause in causes if isinstance(cause, OSError)]
        raise OSError(next(iter(codes), errno.EIO), _failures(error)) from error
    entries = {key: flat.entry for key, flat in ranges.items()}
    return entries, [f"{_FOLDER}/{file.name}" for file in folder.iterdir() if _is_own(file.name)]


def _is_own(name: str) -> bool:
    """Return True if this rank wrote a file (for rank 0 also one without a rank's number)."""
    rank = dist.get_rank()
    return name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))


def _failures(error: CheckpointException) -> str:
    """Return the exception of each rank that failed, as text."""
    return "; ".join(
        f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
    )


class _InThisProcess(SaveShardedStrategy):
    """Megatron's format, written by threads of this process.

    Megatron's own strategy starts two processes. One of them imports the main module again, which
    for a script without a guard runs the whole training; the other is a fork of a process that uses
    CUDA.
    """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True, because there are no sharded objects."""
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
    parameters: Sequence[LocalParameter],
    *,
    comm: Comm,
    layout: Layout,
    optimizer: StageOptimizer | None,
) -> dict[str, Tensor]:
    """Return this rank's ranges as new CPU tensors, by key.

    Everything is checked, on all ranks together, before anything is returned.

    Raises:
        CheckpointError: the checkpoint is corrupt, or of a different layout or model
            (``RankFailure`` on ranks that saw no fault).
    """
    wanted: dict[str, FlatRange] = {}
    tensors: dict[str, Tensor] = {}
    together(comm, lambda: wanted.update(_wanted(folder, manifest, parameters, layout, optimizer)))
    checkpoint.verify(folder, manifest, comm)
    together(comm, lambda: check_index(folder / _FOLDER / _INDEX) if comm.rank == 0 else None)
    together(comm, lambda: tensors.update(_load(folder, wanted)))
    return tensors


def _wanted(
    folder: Path,
    manifest: Manifest,
    parameters: Sequence[LocalParameter],
    layout: Layout,
    optimizer: StageOptimizer | None,
) -> dict[str, FlatRange]:
    """Return the ranges to read, with empty tensors, or raise ``CheckpointMismatch``."""
    if any(manifest.topology.get(name) != layout.sizes[name] for name in _FIXED):
        raise _mismatch(folder, manifest, f"this engine has {_sizes(layout.sizes)}")
    own: Mapping[str, torch.dtype] = {}
    if optimizer is not None:
        own = loaded_dtypes(optimizer.groups[0].inner, optimizer.masters.dtype, manifest.tensors)
    by_key = {parameter.key: parameter for parameter in parameters}
    places = tuple(f"{place}." for place in _places(layout))
    problems = [f"{key} is missing" for key in by_key if f"model.{key}" not in manifest.tensors]
    wanted: dict[str, FlatRange] = {}
    for key, entry in manifest.tensors.items():
        kind, _, name = key.partition(".")
        parameter = by_key.get(name if kind == "model" else name.rpartition(".")[0])
        if parameter is None:
            if name.startswith(places):
                problems.append(f"{key} is unknown")
        elif entry.shape not in ((parameter.param.numel(),), () if kind == "optim" else None):
            problems.append(f"{key} has {entry.shape} elements, here {parameter.param.numel()}")
        elif parameter.numel and (kind == "model" or optimizer is not None):
            # A weight is read in the dtype that was saved, and its master converts it. A moment is
            # read in the dtype that the optimizer keeps it in.
            dtype = getattr(torch, entry.dtype) if kind == "model" else own[key.rpartition(".")[2]]
            empty = torch.empty(parameter.numel if entry.shape else 1, dtype=dtype, device="cpu")
            wanted[key] = _flat_range(key, parameter, entry, empty)
    if problems:
        raise _mismatch(folder, manifest, "; ".join(problems[:3]))
    return wanted


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _mismatch(folder: Path, manifest: Manifest, why: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "expected a checkpoint of this model and layout, because Megatron's own format fixes both",
        where=str(folder),
        why=f"{manifest.world_size} ranks wrote it with {_sizes(manifest.topology)}; {why}",
        remedy="load it with the layout, layer spec and model that wrote it, and save it again "
        "with options.checkpoint: portable; dp and cp alone may change",
    )


def _load(folder: Path, wanted: Mapping[str, FlatRange]) -> dict[str, Tensor]:
    """Return the wanted tensors, or raise ``CheckpointCorrupt`` if Megatron cannot read them."""
    parts = {key: flat.part for key, flat in wanted.items()}
    try:
        with warnings.catch_warnings():
            # Megatron calls torch's function by its old name.
            warnings.simplefilter("ignore", FutureWarning)
            # Each rank's requests were compared with the manifest before.
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
        key: found[key] if flat.entry.shape else found[key].reshape(())
        for key, flat in wanted.items()
    }


_DCP = "torch.distributed.checkpoint."
# The classes that an index of flat tensors needs. BytesStorageMetadata is not among them, because
# torch unpickles the bytes that it describes.
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
    # The path of the folder that it was written to, whose class is in another module in Python
    # 3.13.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of an index and refuses all others before a call."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_index(path: Path) -> None:
    """Raise ``CheckpointCorrupt`` for an index that is not safe to unpickle.

    A safe index runs nothing and describes flat tensors only.
    """
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
    parameters: Sequence[LocalParameter],
    masters: Masters,
    optimizer: StageOptimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy loaded ranges into the masters and replace the optimizer's state.

    Every rank then has the new weights.
    """
    for parameter in (parameter for parameter in parameters if parameter.numel):
        master = masters.shards[parameter.param].tensor
        master.copy_(tensors[f"model.{parameter.key}"].view(master.shape))
    if optimizer is None:
        masters.publish()
    else:
        optimizer.install_own(_state(parameters, tensors))
        optimizer.publish()


def _state(
    parameters: Sequence[LocalParameter], tensors: Mapping[str, Tensor]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Return the loaded optimizer state by parameter and field."""
    by_key = {parameter.key: parameter for parameter in parameters}
    result: dict[nn.Parameter, dict[str, Tensor]] = {
        parameter.param: {}
        for parameter in parameters
        if parameter.numel and parameter.param.requires_grad
    }
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "optim":
            name, _, field = name.rpartition(".")
            result[by_key[name].param][field] = value
    return result
