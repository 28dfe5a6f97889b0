"""The plan of a sync: which rank sends which box of which wire tensor, in which bucket, and what is quantized when.

Made once from every rank's boxes, the same on all ranks. A shard whose edges lie on block edges is quantized where it is
and travels in FP8. Any other is gathered as the engine stores it and quantized afterwards: the result is the same bit for
bit, the bytes on the wire are not, and ``WirePlan.notes`` says so.
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
    """One tensor of the engine's export: the box that each rank holds, by rank, and the ranks whose boxes travel."""

    name: str
    boxes: tuple[ShardSpec, ...]
    stored: torch.dtype
    quantized: bool
    senders: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.boxes[0].global_shape

    @property
    def aligned(self) -> bool:
        """Whether every rank's box begins and ends on block edges (or at the tensor's end)."""
        return all(box.is_empty or _on_blocks(box) for box in self.boxes)

    @property
    def gathers_last(self) -> bool:
        """Whether each sender fills its own part of a bucket, before the gather."""
        return self.aligned or not self.quantized


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank puts into a bucket: its box of a source, as a piece (and, when quantized, one of the scales)."""

    source: int  # its place in ``ExportPlan.sources``
    weight: WireSlice
    scales: WireSlice | None

    @property
    def pieces(self) -> list[WireSlice]:
        """The one or the two."""
        return [self.weight] if self.scales is None else [self.weight, self.scales]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A bucket as the engine's side sees it.

    ``gathered``: rank ``r`` fills ``parts[r]`` into the region at ``r * region``, and an all-gather makes the whole buffer.
    Otherwise the sources are gathered first, as they are stored, and every rank fills ``parts[0]`` by itself.
    """

    wire: BucketPlan
    parts: tuple[tuple[Part, ...], ...]
    gathered: bool
    region: int  # bytes a rank

    def of_rank(self, rank: int) -> tuple[Part, ...]:
        """What ``rank`` fills."""
        return self.parts[rank if self.gathered else 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """``wire`` for the rollout; ``sources``, as they are exported, and ``buckets`` for the engine's ranks."""

    wire: WirePlan
    sources: tuple[Source, ...]
    buckets: tuple[Bucket, ...]
    world_size: int


Row = Sequence[tuple[str, ShardSpec, torch.dtype]]  # what one rank exports, in order


def require_alike(rows: Sequence[Row]) -> None:
    """Raise ``RolloutError`` where a rank's export differs from the first rank's in a name, a dtype, a whole shape or the order."""
    for rank, row in enumerate(rows):
        for first, other in zip_longest(map(_told, rows[0]), map(_told, row), fillvalue="nothing"):
            if first != other:
                raise RolloutError(
                    "the ranks export different tensors",
                    where=WHERE,
                    why=f"rank 0 exports {first} where rank {rank} exports {other}",
                    remedy="build the engine of one model on all ranks; each lists all tensors in one order",
                )


def _told(tensor: tuple[str, ShardSpec, torch.dtype]) -> str:
    name, box, dtype = tensor
    return f"{name} ({str(dtype).removeprefix('torch.')} {list(box.global_shape)})"


def make_plan(
    sources: Sequence[Source], *, dtype: torch.dtype, bucket_bytes: int, num_slots: int = 2
) -> ExportPlan:
    """Plan for tensors served in ``dtype`` (those not quantized).

    Each rank's boxes fill its regions one after another, whatever the others send meanwhile: experts that lie on one rank
    each take no more room on the wire than rows that lie on all. What is gathered first comes last.

    Args:
        sources: in the order of the export, with the boxes of all ranks.
        dtype: of weights that are not quantized.
        bucket_bytes: a bucket's size over all ranks; one larger tensor makes a larger bucket.
        num_slots: buffers that are filled in turn.

    Raises:
        RolloutError: the boxes of a tensor do not cover it exactly once, a name comes twice, or in a dtype that is not cast.
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
        *((True, rows) for rows in pack.gathered(world_size)),
        *((False, [row]) for row in pack.late()),
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
    """What a source is on the wire: itself in ``dtype``, or its FP8 weight and scales."""
    if not source.quantized:
        return (WireTensor(name=source.name, shape=source.shape, dtype=dtype),)
    return (
        WireTensor(name=source.name, shape=source.shape, dtype=torch.float8_e4m3fn),
        WireTensor(
            name=source.name + SCALE_SUFFIX, shape=_blocks(source.shape), dtype=torch.float32
        ),
    )


def scale_box(box: ShardSpec) -> ShardSpec:
    """The box of the scales that belong to a block-aligned box of a weight."""
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
            why="it comes twice" if count > 1 else f"it is {source.stored}",
            remedy="the engine must export each weight once, in float32, bfloat16 or float16",
        )


def _check_cover(source: Source) -> None:
    once = [box for box in source.boxes if box.replica == 0 and not box.is_empty]
    copies = {(box.offset, box.shape) for box in source.boxes if box.replica and not box.is_empty}
    unlike = copies - {
        (box.offset, box.shape) for box in once
    }  # one of them might be sent in place of a box
    if unlike or not covers(source.shape, once):
        raise RolloutError(
            f"the shards of {source.name} do not cover {list(source.shape)} exactly once",
            where=WHERE,
            why=f"boxes: {[(b.offset, b.shape) for b in once]}"
            + (f"; copies of none: {sorted(unlike)}" if unlike else ""),
            remedy="the engine's get_per_tensor_param_shard is wrong: certify it with engine-conformance",
        )


def _with_senders(sources: Sequence[Source], dtype: torch.dtype, world_size: int) -> list[Source]:
    """Of the ranks that hold copies of a box, the one that has the least to send so far sends it."""
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
    """Sources into regions, regions into buckets."""

    def __init__(self, sources: Sequence[Source], dtype: torch.dtype, bucket_bytes: int) -> None:
        self._sources, self._dtype, self._bucket_bytes = sources, dtype, bucket_bytes

    def gathered(self, world_size: int) -> Iterator[list[list[int]]]:
        """For each bucket and rank: the sources that the rank sends."""
        limit = self._bucket_bytes // world_size
        mine = [
            [i for i, s in enumerate(self._sources) if s.gathers_last and rank in s.senders]
            for rank in range(world_size)
        ]
        runs = [self._runs(indices, limit, rank) for rank, indices in enumerate(mine)]
        return map(list, zip_longest(*runs, fillvalue=[]))

    def late(self) -> list[list[int]]:
        """For each bucket: the sources that all ranks fill alike."""
        return self._runs(
            [i for i, s in enumerate(self._sources) if not s.gathers_last], self._bucket_bytes, None
        )

    def bucket(self, rows: list[list[int]], *, gathered: bool, slot: int) -> Bucket:
        """``rows``: of each rank, or the one that is of all."""
        ranks = list(range(len(rows))) if gathered else [None]
        ends = [
            sum(self._bytes(i, rank) for i in row) for rank, row in zip(ranks, rows, strict=True)
        ]
        region = max(ends)
        parts = tuple(
            self._parts(row, rank, k * region)
            for k, (rank, row) in enumerate(zip(ranks, rows, strict=True))
        )
        pieces = tuple(piece for row in parts for part in row for piece in part.pieces)
        wire = BucketPlan(pieces=pieces, num_bytes=region * len(rows), slot=slot)
        return Bucket(wire=wire, parts=parts, gathered=gathered, region=region)

    def _runs(self, indices: Sequence[int], limit: int, rank: int | None) -> list[list[int]]:
        """Neighbours that together stay within ``limit`` bytes."""
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
        """Pieces one after another from byte ``start`` on."""
        parts: list[Part] = []
        for index in row:
            tensors, box = wire_tensors(self._sources[index], self._dtype), self._box(index, rank)
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
    """In a bucket, for a box of the source."""
    if not source.quantized:
        return _padded(prod(box.shape) * dtype.itemsize)
    return _padded(prod(box.shape)) + _padded(4 * prod(_blocks(box.shape)))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
