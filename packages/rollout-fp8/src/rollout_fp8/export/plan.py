"""Plan of a sync: the boxes that each rank sends, their buckets, and the place of quantizing.

It is made once from every rank's boxes, the same on all ranks. A shard whose edges lie on block
edges is quantized where it is and travels in FP8. Any other shard is gathered as the engine stores
it and quantized afterwards: the result is the same bit for bit, the bytes on the wire are not, and
``WirePlan.notes`` names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod

import torch

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.kernels.cast import FLOATS
from rollout_fp8.wire.format import (
    ALIGNMENT,
    BLOCK,
    SCALE_SUFFIX,
    BucketPlan,
    WirePlan,
    WireSlice,
    WireTensor,
    covers,
)

WHERE = "weight sync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Tensor of the engine's export: the box of each rank, and the ranks whose boxes travel."""

    name: str
    boxes: tuple[ShardSpec, ...]
    stored: torch.dtype
    quantized: bool
    senders: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.boxes[0].global_shape

    @property
    def aligned(self) -> bool:
        """True if every rank's box begins and ends on block edges (or at the tensor's end)."""
        return all(box.is_empty or _on_blocks(box) for box in self.boxes)

    @property
    def gathers_last(self) -> bool:
        """True if each sender fills its own part of a bucket before the gather."""
        return self.aligned or not self.quantized


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part of a bucket that one rank fills: its box of a source, and a quantized one's scales."""

    source: int
    """Index of the source in ``ExportPlan.sources``."""
    weight: WireSlice
    scales: WireSlice | None

    @property
    def slices(self) -> list[WireSlice]:
        """The weight's slice, followed by the scales' slice if there is one."""
        return [self.weight] if self.scales is None else [self.weight, self.scales]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Bucket as the engine's side sees it.

    ``gathered``: rank ``r`` fills ``parts[r]`` into the region at ``r * region``, and an all-gather
    makes the whole buffer. If not, the sources are gathered first, as they are stored, and every
    rank fills ``parts[0]`` by itself.
    """

    wire: BucketPlan
    parts: tuple[tuple[Part, ...], ...]
    gathered: bool
    region: int
    """Bytes of each rank."""

    def of_rank(self, rank: int) -> tuple[Part, ...]:
        """Return the parts that ``rank`` fills."""
        return self.parts[rank if self.gathered else 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """Plan of a sync: ``wire`` for the rollout, ``sources`` and ``buckets`` for the ranks."""

    wire: WirePlan
    sources: tuple[Source, ...]
    buckets: tuple[Bucket, ...]
    world_size: int


# The export of one rank, in order.
Row = Sequence[tuple[str, ShardSpec, torch.dtype]]


def require_alike(rows: Sequence[Row]) -> None:
    """Raise ``RolloutError`` where a rank's export differs from the first rank's.

    Names, dtypes, whole shapes and the order are compared.
    """
    for rank, row in enumerate(rows):
        described = zip_longest(map(_describe, rows[0]), map(_describe, row), fillvalue="nothing")
        for first, other in described:
            if first != other:
                raise RolloutError(
                    "the ranks export different tensors",
                    where=WHERE,
                    why=f"rank 0 exports {first} where rank {rank} exports {other}",
                    remedy="build the engine of one model on all ranks; "
                    "each lists all tensors in one order",
                )


def _describe(tensor: tuple[str, ShardSpec, torch.dtype]) -> str:
    name, box, dtype = tensor
    return f"{name} ({str(dtype).removeprefix('torch.')} {list(box.global_shape)})"


def make_plan(
    sources: Sequence[Source], *, dtype: torch.dtype, bucket_bytes: int, num_slots: int = 2
) -> ExportPlan:
    """Return the plan for tensors of which those not quantized are served in ``dtype``.

    Each rank's boxes fill its regions one after another, independent of the other ranks' boxes:
    experts that lie on one rank each take no more bytes on the wire than rows that lie on all.
    Sources that are gathered first come last.

    Args:
        sources: in the order of the export, with the boxes of all ranks.
        dtype: dtype of the weights that are not quantized.
        bucket_bytes: a bucket's size over all ranks; one larger tensor makes a larger bucket.
        num_slots: buffers that are filled in turn.

    Raises:
        RolloutError: the boxes of a tensor do not cover it exactly once, or a name comes twice
            or in a dtype that is not cast.
    """
    assert sources and num_slots >= 1, "nothing to plan"
    names = Counter(source.name for source in sources)
    for source in sources:
        _check_sent(source, names[source.name])
        _check_cover(source)
    world_size = len(sources[0].boxes)
    sources = _with_senders(sources, dtype, world_size)
    pack = _Packing(sources, dtype, bucket_bytes)
    contents = [
        *((True, rows) for rows in pack.group_sharded(world_size)),
        *((False, [row]) for row in pack.group_replicated()),
    ]
    buckets = tuple(
        pack.bucket(rows, gathered=gathered, slot=k % num_slots)
        for k, (gathered, rows) in enumerate(contents)
    )
    slots = tuple(
        max((b.wire.num_bytes for b in buckets if b.wire.slot == s), default=0)
        for s in range(num_slots)
    )
    tensors = {t.name: t for source in sources for t in wire_tensors(source, dtype)}
    notes = {
        s.name: "its shards do not end on block edges: gathered first, then quantized"
        for s in sources
        if not s.gathers_last
    }
    wire = WirePlan(
        tensors=tensors, buckets=tuple(b.wire for b in buckets), slots=slots, notes=notes
    )
    return ExportPlan(wire=wire, sources=tuple(sources), buckets=buckets, world_size=world_size)


def wire_tensors(source: Source, dtype: torch.dtype) -> tuple[WireTensor, ...]:
    """Return a source's tensors on the wire: itself in ``dtype``, or its FP8 weight and scales.

    A router's bias stays float32.
    """
    if not source.quantized:
        own = _own_dtype(source, dtype)
        return (WireTensor(name=source.name, shape=source.shape, dtype=own),)
    return (
        WireTensor(name=source.name, shape=source.shape, dtype=torch.float8_e4m3fn),
        WireTensor(
            name=source.name + SCALE_SUFFIX, shape=_blocks(source.shape), dtype=torch.float32
        ),
    )


# Biases by which routers select experts. Servers keep them in float32, as transformers does,
# because 16 bits are coarser than the differences between the biases of a trained model.
_ROUTER_BIAS = ".e_score_correction_bias"


def _own_dtype(source: Source, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a source that is not quantized, where the others travel in ``dtype``."""
    return torch.float32 if source.name.endswith(_ROUTER_BIAS) else dtype


