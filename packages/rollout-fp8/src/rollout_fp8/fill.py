"""Filling buckets on the engine's side: quantize or cast this rank's shards into its region, then gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.weights import ShardExport, ShardSpec, assemble
from rollout_fp8.audit import MODULUS
from rollout_fp8.checksum import BoundChecksum, ChecksumPlan
from rollout_fp8.kernels.cast import CastPlan
from rollout_fp8.kernels.table import Layout, layouts, misfit
from rollout_fp8.phases import Phases
from rollout_fp8.plan import WHERE, Bucket, ExportPlan, Source
from rollout_fp8.quantize import QuantizePlan, ScalePolicy
from rollout_fp8.wire import Piece, WirePlan

Gather = Callable[[Tensor, Tensor], None]


class Filler:
    """The buffers of a plan, and what is computed into them. Nothing here waits for the device but ``result``."""

    def __init__(self, plan: ExportPlan, device: torch.device, *, scales: ScalePolicy, audit: bool) -> None:
        self.device, self.audit = device, audit
        self._in_place = device_of(device.type).has_streams
        self.rank = dist.get_rank() if plan.world_size > 1 else 0
        self._plan = plan
        self._world_size = plan.world_size
        self._scales: ScalePolicy = scales
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.wire.slots]
        self._work: dict[int, _Work] = {}
        self._place = {name: index for index, name in enumerate(plan.wire.tensors)}
        self._sums = torch.zeros(len(self._place), dtype=torch.int64, device=device)
        # One flag a source that this rank computes, bucket by bucket; which source that is, by its place.
        flags = sum(len(bucket.of_rank(self.rank)) for bucket in plan.buckets)
        self._flags = torch.zeros(flags, dtype=torch.int32, device=device)
        self._flagged: list[int] = []
        self._totals = torch.zeros(2, len(self._place), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Forget what the last sync counted."""
        self._sums.zero_()
        self._flags.zero_()

    def fill(self, bucket: Bucket, reader: Reader, phases: Phases, gather: Gather) -> Tensor:
        """The bucket's buffer, whole, on this rank; queued on the current stream."""
        buffer = self._buffers[bucket.wire.slot]
        parts = bucket.of_rank(self.rank)
        mine = [self._here(shard) for shard in reader.take([part.source for part in parts])]
        if not bucket.gathered:
            with phases.phase("gather"):
                sources = [self._plan.sources[part.source] for part in parts]
                mine = [self._gather_one(*pair, gather) for pair in zip(sources, mine, strict=True)]
        with phases.phase("quantize"):
            work = self._work.get(id(bucket)) or self._prepare(bucket, mine, buffer)
            work.run(mine, self._sums)
        if bucket.gathered and self._world_size > 1:
            with phases.phase("gather"):
                region = buffer[self.rank * bucket.region : (self.rank + 1) * bucket.region]
                gather(buffer[: bucket.wire.num_bytes], region if self._in_place else region.clone())
        return buffer

    def finish(self) -> None:
        """After the last bucket, on all ranks: add up over ranks what each of them counted."""
        broken = torch.zeros_like(self._sums)
        broken[self._flagged] = self._flags[: len(self._flagged)].to(torch.int64)
        self._totals = torch.stack([self._sums, broken])
        if self._world_size > 1:
            dist.all_reduce(self._totals)

    def result(self, plan: WirePlan) -> Mapping[str, int]:
        """Checksums by name, over all ranks (none without audit); waits for the device.

        Raises ``RolloutError`` where a weight was not finite.
        """
        sums, flags = self._totals.tolist()
        bad = [name for name, flag in zip(plan.tensors, flags, strict=True) if flag]
        if bad:
            raise RolloutError(f"not finite: {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}", where=WHERE,
                               why=f"{len(bad)} tensors hold NaN or inf",
                               remedy="the engine's weights are broken: go back to a checkpoint")  # fmt: skip
        return {name: value % MODULUS for name, value in zip(plan.tensors, sums, strict=True)} if self.audit else {}

    def _here(self, shard: Tensor) -> Tensor:
        return shard if shard.device.type == self.device.type else shard.to(self.device, non_blocking=True)

    def _prepare(self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor) -> _Work:
        """What does not change from sync to sync: the views into the buffer, and the launches' tables."""
        parts = list(enumerate(bucket.of_rank(self.rank)))
        quantized = [(i, part.weight, part.scales) for i, part in parts if part.scales is not None]
        plain = [(i, part.weight) for i, part in parts if part.scales is None]
        outs = [w.view(buffer) for _, w, _ in quantized], [s.view(buffer) for *_, s in quantized]
        casts = [w.view(buffer) for _, w in plain]
        flags = self._own_flags([w for _, w, _ in quantized]), self._own_flags([w for _, w in plain])
        sources = [mine[i] for i, *_ in quantized], [mine[i] for i, _ in plain]
        pieces = self._answers_for(bucket)
        views = [piece.view(buffer) for piece in pieces]
        self._work[id(bucket)] = _Work(
            layouts=layouts(mine), quantized=[i for i, *_ in quantized], outs=outs, plain=[i for i, _ in plain], casts=casts,
            flags=flags,
            quantize=QuantizePlan(layouts(sources[0]), *map(layouts, outs), scales=self._scales) if quantized else None,
            cast=CastPlan(layouts(sources[1]), layouts(casts)) if plain else None,
            checksums=ChecksumPlan(layouts(views), [p.box for p in pieces], [self._place[p.tensor.name] for p in pieces])
            .bind(views) if self.audit and pieces else None,
        )  # fmt: skip
        return self._work[id(bucket)]

    def _own_flags(self, pieces: Sequence[Piece]) -> Tensor:
        """The next flags, one for each of these weights."""
        first = len(self._flagged)
        self._flagged += [self._place[piece.tensor.name] for piece in pieces]
        return self._flags[first : len(self._flagged)]

    def _gather_one(self, source: Source, shard: Tensor, gather: Gather) -> Tensor:
        """A whole tensor as the engine stores it, from boxes that need not be of one size."""
        if self._world_size == 1:
            return shard
        boxes = [
            replace(box, replica=0) if rank in source.senders else ShardSpec.nothing(box.global_shape)
            for rank, box in enumerate(source.boxes)
        ]
        sizes = [torch.Size(b.shape).numel() * shard.dtype.itemsize for b in boxes]
        send = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if sizes[self.rank]:
            send[: sizes[self.rank]] = shard.contiguous().view(torch.uint8).reshape(-1)
        receive = send.new_empty(self._world_size * len(send))
        gather(receive, send)
        parts = [row[:size].view(shard.dtype).view(box.shape)
                 for row, size, box in zip(receive.view(self._world_size, -1), sizes, boxes, strict=True)]  # fmt: skip
        return assemble(zip(parts, boxes, strict=True))

    def _answers_for(self, bucket: Bucket) -> list[Piece]:
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
        return shard


def _changed(expected: str, found: str) -> RolloutError:
    return RolloutError("the engine's export has changed since the first sync", where=WHERE,
                        why=f"{expected} expected, got {found}", remedy="make a new exporter")  # fmt: skip


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
            raise RolloutError("the engine's shards have another layout than at the first sync", where=WHERE,
                               remedy="make a new exporter")  # fmt: skip
        if self.quantize is not None:
            self.quantize.fill([mine[i] for i in self.quantized], *self.outs, self.flags[0])
        if self.cast is not None:
            self.cast.fill([mine[i] for i in self.plain], self.casts, self.flags[1])
        if self.checksums is not None:
            self.checksums.run(sums)
