"""Filling buckets on the engine's side: quantize or cast this rank's shards into its region, then gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.weights import ShardExport, ShardSpec, assemble
from rollout_fp8.export.plan import WHERE, Bucket, ExportPlan, Source
from rollout_fp8.fp8.quantize import QuantizePlan, ScalePolicy
from rollout_fp8.kernels.cast import CastPlan
from rollout_fp8.kernels.table import Layout, layouts, misfit, rows_of
from rollout_fp8.phases import Phases
from rollout_fp8.wire.audit import MODULUS
from rollout_fp8.wire.checksum import BoundChecksum, ChecksumPlan
from rollout_fp8.wire.format import WirePlan, WireSlice

T = TypeVar("T")
Gather = Callable[[Tensor, Tensor], None]


class Filler:
    """The buffers of a plan, and what is computed into them. Nothing here waits for the device but ``result``, and shards that come to the host."""

    def __init__(
        self, plan: ExportPlan, device: torch.device, *, scales: ScalePolicy, audit: bool
    ) -> None:
        self.device, self.audit = device, audit
        self._is_queued = device_of(device.type).has_streams
        # For all syncs, once there is one: PyTorch keeps freed memory for the stream that it was taken on.
        self.stream: Any = None
        self.rank = dist.get_rank() if plan.world_size > 1 else 0
        self._plan = plan
        self._world_size = plan.world_size
        self._scales: ScalePolicy = scales
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for size in plan.wire.slots
        ]
        self._work: dict[int, _Work] = {}
        self._place = {name: index for index, name in enumerate(plan.wire.tensors)}
        self._sums = torch.zeros(len(self._place), dtype=torch.int64, device=device)
        # One flag a source that this rank computes, bucket by bucket; which source that is, by its place.
        flags = sum(len(bucket.of_rank(self.rank)) for bucket in plan.buckets)
        self._flags = torch.zeros(flags, dtype=torch.int32, device=device)
        self._flagged: list[int] = []
        self._totals = torch.zeros(
            2 * len(self._place) + self._world_size, dtype=torch.int64, device=device
        )
        self._error: Exception | None = None

    def begin(self) -> None:
        """Forget what the last sync counted."""
        self._sums.zero_()
        self._flags.zero_()
        self._error = None

    def attempt(self, work: Callable[[], T], *, always: bool = False) -> T | None:
        """``work()``, unless an attempt of this sync failed before (``always``: even then).

        An error of one rank among several is raised by ``finish``: until then the others count on this one in their gathers.
        """
        if self._error is not None and not always:
            return None
        try:
            return work()
        except (
            Exception
        ) as error:  # whatever it is: the other ranks are on their way into the next gather
            if self._world_size == 1:
                raise
            self._error = self._error or error
            return None

    def fill(self, bucket: Bucket, reader: Reader | None, phases: Phases, gather: Gather) -> Tensor:
        """The bucket's buffer, whole, on this rank; queued on the current stream. After an error, gathered with anything in it."""
        buffer = self._buffers[bucket.wire.slot]
        places = [part.source for part in bucket.of_rank(self.rank)]
        mine = self.attempt(lambda: [self._here(shard) for shard in there(reader).take(places)])
        if not bucket.gathered:
            with phases.phase("gather"):
                mine = self._gather_first(
                    [self._plan.sources[place] for place in places], mine, gather
                )
        with phases.phase("quantize"):
            self.attempt(lambda: self._compute(bucket, there(mine), buffer))
        if bucket.gathered and self._world_size > 1:
            with phases.phase("gather"):
                region = buffer[self.rank * bucket.region : (self.rank + 1) * bucket.region]
                gather(
                    buffer[: bucket.wire.num_bytes], region if self._is_queued else region.clone()
                )
        return buffer

    def finish(self) -> None:
        """After the last bucket, on all ranks: add up over ranks what each of them counted. Raises this rank's own error."""
        broken = torch.zeros_like(self._sums)
        broken[self._flagged] = self._flags[: len(self._flagged)].to(torch.int64)
        failed = torch.zeros(self._world_size, dtype=torch.int64, device=self.device)
        failed[self.rank] = int(self._error is not None)
        self._totals = torch.cat([self._sums, broken, failed])
        if self._world_size > 1:
            dist.all_reduce(self._totals)
        error, self._error = self._error, None  # its traceback holds shards
        if error is not None:
            raise error

    def result(self, plan: WirePlan) -> Mapping[str, int]:
        """Checksums by name, over all ranks (none without audit); waits for the device.

        Raises ``RolloutError`` where a weight was not finite, or a rank failed.
        """
        totals, count = self._totals.tolist(), len(self._place)
        sums, flags, failed = totals[:count], totals[count : 2 * count], totals[2 * count :]
        if any(failed):
            ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
            raise RolloutError(
                "the export is not whole",
                where=WHERE,
                why=f"it failed on rank {ranks}",
                remedy="that rank's own error says why; mend it, then sync again",
            )
        bad = [name for name, flag in zip(plan.tensors, flags, strict=True) if flag]
        if bad:
            raise self._not_finite(plan, bad)
        return (
            {name: value % MODULUS for name, value in zip(plan.tensors, sums, strict=True)}
            if self.audit
            else {}
        )

    def _not_finite(self, plan: WirePlan, bad: Sequence[str]) -> RolloutError:
        stored = {source.name: source.stored for source in self._plan.sources}
        small = [name for name in bad if plan.tensors[name].dtype == torch.float16 != stored[name]]
        why, remedy = (
            f"{len(bad)} tensors hold NaN or inf",
            "the engine's weights are broken: go back to a checkpoint",
        )
        if small:
            why += f", {len(small)} of them in float16, which holds nothing above {torch.finfo(torch.float16).max:.0f}"
            remedy = (
                f"rollout.options.dtype=bfloat16; if they are not finite in that either, {remedy}"
            )
        return RolloutError(
            f"not finite: {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}",
            where=WHERE,
            why=why,
            remedy=remedy,
        )

    def _here(self, shard: Tensor) -> Tensor:
        if shard.device.type != self.device.type:
            # To the host a copy that does not wait would be read before it is there.
            shard = shard.to(self.device, non_blocking=self._is_queued)
        return shard if shard.is_contiguous() else _in_rows(shard)

    def _compute(self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor) -> None:
        try:
            work = self._work.get(id(bucket)) or self._prepare(bucket, mine, buffer)
        except ValueError as error:  # a plan's: words that are cut, or no weight of two dimensions
            raise RolloutError(
                "the engine's shards cannot be sent as they are cut",
                where=WHERE,
                why=str(error),
                remedy="another layout of the engine (engine.parallelism), or rollout.name=local",
            ) from error
        work.run(mine, self._sums)

    def _prepare(self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor) -> _Work:
        """What does not change from sync to sync: the views into the buffer, and the launches' tables."""
        parts = list(enumerate(bucket.of_rank(self.rank)))
        quantized = [(i, part.weight, part.scales) for i, part in parts if part.scales is not None]
        plain = [(i, part.weight) for i, part in parts if part.scales is None]
        outs = [w.view(buffer) for _, w, _ in quantized], [s.view(buffer) for *_, s in quantized]
        casts = [w.view(buffer) for _, w in plain]
        sources = [mine[i] for i, *_ in quantized], [mine[i] for i, _ in plain]
        pieces = self._answers_for(bucket)
        views = [piece.view(buffer) for piece in pieces]
        self._work[id(bucket)] = _Work(
            layouts=layouts(mine),
            quantized=[i for i, *_ in quantized],
            outs=outs,
            plain=[i for i, _ in plain],
            casts=casts,
            quantize=QuantizePlan(layouts(sources[0]), *map(layouts, outs), scales=self._scales)
            if quantized
            else None,
            cast=CastPlan(layouts(sources[1]), layouts(casts)) if plain else None,
            checksums=ChecksumPlan(
                layouts(views),
                [p.box for p in pieces],
                [self._place[p.tensor.name] for p in pieces],
            ).bind(views)
            if self.audit and pieces
            else None,
            flags=(
                self._own_flags([w for _, w, _ in quantized]),
                self._own_flags([w for _, w in plain]),
            ),  # once nothing can fail
        )
        return self._work[id(bucket)]

    def _own_flags(self, pieces: Sequence[WireSlice]) -> Tensor:
        """The next flags, one for each of these weights."""
        first = len(self._flagged)
        self._flagged += [self._place[piece.tensor.name] for piece in pieces]
        return self._flags[first : len(self._flagged)]

    def _gather_first(
        self, sources: Sequence[Source], mine: Sequence[Tensor] | None, gather: Gather
    ) -> list[Tensor] | None:
        """Whole tensors as the engine stores them. All are gathered, also where a rank has nothing to give."""
        if self._world_size == 1:
            return list(there(mine))
        shards = mine or [None] * len(sources)
        wholes = [self._gather_one(*pair, gather) for pair in zip(sources, shards, strict=True)]
        return None if self._error else [there(whole) for whole in wholes]

    def _gather_one(self, source: Source, shard: Tensor | None, gather: Gather) -> Tensor | None:
        """From boxes that need not be of one size."""
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

    def _answers_for(self, bucket: Bucket) -> list[WireSlice]:
        """Whose checksums this rank adds up; a bucket that every rank fills alike is the first rank's."""
        if not bucket.gathered and self.rank > 0:
            return []
        return [piece for part in bucket.of_rank(self.rank) for piece in part.pieces]