def scale_box(box: ShardSpec) -> ShardSpec:
    """Return the box of the scales that belong to a block-aligned box of a weight."""
    return ShardSpec(
        global_shape=_blocks(box.global_shape),
        offset=tuple(o // BLOCK for o in box.offset),
        shape=_blocks(box.shape),
        replica=box.replica,
    )


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


def _on_blocks(box: ShardSpec) -> bool:
    edges = zip(box.offset, box.shape, box.global_shape, strict=True)
    return all(o % BLOCK == 0 and ((o + s) % BLOCK == 0 or o + s == whole) for o, s, whole in edges)


def _check_sent(source: Source, count: int) -> None:
    if count > 1 or source.stored not in FLOATS:
        raise RolloutError(
            f"cannot send {source.name}",
            where=WHERE,
            why="it is exported twice" if count > 1 else f"it is {source.stored}",
            remedy="the engine must export each weight once, in float32, bfloat16 or float16",
        )


def _check_cover(source: Source) -> None:
    once = [box for box in source.boxes if box.replica == 0 and not box.is_empty]
    copies = {(box.offset, box.shape) for box in source.boxes if box.replica and not box.is_empty}
    # One of them might be sent in place of a box.
    unlike = copies - {(box.offset, box.shape) for box in once}
    if unlike or not covers(source.shape, once):
        raise RolloutError(
            f"the shards of {source.name} do not cover {list(source.shape)} exactly once",
            where=WHERE,
            why=f"boxes: {[(b.offset, b.shape) for b in once]}"
            + (f"; copies of no shard: {sorted(unlike)}" if unlike else ""),
            remedy="the engine's get_per_tensor_param_shard is wrong: "
            "certify it with engine-conformance",
        )


def _with_senders(sources: Sequence[Source], dtype: torch.dtype, world_size: int) -> list[Source]:
    """Return the sources with their senders.

    Of the ranks that hold copies of a box, the one that has the least to send so far sends it.
    """
    loads = [0] * world_size
    done: list[Source] = []
    for source in sources:
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, box in enumerate(source.boxes):
            if not box.is_empty:
                holders.setdefault(box.offset, []).append(rank)
        senders = [min(ranks, key=loads.__getitem__) for ranks in holders.values()]
        for rank in senders:
            loads[rank] += _part_bytes(source, source.boxes[rank], dtype)
        done.append(replace(source, senders=frozenset(senders)))
    return done


class _Packing:
    """Packing of sources into regions, and of regions into buckets."""

    def __init__(self, sources: Sequence[Source], dtype: torch.dtype, bucket_bytes: int) -> None:
        self._sources = sources
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes

    def group_sharded(self, world_size: int) -> Iterator[list[list[int]]]:
        """Yield for each bucket the sources that each rank sends."""
        limit = self._bucket_bytes // world_size
        mine = [
            [i for i, s in enumerate(self._sources) if s.gathers_last and rank in s.senders]
            for rank in range(world_size)
        ]
        runs = [self._runs(indices, limit, rank) for rank, indices in enumerate(mine)]
        return map(list, zip_longest(*runs, fillvalue=[]))

    def group_replicated(self) -> list[list[int]]:
        """Return for each bucket the sources that all ranks fill alike."""
        return self._runs(
            [i for i, s in enumerate(self._sources) if not s.gathers_last], self._bucket_bytes, None
        )

    def bucket(self, rows: list[list[int]], *, gathered: bool, slot: int) -> Bucket:
        """Return the bucket of ``rows``: one for each rank, or a single one for all ranks."""
        ranks = list(range(len(rows))) if gathered else [None]
        ends = [
            sum(self._bytes(i, rank) for i in row) for rank, row in zip(ranks, rows, strict=True)
        ]
        region = max(ends)
        parts = tuple(
            self._parts(row, rank, k * region)
            for k, (rank, row) in enumerate(zip(ranks, rows, strict=True))
        )
        slices = tuple(wire_slice for row in parts for part in row for wire_slice in part.slices)
        wire = BucketPlan(slices=slices, num_bytes=region * len(rows), slot=slot)
        return Bucket(wire=wire, parts=parts, gathered=gathered, region=region)

    def _runs(self, indices: Sequence[int], limit: int, rank: int | None) -> list[list[int]]:
        """Return runs of neighbours that together stay within ``limit`` bytes."""
        runs: list[list[int]] = []
        size = 0
        for index in indices:
            more = self._bytes(index, rank)
            if not runs or size + more > limit:
                runs.append([])
                size = 0
            runs[-1].append(index)
            size += more
        return runs

    def _parts(self, row: Sequence[int], rank: int | None, start: int) -> tuple[Part, ...]:
        """Return parts whose slices follow one another from byte ``start`` on."""
        parts: list[Part] = []
        for index in row:
            tensors = wire_tensors(self._sources[index], self._dtype)
            box = self._box(index, rank)
            weight = WireSlice(tensor=tensors[0], box=box, start=start)
            start += _padded(weight.num_bytes)
            scales = None
            if self._sources[index].quantized:
                scales = WireSlice(tensor=tensors[1], box=scale_box(box), start=start)
                start += _padded(scales.num_bytes)
            parts.append(Part(source=index, weight=weight, scales=scales))
        return tuple(parts)

    def _bytes(self, index: int, rank: int | None) -> int:
        return _part_bytes(self._sources[index], self._box(index, rank), self._dtype)

    def _box(self, index: int, rank: int | None) -> ShardSpec:
        source = self._sources[index]
        return ShardSpec.whole(source.shape) if rank is None else source.boxes[rank]


def _part_bytes(source: Source, box: ShardSpec, dtype: torch.dtype) -> int:
    """Return the bytes in a bucket for a box of the source."""
    if not source.quantized:
        return _padded(prod(box.shape) * _own_dtype(source, dtype).itemsize)
    return _padded(prod(box.shape)) + _padded(4 * prod(_blocks(box.shape)))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
