"""The plan of a sync: which rank sends which box of which wire tensor, in which bucket, and what is quantized when.

Made once from every rank's boxes, the same on all ranks. A shard whose edges lie on block edges is quantized where it is
and travels in FP8. Any other is gathered as the engine stores it and quantized afterwards: the result is the same bit for
bit, the bytes on the wire are not, and ``WirePlan.notes`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.wire import ALIGNMENT, BLOCK, SCALE_SUFFIX, BucketPlan, Piece, WirePlan, WireTensor, covers

WHERE = "weight sync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One tensor of the engine's export: the box that each rank holds, by rank."""

    name: str
    boxes: tuple[ShardSpec, ...]
    stored: torch.dtype
    quantized: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.boxes[0].global_shape

    @property
    def aligned(self) -> bool:
        """Whether every rank's box begins and ends on block edges (or at the tensor's end)."""
        return all(box.is_empty or _on_blocks(box) for box in self.boxes)

    def sent_by(self, rank: int) -> bool:
        """Whether ``rank`` sends its box: of copies, only the first travels."""
        return self.boxes[rank].replica == 0 and not self.boxes[rank].is_empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """How one source comes into a bucket: the pieces of its weight and (when quantized) of its scales, by rank."""

    source: Source
    weight: tuple[Piece | None, ...]
    scales: tuple[Piece | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A bucket as the engine's side sees it.

    ``gathered``: every rank fills the region at ``rank * region`` and an all-gather makes the whole buffer. Otherwise
    the sources are gathered first, as they are stored, and every rank fills the whole buffer by itself.
    """

    wire: BucketPlan
    fills: tuple[Fill, ...]
    gathered: bool
    region: int  # bytes a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """``wire`` for the rollout, ``buckets`` for the engine's ranks."""

    wire: WirePlan
    buckets: tuple[Bucket, ...]
    world_size: int


def make_plan(sources: Sequence[Source], *, dtype: torch.dtype, bucket_bytes: int, num_slots: int = 2) -> ExportPlan:
    """Plan for tensors served in ``dtype`` (those not quantized).

    Args:
        sources: in the order of the export, with the boxes of all ranks.
        dtype: of weights that are not quantized.
        bucket_bytes: a bucket's size over all ranks; one larger tensor makes a larger bucket.
        num_slots: buffers that are filled in turn.

    Raises:
        RolloutError: the boxes of a tensor do not cover it exactly once.
    """
    assert sources and num_slots >= 1, "nothing to plan"
    for source in sources:
        _check_cover(source)
    world_size = len(sources[0].boxes)
    groups = _group(sources, dtype, bucket_bytes, world_size)
    buckets = tuple(_bucket(group, dtype, world_size, slot=k % num_slots) for k, group in enumerate(groups))
    slots = tuple(max((b.wire.num_bytes for b in buckets if b.wire.slot == s), default=0) for s in range(num_slots))
    tensors = {t.name: t for source in sources for t in wire_tensors(source, dtype)}
    notes = {s.name: "its shards do not end on block edges: gathered first, then quantized"
             for s in sources if s.quantized and not s.aligned}  # fmt: skip
    wire = WirePlan(tensors=tensors, buckets=tuple(b.wire for b in buckets), slots=slots, notes=notes)
    return ExportPlan(wire=wire, buckets=buckets, world_size=world_size)


def wire_tensors(source: Source, dtype: torch.dtype) -> tuple[WireTensor, ...]:
    """What a source is on the wire: itself in ``dtype``, or its FP8 weight and scales."""
    if not source.quantized:
        return (WireTensor(name=source.name, shape=source.shape, dtype=dtype),)
    return (
        WireTensor(name=source.name, shape=source.shape, dtype=torch.float8_e4m3fn),
        WireTensor(name=source.name + SCALE_SUFFIX, shape=_blocks(source.shape), dtype=torch.float32),
    )


def scale_box(box: ShardSpec) -> ShardSpec:
    """The box of the scales that belong to a block-aligned box of a weight."""
    return ShardSpec(
        global_shape=_blocks(box.global_shape), offset=tuple(o // BLOCK for o in box.offset), shape=_blocks(box.shape),
        replica=box.replica,
    )  # fmt: skip


def whole_fills(plan: Iterable[Fill]) -> list[Piece]:
    """All pieces of some fills."""
    return [p for fill in plan for p in (*fill.weight, *fill.scales) if p is not None]


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


def _on_blocks(box: ShardSpec) -> bool:
    edges = zip(box.offset, box.shape, box.global_shape, strict=True)
    return all(o % BLOCK == 0 and ((o + s) % BLOCK == 0 or o + s == whole) for o, s, whole in edges)


def _check_cover(source: Source) -> None:
    sent = [source.boxes[rank] for rank in range(len(source.boxes)) if source.sent_by(rank)]
    if not covers(source.shape, sent):
        raise RolloutError(f"the shards of {source.name} do not cover {list(source.shape)} exactly once", where=WHERE,
                           why=f"boxes: {[(b.offset, b.shape) for b in sent]}",
                           remedy="the engine's get_per_tensor_param_shard is wrong: certify it with engine-conformance")  # fmt: skip


def _group(sources: Sequence[Source], dtype: torch.dtype, bucket_bytes: int, world_size: int) -> list[list[Source]]:
    """Neighbours that fit into one bucket and are handled alike."""
    groups: list[list[Source]] = []
    sizes: list[int] = []
    for source in sources:
        mine = [_rank_bytes(source, dtype, rank) for rank in range(world_size)]
        whole = world_size * max(mine) if _gathers(source) else sum(mine)
        alike = bool(groups) and _gathers(groups[-1][0]) == _gathers(source)
        if alike and sizes[-1] + whole <= bucket_bytes:
            groups[-1].append(source)
            sizes[-1] += whole
        else:
            groups.append([source])
            sizes.append(whole)
    return groups


def _gathers(source: Source) -> bool:
    return source.aligned or not source.quantized


def _rank_bytes(source: Source, dtype: torch.dtype, rank: int) -> int:
    box = source.boxes[rank]
    if not source.sent_by(rank):
        return 0
    if not source.quantized:
        return _padded(prod(box.shape) * dtype.itemsize)
    return _padded(prod(box.shape)) + _padded(4 * prod(_blocks(box.shape)))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bucket(group: Sequence[Source], dtype: torch.dtype, world_size: int, *, slot: int) -> Bucket:
    gathered = _gathers(group[0])
    if gathered:
        ends = [sum(_rank_bytes(s, dtype, rank) for s in group) for rank in range(world_size)]
        region, num_bytes = max(ends), max(ends) * world_size
        fills = _fills(group, dtype, [rank * region for rank in range(world_size)])
    else:
        alone = [Source(name=s.name, boxes=(ShardSpec.whole(s.shape),), stored=s.stored, quantized=True) for s in group]
        region = num_bytes = sum(_rank_bytes(s, dtype, 0) for s in alone)
        fills = [Fill(source=s, weight=f.weight, scales=f.scales)
                 for s, f in zip(group, _fills(alone, dtype, [0]), strict=True)]  # fmt: skip
    wire = BucketPlan(pieces=tuple(whole_fills(fills)), num_bytes=num_bytes, slot=slot)
    return Bucket(wire=wire, fills=tuple(fills), gathered=gathered, region=region)


def _fills(group: Sequence[Source], dtype: torch.dtype, starts: list[int]) -> list[Fill]:
    """Pieces one after another in each rank's region, from ``starts`` on."""
    cursor = list(starts)

    def place(tensor: WireTensor, box: ShardSpec, rank: int) -> Piece:
        piece = Piece(tensor=tensor, box=box, start=cursor[rank])
        cursor[rank] += _padded(piece.num_bytes)
        return piece

    fills: list[Fill] = []
    for source in group:
        tensors = wire_tensors(source, dtype)
        weight: list[Piece | None] = []
        scales: list[Piece | None] = []
        for rank, box in enumerate(source.boxes):
            sends = source.sent_by(rank)
            weight.append(place(tensors[0], box, rank) if sends else None)
            scales.append(place(tensors[1], scale_box(box), rank) if sends and source.quantized else None)
        fills.append(Fill(source=source, weight=tuple(weight), scales=tuple(scales)))
    return fills