class Reader:
    """One pass over an engine's export, compared with the plan as it goes.

    Ranks read at their own pace, so the export must not be a collective from its first tensor on (it may begin with one:
    all ranks begin here).
    """

    def __init__(self, plan: ExportPlan, rank: int, shards: ShardExport) -> None:
        self._sources, self._rank, self._shards = plan.sources, rank, shards
        self._at = 0  # of the one that was read last
        self._last = self._read()

    def take(self, wanted: Sequence[int]) -> list[Tensor]:
        """This rank's shards of these sources, which lie in the order of the export behind those taken before.

        Raises ``RolloutError`` when the export is not the planned one.
        """
        mine: list[Tensor] = []
        for place in wanted:
            while self._at < place:
                self._at += 1
                self._last = self._read()
            mine.append(self._last)
        return mine

    def finish(self) -> None:
        """To the export's end. Raises ``RolloutError`` when it is not where it was planned."""
        self.take([len(self._sources) - 1])
        for name, _, _ in self._shards:
            raise _changed("nothing more", name)

    def _read(self) -> Tensor:
        source = self._sources[self._at]
        name, shard, spec = next(self._shards, ("nothing", None, None))
        box = source.boxes[self._rank]
        if shard is None or name != source.name or not (spec is box or spec == box):
            raise _changed(f"{source.name} {box}", f"{name} {spec}")
        if shard.dtype != source.stored or shard.shape != box.shape:
            raise _changed(
                f"{name} {box.shape} {source.stored}", f"{tuple(shard.shape)} {shard.dtype}"
            )
        return shard


