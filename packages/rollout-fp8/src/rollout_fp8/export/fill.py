"""Filler of buckets on the engine's side: quantize or cast this rank's shards, then gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.weights import ShardExport, ShardSpec, assemble
from rollout_fp8.export.plan import WHERE, Bucket, ExportPlan, Source
from rollout_fp8.fp8.quantize import BoundQuantize, QuantizePlan, ScalePolicy, can_count
from rollout_fp8.kernels.cast import BoundCast, CastPlan
from rollout_fp8.kernels.table import (
    Count,
    Layout,
    describe,
    has_kernels,
    has_rows,
    layouts,
    misfit,
)
from rollout_fp8.phases import Phases
from rollout_fp8.wire.audit import MODULUS
from rollout_fp8.wire.checksum import BoundChecksum, ChecksumPlan, count_of
from rollout_fp8.wire.format import BucketPlan, Places, WirePlan, WireSlice

T = TypeVar("T")
Gather = Callable[[Tensor, Tensor], None]


class Filler:
    """Buffers of a plan, and the computations that fill them.

    Nothing here waits for the device except ``result``, and shards that come to the host.
    """

    def __init__(
        self, plan: ExportPlan, device: torch.device, *, scales: ScalePolicy, audit: bool
    ) -> None:
        self.device = device
        self.audit = audit
        self._is_queued = device_of(device.type).has_streams
        # The same streams for all syncs, because PyTorch keeps freed memory for the stream that it
        # was taken on. One computes, and the other gathers what has been computed.
        self.stream: Any = None
        self.wire_stream: Any = None
        self.rank = dist.get_rank() if plan.world_size > 1 else 0
        self._plan = plan
        self._world_size = plan.world_size
        self._scales: ScalePolicy = scales
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for size in plan.wire.slots
        ]
        # They end with the places, whose memory the launches hold.
        self._placed: WeakKeyDictionary[Places, _Prepared] = WeakKeyDictionary()
        self._unplaced = _Prepared()
        self._places: Callable[[], Places | None] = _no_places
        # This rank's boxes as the engine gave them last: most engines give the same objects again.
        self._boxes = [source.boxes[self.rank] for source in plan.sources]
        self._index = {name: index for index, name in enumerate(plan.wire.tensors)}
        self._sums = torch.zeros(len(self._index), dtype=torch.int64, device=device)
        # One flag for each source that this rank computes.
        flags = sum(len(bucket.of_rank(self.rank)) for bucket in plan.buckets)
        self._flags = torch.zeros(flags, dtype=torch.int32, device=device)
        self._totals = torch.zeros(
            2 * len(self._index) + self._world_size, dtype=torch.int64, device=device
        )
        self._error: Exception | None = None

    @property
    def can_place(self) -> bool:
        """True if weights may be written where they are served.

        Another rank's weights come through a gather, and only a kernel adds up what it computes
        without reading it back, so that the audit sees whether it arrived.
        """
        return self._world_size == 1 and has_kernels(self.device)

    @property
    def _prepared(self) -> _Prepared:
        """The launches of the current sync."""
        places = self._places()
        return self._unplaced if places is None else self._placed[places]

    def begin(self, places: Places | None) -> None:
        """Reset the sums, flags and error of the last sync.

        ``places``: where slices are written that have a place; None: all stay in the buckets.
        """
        self._places = _no_places
        if places is not None:
            self._placed.setdefault(places, _Prepared())
            self._places = ref(places)
        self._sums.zero_()
        self._flags.zero_()
        self._error = None

    def read(self, shards: ShardExport) -> Reader:
        """Return a pass over an engine's export."""
        return Reader(self._plan, self._boxes, shards)

    def rest_of(self, bucket: Bucket) -> BucketPlan:
        """Return the bucket without the slices that were written where they are served."""
        work = self._prepared.work.get(id(bucket))
        return bucket.wire if work is None else work.rest

    def attempt(self, work: Callable[[], T], *, always: bool = False) -> T | None:
        """Return ``work()``, or None if an earlier attempt of this sync failed (unless ``always``).

        An error of one rank among several is raised by ``finish``: until then the other ranks rely
        on this one in their gathers.
        """
        if self._error is not None and not always:
            return None
        try:
            return work()
        except Exception as error:
            # Of any type: the other ranks are on their way into the next gather.
            if self._world_size == 1:
                raise
            self._error = self._error or error
            return None

    def fill(self, bucket: Bucket, reader: Reader | None, phases: Phases, gather: Gather) -> Tensor:
        """Return the bucket's buffer with this rank's part, queued on the current stream.

        After an error its content is undefined.
        """
        buffer = self._buffers[bucket.wire.slot]
        indices = [part.source for part in bucket.of_rank(self.rank)]
        taken = self.attempt(lambda: self._take(bucket, require_value(reader), indices))
        mine, is_checked = taken or (None, False)
        if not bucket.gathered:
            with phases.phase("gather"):
                sources = [self._plan.sources[index] for index in indices]
                mine = self._gather_first(sources, mine, gather)
                is_checked = is_checked and self._world_size == 1
        with phases.phase("quantize"):
            self.attempt(
                lambda: self._compute(bucket, require_value(mine), buffer, is_checked=is_checked)
            )
        return buffer

    def complete(self, bucket: Bucket, phases: Phases, gather: Gather) -> None:
        """Gather the ranks' parts of a bucket that ``fill`` has filled, on the current stream."""
        if not bucket.gathered or self._world_size == 1:
            return
        buffer = self._buffers[bucket.wire.slot]
        with phases.phase("gather"):
            region = buffer[self.rank * bucket.region : (self.rank + 1) * bucket.region]
            gather(buffer[: bucket.wire.num_bytes], region if self._is_queued else region.clone())

    def finish(self) -> None:
        """Add up over ranks what each of them counted, on all ranks after the last bucket.

        Raises:
            Exception: this rank's own error of an earlier attempt.
        """
        broken = torch.zeros_like(self._sums)
        flagged = self._prepared.flagged
        broken[flagged] = self._flags[: len(flagged)].to(torch.int64)
        failed = torch.zeros(self._world_size, dtype=torch.int64, device=self.device)
        failed[self.rank] = int(self._error is not None)
        self._totals = torch.cat([self._sums, broken, failed])
        if self._world_size > 1:
            dist.all_reduce(self._totals)
        # Its traceback holds shards.
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def result(self, plan: WirePlan) -> Mapping[str, int]:
        """Return checksums by name, over all ranks (none without audit), when the device is done.

        Raises:
            RolloutError: a weight was not finite, or a rank failed.
        """
        totals = self._totals.tolist()
        count = len(self._index)
        sums = totals[:count]
        flags = totals[count : 2 * count]
        failed = totals[2 * count :]
        if any(failed):
            ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
            raise RolloutError(
                "the export is not complete",
                where=WHERE,
                why=f"it failed on rank {ranks}",
                remedy="that rank's own error says why; fix it, then sync again",
            )
        if any(flags):
            bad = [name for name, flag in zip(plan.tensors, flags, strict=True) if flag]
            raise self._not_finite(plan, bad)
        if not self.audit:
            return {}
        return {name: value % MODULUS for name, value in zip(plan.tensors, sums, strict=True)}

    def _not_finite(self, plan: WirePlan, bad: Sequence[str]) -> RolloutError:
        stored = {source.name: source.stored for source in self._plan.sources}
        small = [name for name in bad if plan.tensors[name].dtype == torch.float16 != stored[name]]
        why = f"{len(bad)} tensors hold NaN or infinity"
        remedy = "the engine's weights are broken: go back to a checkpoint"
        if small:
            largest = torch.finfo(torch.float16).max
            why += f", {len(small)} of them in float16, whose largest value is {largest:.0f}"
            remedy = (
                f"rollout.options.dtype=bfloat16; if they are not finite in that either, {remedy}"
            )
        return RolloutError(
            f"not finite: {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}",
            where=WHERE,
            why=why,
            remedy=remedy,
        )

    def _take(
        self, bucket: Bucket, reader: Reader, indices: Sequence[int]
    ) -> tuple[list[Tensor], bool]:
        """Return this rank's shards on the device, and whether they lie as they always did.

        There may be thousands, so those that do are looked at once.
        """
        shards = reader.take(indices)
        prepared = self._prepared
        known = prepared.in_place.get(id(bucket))
        if known is not None and misfit(shards, known) is None:
            return shards, True
        reader.check(indices, shards)
        here = [self._here(shard) for shard in shards]
        is_first = id(bucket) not in prepared.work
        if is_first and all(a is b for a, b in zip(shards, here, strict=True)):
            prepared.in_place[id(bucket)] = layouts(shards)
        return here, False

    def _here(self, shard: Tensor) -> Tensor:
        if shard.device.type != self.device.type:
            # A copy to the host that does not wait would be read before it has arrived.
            shard = shard.to(self.device, non_blocking=self._is_queued)
        return shard if shard.is_contiguous() else _in_rows(shard)

    def _compute(
        self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor, *, is_checked: bool
    ) -> None:
        try:
            work = self._prepared.work.get(id(bucket)) or self._prepare(bucket, mine, buffer)
        # A plan raises it: words are cut, or a weight is not of two dimensions.
        except ValueError as error:
            raise RolloutError(
                "the engine's shards cannot be sent in their present slices",
                where=WHERE,
                why=str(error),
                remedy="use another layout of the engine (engine.parallelism), or "
                "rollout.name=local",
            ) from error
        if not is_checked:
            work.check(mine)
        work.run(mine, self._sums)

    def _prepare(self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor) -> _Work:
        """Prepare the parts that stay the same: views into the buffer, and the launches' tables."""
        parts = list(enumerate(bucket.of_rank(self.rank)))
        quantized = [(i, part.weight, part.scales) for i, part in parts if part.scales is not None]
        plain = [(i, part.weight) for i, part in parts if part.scales is None]
        weights = [w for _, w, _ in quantized] + [w for _, w in plain]
        sources = {id(part.weight): mine[i] for i, part in parts}
        placed = self._find_places(weights, sources)

        def view(wire_slice: WireSlice) -> Tensor:
            return placed.get(id(wire_slice), wire_slice.view(buffer))

        outs = [view(w) for _, w, _ in quantized], [s.view(buffer) for *_, s in quantized]
        casts = [view(w) for _, w in plain]
        quantized_sources = [mine[i] for i, *_ in quantized]
        plain_sources = [mine[i] for i, _ in plain]
        counted = self._counted_slices(bucket) if self.audit else []
        counts: dict[int, Count] = {}
        if counted and has_kernels(self.device):
            # The launch that writes a weight adds up its checksum, without another pass over
            # memory.
            for wire_slice in weights:
                count = self._count(wire_slice, sources[id(wire_slice)], view(wire_slice))
                if count is not None:
                    counts[id(wire_slice)] = count
        counted = [wire_slice for wire_slice in counted if id(wire_slice) not in counts]
        quantize = cast = checksums = None
        if quantized:
            quantize = QuantizePlan(
                layouts(quantized_sources),
                *map(layouts, outs),
                scales=self._scales,
                counts=[counts.get(id(w)) for _, w, _ in quantized],
            ).bind(*outs)
        if plain:
            cast = CastPlan(
                layouts(plain_sources), layouts(casts), [counts.get(id(w)) for _, w in plain]
            ).bind(casts)
        if counted:
            views = [view(wire_slice) for wire_slice in counted]
            boxes = [wire_slice.box for wire_slice in counted]
            groups = [self._index[wire_slice.tensor.name] for wire_slice in counted]
            checksums = ChecksumPlan(layouts(views), boxes, groups).bind(views)
        rest = bucket.wire
        if placed:
            left = [wire_slice for wire_slice in rest.slices if id(wire_slice) not in placed]
            rest = replace(rest, slices=tuple(left))
        # Flags are taken once nothing can fail any more.
        flags = (
            self._own_flags([w for _, w, _ in quantized]),
            self._own_flags([w for _, w in plain]),
        )
        work = _Work(
            layouts=layouts(mine),
            quantized=[i for i, *_ in quantized],
            plain=[i for i, _ in plain],
            quantize=quantize,
            cast=cast,
            checksums=checksums,
            flags=flags,
            rest=rest,
        )
        self._prepared.work[id(bucket)] = work
        return work

    def _find_places(
        self, weights: Sequence[WireSlice], sources: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the places to which weights are written, by the weight's identity."""
        places = self._places()
        if places is None:
            return {}
        placed: dict[int, Tensor] = {}
        for wire_slice in weights:
            place = places.find(wire_slice)
            if place is not None and self._fits(wire_slice, sources[id(wire_slice)], place):
                placed[id(wire_slice)] = place
        return placed

    def _fits(self, wire_slice: WireSlice, source: Tensor, place: Tensor) -> bool:
        """Return whether a launch writes into a tensor and, if asked, adds up what it writes."""
        if place.dtype != wire_slice.tensor.dtype or not has_rows(*layouts([place])):
            return False
        try:
            return not self.audit or self._count(wire_slice, source, place) is not None
        # A word of four bytes is cut.
        except ValueError:
            return False

    def _count(self, wire_slice: WireSlice, source: Tensor, out: Tensor) -> Count | None:
        """Return how the launch that writes a slice adds up its checksum, or None if it cannot."""
        dtype = wire_slice.tensor.dtype
        if dtype.itemsize > 2 or (dtype == torch.float8_e4m3fn and not can_count(source, out)):
            return None
        (layout,) = layouts([out])
        return count_of(layout, wire_slice.box, self._index[wire_slice.tensor.name])

    def _own_flags(self, slices: Sequence[WireSlice]) -> Tensor:
        """Return the next flags, one for each of these weights."""
        flagged = self._prepared.flagged
        first = len(flagged)
        flagged += [self._index[wire_slice.tensor.name] for wire_slice in slices]
        return self._flags[first : len(flagged)]

    def _gather_first(
        self, sources: Sequence[Source], mine: Sequence[Tensor] | None, gather: Gather
    ) -> list[Tensor] | None:
        """Return whole tensors as the engine stores them.

        All of them are gathered, also where a rank has no shard to give.
        """
        if self._world_size == 1:
            return list(require_value(mine))
        shards = mine or [None] * len(sources)
        wholes = [self._gather_one(*pair, gather) for pair in zip(sources, shards, strict=True)]
        return None if self._error else [require_value(whole) for whole in wholes]

    def _gather_one(self, source: Source, shard: Tensor | None, gather: Gather) -> Tensor | None:
        """Gather a whole tensor from boxes that may differ in size."""
        boxes = [
            replace(box, replica=0)
            if rank in source.senders
            else ShardSpec.nothing(box.global_shape)
            for rank, box in enumerate(source.boxes)
        ]
        sizes = [torch.Size(b.shape).numel() * source.stored.itemsize for b in boxes]
        send = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if shard is not None and sizes[self.rank]:
            send[: sizes[self.rank]] = shard.contiguous().view(torch.uint8).reshape(-1)
        receive = send.new_empty(self._world_size * len(send))
        gather(receive, send)
        parts = [
            row[:size].view(source.stored).view(box.shape)
            for row, size, box in zip(receive.view(self._world_size, -1), sizes, boxes, strict=True)
        ]
        return self.attempt(lambda: assemble(zip(parts, boxes, strict=True)))

    def _counted_slices(self, bucket: Bucket) -> list[WireSlice]:
        """Return the slices whose checksums this rank adds up.

        The slices of a bucket that every rank fills alike are the first rank's.
        """
        if not bucket.gathered and self.rank > 0:
            return []
        return [wire_slice for part in bucket.of_rank(self.rank) for wire_slice in part.slices]


class Reader:
    """Pass over an engine's export, which is compared with the plan on the way.

    Ranks read at their own pace, so the export must not be a collective from its first tensor on.
    It may begin with a collective, because all ranks begin here.
    """

    def __init__(self, plan: ExportPlan, boxes: list[ShardSpec], shards: ShardExport) -> None:
        self._sources = plan.sources
        self._boxes = boxes
        self._shards = shards
        # Index of the source that was read last.
        self._at = 0
        self._last = self._read()

    def take(self, wanted: Sequence[int]) -> list[Tensor]:
        """Return this rank's shards of these sources.

        In the order of the export they come after the shards taken before.

        Raises:
            RolloutError: names or boxes are not those of the plan.
        """
        mine: list[Tensor] = []
        for place in wanted:
            while self._at < place:
                self._at += 1
                self._last = self._read()
            mine.append(self._last)
        return mine

    def check(self, indices: Sequence[int], shards: Sequence[Tensor]) -> None:
        """Raise ``RolloutError`` where shards are of another shape or dtype than planned."""
        for index, shard in zip(indices, shards, strict=True):
            source = self._sources[index]
            shape = self._boxes[index].shape
            if shard.dtype != source.stored or shard.shape != shape:
                raise _changed(
                    f"{source.name} {shape} {source.stored}",
                    f"{tuple(shard.shape)} {shard.dtype}",
                )

    def finish(self) -> None:
        """Read to the export's end.

        Raises:
            RolloutError: the export does not end where it was planned.
        """
        self.take([len(self._sources) - 1])
        for name, _, _ in self._shards:
            raise _changed("nothing more", name)

    def _read(self) -> Tensor:
        place = self._at
        source = self._sources[place]
        box = self._boxes[place]
        name, shard, spec = next(self._shards, ("nothing", None, None))
        if shard is None or name != source.name or not (spec is box or spec == box):
            raise _changed(f"{source.name} {box}", f"{name} {spec}")
        if spec is not None:
            self._boxes[place] = spec
        return shard


def _in_rows(shard: Tensor) -> Tensor:
    """Return the shard as kernels read it, with rows at one distance.

    The contract does not specify an export's strides.
    """
    return shard if has_rows(*layouts([shard])) else shard.contiguous()


def require_value(value: T | None) -> T:
    """Return the value that an earlier attempt made."""
    assert value is not None, "an earlier step of this sync failed"
    return value


def _changed(expected: str, found: str) -> RolloutError:
    return RolloutError(
        "the engine's export has changed since the first sync",
        where=WHERE,
        why=f"expected {expected}, got {found}",
        remedy="create a new exporter",
    )


def _no_places() -> None:
    """Return no places: every slice stays in its bucket."""


@dataclass(kw_only=True, slots=True)
class _Prepared:
    """Launches that write to the same memory at every sync, by the bucket's identity."""

    work: dict[int, _Work] = field(default_factory=dict)
    in_place: dict[int, tuple[Layout, ...]] = field(default_factory=dict)
    """Layouts of a bucket's shards at the first sync, if kernels read them where they are."""

    flagged: list[int] = field(default_factory=list)
    """Index of the tensor of each flag, bucket by bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Launches of one bucket.

    ``quantized`` and ``plain`` are indices into its shards; ``rest`` is left to the reader.
    """

    layouts: tuple[Layout, ...]
    quantized: list[int]
    plain: list[int]
    flags: tuple[Tensor, Tensor]
    quantize: BoundQuantize | None
    cast: BoundCast | None
    checksums: BoundChecksum | None
    rest: BucketPlan

    def check(self, mine: Sequence[Tensor]) -> None:
        """Raise ``RolloutError`` for shards of other layouts than those prepared for."""
        if (i := misfit(mine, self.layouts)) is not None:
            (found,) = layouts(mine[i : i + 1])
            raise RolloutError(
                "the engine's shards have another layout than at the first sync",
                where=WHERE,
                why=f"expected {describe(self.layouts[i])}, got {describe(found)}",
                remedy="create a new exporter",
            )

    def run(self, mine: Sequence[Tensor], sums: Tensor) -> None:
        """Queue the launches for shards of the layouts that they were prepared for."""
        if self.quantize is not None:
            self.quantize.run([mine[i] for i in self.quantized], self.flags[0], sums)
        if self.cast is not None:
            self.cast.run([mine[i] for i in self.plain], self.flags[1], sums)
        if self.checksums is not None:
            self.checksums.run(sums)
