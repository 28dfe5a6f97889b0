"""Filling buckets on the engine's side: quantize or cast this rank's shards into its region, then gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.errors import RolloutError
from engine_api.weights import ShardExport, ShardSpec, assemble
from rollout_fp8.audit import MODULUS
from rollout_fp8.checksum import BoundChecksum, ChecksumPlan
from rollout_fp8.kernels.cast import CastPlan
from rollout_fp8.kernels.table import Layout, layouts, misfit
from rollout_fp8.phases import Phases
from rollout_fp8.plan import WHERE, Bucket, ExportPlan, Fill
from rollout_fp8.quantize import QuantizePlan, ScalePolicy
from rollout_fp8.wire import Piece, WirePlan

Gather = Callable[[Tensor, Tensor], None]


class Filler:
    """The buffers of a plan, and what is computed into them. Nothing here waits for the device but ``result``."""

    def __init__(self, plan: ExportPlan, device: torch.device, *, scales: ScalePolicy, audit: bool) -> None:
        self.device, self.audit = device, audit
        self._cuda = device.type == "cuda"
        self._rank = dist.get_rank() if plan.world_size > 1 else 0
        self._world_size = plan.world_size
        self._scales: ScalePolicy = scales
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.wire.slots]
        self._work: dict[int, _Work] = {}
        self._place = {name: index for index, name in enumerate(plan.wire.tensors)}
        self._sums = torch.zeros(len(self._place), dtype=torch.int64, device=device)
        # One flag a source that this rank computes, bucket by bucket; which source that is, by its place.
        self._flags = torch.zeros(sum(len(b.fills) for b in plan.buckets), dtype=torch.int32, device=device)
        self._flagged: list[int] = []
        self._totals = torch.zeros(2, len(self._place), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Forget what the last sync counted."""
        self._sums.zero_()
        self._flags.zero_()

    def fill(self, bucket: Bucket, shards: ShardExport, phases: Phases, gather: Gather) -> Tensor:
        """The bucket's buffer, whole, on this rank; queued on the current stream."""
        buffer = self._buffers[bucket.wire.slot]
        mine = self._take(shards, bucket)
        if not bucket.gathered:
            with phases.phase("gather"):
                mine = [self._gather_one(fill, shard, gather) for fill, shard in zip(bucket.fills, mine, strict=True)]
        with phases.phase("quantize"):
            work = self._work.get(id(bucket)) or self._prepare(bucket, mine, buffer)
            work.run(mine, self._sums)
        if bucket.gathered and self._world_size > 1:
            with phases.phase("gather"):
                region = buffer[self._rank * bucket.region : (self._rank + 1) * bucket.region]
                gather(buffer[: bucket.wire.num_bytes], region if self._cuda else region.clone())
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

    def _take(self, shards: ShardExport, bucket: Bucket) -> list[Tensor]:
        """This rank's shards of a bucket, in the plan's order. Short, for there may be thousands a sync."""
        mine: list[Tensor] = []
        for fill in bucket.fills:
            name, shard, spec = next(shards, ("nothing", None, None))
            source = fill.source
            box = source.boxes[self._rank]
            if shard is None or name != source.name or not (spec is box or spec == box):
                raise RolloutError("the engine's export has changed since the first sync", where=WHERE,
                                   why=f"{source.name} {box} expected, got {name} {spec}",
                                   remedy="make a new exporter")  # fmt: skip
            mine.append(shard if shard.is_cuda == self._cuda else shard.to(self.device, non_blocking=True))
        return mine

    def _prepare(self, bucket: Bucket, mine: Sequence[Tensor], buffer: Tensor) -> _Work:
        """What does not change from sync to sync: the views into the buffer, and the launches' tables."""
        rank = self._rank if bucket.gathered else 0
        rows = [(i, f.weight[rank], f.scales[rank]) for i, f in enumerate(bucket.fills)]
        quantized = [(i, w, s) for i, w, s in rows if w is not None and s is not None]
        plain = [(i, w) for i, w, s in rows if w is not None and s is None]
        outs = [w.view(buffer) for _, w, _ in quantized], [s.view(buffer) for *_, s in quantized]
        casts = [w.view(buffer) for _, w in plain]
        count = len(self._flagged)
        flags = self._flags[count:].split(
            [len(quantized), len(plain), len(self._flags) - count - len(quantized) - len(plain)]
        )
        self._flagged += [
            self._place[bucket.fills[i].source.name] for i in [*(q[0] for q in quantized), *(p[0] for p in plain)]
        ]
        sources = [mine[i] for i, *_ in quantized], [mine[i] for i, _ in plain]
        pieces = self._answers_for(bucket)
        views = [piece.view(buffer) for piece in pieces]
        self._work[id(bucket)] = _Work(
            layouts=layouts(mine), quantized=[i for i, *_ in quantized], outs=outs, plain=[i for i, _ in plain], casts=casts,
            flags=(flags[0], flags[1]),
            quantize=QuantizePlan(layouts(sources[0]), *map(layouts, outs), scales=self._scales) if quantized else None,
            cast=CastPlan(layouts(sources[1]), layouts(casts)) if plain else None,
            checksums=ChecksumPlan(layouts(views), [p.box for p in pieces], [self._place[p.tensor.name] for p in pieces])
            .bind(views) if self.audit and pieces else None,
        )  # fmt: skip
        return self._work[id(bucket)]

    def _gather_one(self, fill: Fill, shard: Tensor, gather: Gather) -> Tensor:
        """A whole tensor as the engine stores it, from boxes that need not be of one size."""
        if self._world_size == 1:
            return shard
        boxes = [
            b if fill.source.sent_by(r) else ShardSpec.nothing(b.global_shape) for r, b in enumerate(fill.source.boxes)
        ]
        sizes = [torch.Size(b.shape).numel() * shard.dtype.itemsize for b in boxes]
        send = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if sizes[self._rank]:
            send[: sizes[self._rank]] = shard.contiguous().view(torch.uint8).reshape(-1)
        receive = send.new_empty(self._world_size * len(send))
        gather(receive, send)
        parts = [row[:size].view(shard.dtype).view(box.shape)
                 for row, size, box in zip(receive.view(self._world_size, -1), sizes, boxes, strict=True)]  # fmt: skip
        return assemble(zip(parts, boxes, strict=True))

    def _answers_for(self, bucket: Bucket) -> list[Piece]:
        """Whose checksums this rank adds up; a bucket that every rank fills alike is the first rank's."""
        if not bucket.gathered and self._rank > 0:
            return []
        rank = self._rank if bucket.gathered else 0
        return [p for f in bucket.fills for p in (f.weight[rank], f.scales[rank]) if p is not None]


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