def _in_rows(shard: Tensor) -> Tensor:
    """As kernels read it: rows at one distance. The contract says nothing of an export's strides."""
    try:
        rows_of(layouts([shard])[0])
    except ValueError:
        return shard.contiguous()
    return shard


def there(value: T | None) -> T:
    """What an attempt before this one made."""
    assert value is not None, "an earlier step of this sync failed"
    return value


def _changed(expected: str, found: str) -> RolloutError:
    return RolloutError(
        "the engine's export has changed since the first sync",
        where=WHERE,
        why=f"{expected} expected, got {found}",
        remedy="make a new exporter",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The launches of one bucket; ``quantized`` and ``plain`` are places in its fills."""

    layouts: tuple[Layout, ...]
    quantized: list[int]
    outs: tuple[list[Tensor], list[Tensor]]
    plain: list[int]
    casts: list[Tensor]
    flags: tuple[Tensor, Tensor]
    quantize: QuantizePlan | None
    cast: CastPlan | None
    checksums: BoundChecksum | None

    def run(self, mine: Sequence[Tensor], sums: Tensor) -> None:
        """Queue it for shards of the layouts that it was prepared for."""
        if misfit(mine, self.layouts) is not None:
            raise RolloutError(
                "the engine's shards have another layout than at the first sync",
                where=WHERE,
                remedy="make a new exporter",
            )
        if self.quantize is not None:
            self.quantize.fill([mine[i] for i in self.quantized], *self.outs, self.flags[0])
        if self.cast is not None:
            self.cast.fill([mine[i] for i in self.plain], self.casts, self.flags[1])
        if self.checksums is not None:
            self.checksums.run(sums)
