"""Exporter of an engine's shards: quantize each shard, gather in buckets, keep one plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import LoraConfig, ModelSource, check_choice
from engine_api.contract import Engine
from engine_api.devices import device_of
from engine_api.errors import RolloutError, UnsupportedCapability
from engine_api.heartbeat import watched_each
from engine_api.process_groups import all_gather
from engine_api.registry import Resolution
from engine_api.weights import ShardExport, ShardSpec, WeightExport
from rollout_fp8.export.fill import Filler, Reader, require_value
from rollout_fp8.export.plan import WHERE, Bucket, ExportPlan, Source, make_plan, require_alike
from rollout_fp8.fp8.layers import kind
from rollout_fp8.fp8.quantize import ScalePolicy
from rollout_fp8.install.adapter import Adapter
from rollout_fp8.kernels.cast import FLOATS
from rollout_fp8.model import architecture_of
from rollout_fp8.options import QUANTIZATIONS, Options
from rollout_fp8.phases import Phases
from rollout_fp8.ranks import of_all
from rollout_fp8.wire.format import BucketPlan, Places, WirePlan

log = logging.getLogger("rollout_fp8")

BUCKET_BYTES = 512 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Exporter:
    """``WeightExporter`` of the rollouts ``vllm`` and ``sglang``.

    There is one on every rank of the engine.

    Args:
        resolution: from the registry; buckets live on its device.
        model: its architecture selects the row of the table of quantized layers.
        dtype: dtype of the served weights that are not quantized.
        quantization: ``none`` or ``fp8``.
        options: the rollout's; ``scales`` and ``audit`` are read here, and the rollout checks all
            of them.
        lora: the engine's, for a rollout that serves the adapter in addition to the base weights;
            None: merged weights.
        bucket_bytes: size of a bucket over all ranks; two exist at a time.

    Raises:
        ConfigError: an unknown dtype or quantization, or an architecture that the layer table does
            not know.
    """

    def __init__(
        self,
        *,
        resolution: Resolution,
        model: ModelSource,
        dtype: str,
        quantization: str = "none",
        options: Mapping[str, Any] | None = None,
        lora: LoraConfig | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_choice("rollout.options.dtype", dtype, tuple(DTYPES))
        check_choice("rollout.quantization", quantization, QUANTIZATIONS)
        self._device = torch.device(resolution.device)
        self._dtype = DTYPES[dtype]
        self._bucket_bytes = bucket_bytes
        given = options or {}
        common = Options.parse({key: given[key] for key in ("scales", "audit") if key in given})
        self._scales: ScalePolicy = common.scales
        self._audit = common.audit
        self._lora = lora
        self._architecture = architecture_of(model) if quantization == "fp8" else None
        self._plan: ExportPlan | None = None
        self._filler: Filler | None = None

    def export(self, engine: Engine) -> EngineStream | AdapterStream:
        """Return one sync's stream.

        Iterating it is a collective.

        Raises:
            UnsupportedCapability: the engine does not export shards, or not the adapter that is to
                be served.
        """
        if Capability.EXPORT_SHARDS not in engine.capabilities:
            raise UnsupportedCapability(
                Capability.EXPORT_SHARDS,
                where="weight sync",
                why="the rollout gathers shards by itself",
                remedy="use an engine that declares export_shards, or rollout.name=local",
            )
        if self._lora is None:
            return self._stream(engine)
        if Capability.LORA not in engine.capabilities:
            raise UnsupportedCapability(
                Capability.LORA,
                where="weight sync",
                why="the rollout is to serve an adapter",
                remedy="use an engine that declares lora, or rollout.lora=merged",
            )
        return AdapterStream(engine, lambda: self._stream(engine), self._lora, self._dtype)

    def close(self) -> None:
        """Free the buckets."""
        self._plan = self._filler = None

    def _stream(self, engine: Engine) -> EngineStream:
        """Return the stream of all weights: merged ones, or the base of an adapter.

        The plan is made at the first call.
        """
        if self._plan is None or self._filler is None:
            plan = self._make_plan(engine)
            made: list[Filler] = []
            of_all(
                lambda: made.append(
                    Filler(plan, self._device, scales=self._scales, audit=self._audit)
                )
            )
            self._plan = plan
            self._filler = made[0]
            for name, note in plan.wire.notes.items():
                log.info("weight sync: %s: %s", name, note)
        return EngineStream(self._plan, self._filler, lambda: self._shards(engine))

    def _shards(self, engine: Engine) -> ShardExport:
        # An engine of contract 1.0 does not know the argument, and is not given it.
        if self._lora:
            return engine.get_per_tensor_param_shard(adapter="base")
        return engine.get_per_tensor_param_shard()

    def _make_plan(self, engine: Engine) -> ExportPlan:
        rows = of_all(
            lambda: [(name, spec, shard.dtype) for name, shard, spec in self._shards(engine)]
        )
        require_alike(rows)
        sources = [
            Source(
                name=name,
                stored=stored,
                boxes=tuple(row[i][1] for row in rows),
                quantized=self._quantizes(name),
            )
            for i, (name, _, stored) in enumerate(rows[0])
        ]
        return make_plan(sources, dtype=self._dtype, bucket_bytes=self._bucket_bytes)

    def _quantizes(self, name: str) -> bool:
        return self._architecture is not None and kind(self._architecture, name) == "quantized"


class EngineStream:
    """``WireStream`` of one sync.

    It is exhausted on all ranks together.
    """

    def __init__(self, plan: ExportPlan, filler: Filler, export: Callable[[], ShardExport]) -> None:
        self.plan: WirePlan = plan.wire
        self.device = filler.device
        self.audit = filler.audit
        self._plan = plan
        self._filler = filler
        self._export = export
        self._phases = Phases(filler.device)
        self._left: Iterator[tuple[BucketPlan, Tensor]] | None = None
        self._places: Places | None = None
        self._is_whole = False

    def place(self, places: Places) -> None:
        """Take the places of weights on one rank whose device has kernels, and none elsewhere."""
        if self._filler.can_place:
            self._places = places

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """See ``WireStream.buckets``. The next bucket is made while this one is installed."""
        if self._left is None:
            self._left = watched_each("weight sync", self._make(), lane="sync")
        return self._left

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See ``WireStream.__iter__``.

        The slices of a tensor are assembled in a buffer of its own.

        A stream whose buckets a caller began to take is only run to its end: no rank may leave a
        gather early.
        """
        if self._left is None:
            yield from whole_tensors(self.buckets())
            return
        for _ in self._left:
            pass

    def checksums(self) -> Mapping[str, int]:
        """See ``WireStream.checksums``.

        Raises:
            RolloutError: weights are not finite, or the last bucket has not been taken yet.
        """
        if not self._is_whole:
            raise RolloutError(
                "the stream of weights was not read to its end",
                where=WHERE,
                why="the server left the stream before its last bucket",
                remedy="nothing is generated until a sync succeeds: sync again, or restart the "
                "rollout",
            )
        return self._filler.result(self.plan)

    def seconds(self) -> Mapping[str, float]:
        """See ``WireStream.seconds``."""
        return self._phases.seconds()

    def _make(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """Yield the buckets, with two of them under way.

        One is filled and gathered on streams of the lane while the caller reads the other.
        """
        # Before the lane begins, because the lane waits for the work that is queued here by then.
        self._filler.begin(self._places)
        # A caller that keeps this stream does not keep a server that is closed.
        self._places = None
        lane = _Lane(self._filler, self._phases)
        ready: list[tuple[Bucket, Tensor]] = []
        try:
            # Two passes over the export, or one.
            for _, buckets in groupby(self._plan.buckets, key=lambda bucket: bucket.gathered):
                # With its first tensor an engine may gather the tensors that it computes others
                # from.
                with lane.queue():
                    # After an error too: the export may begin with a collective.
                    reader = self._filler.attempt(self._read, always=True)
                for bucket in buckets:
                    ready.append((bucket, lane.make(bucket, reader)))
                    if len(ready) == len(self.plan.slots):
                        yield lane.hand_over(*ready.pop(0))
                        lane.note_taken()
                with lane.queue():
                    self._filler.attempt(lambda reader=reader: require_value(reader).finish())
            for bucket, buffer in ready:
                yield lane.hand_over(bucket, buffer)
                lane.note_taken()
        finally:
            # After an error too: the memory that the lane reads may then be freed.
            lane.finish()
        self._filler.finish()
        self._is_whole = True

    def _read(self) -> Reader:
        return self._filler.read(self._export())


class AdapterStream:
    """Stream of one sync of a LoRA: the adapter, and the base weights where a rollout lacks them.

    It is exhausted on all ranks together.

    Args:
        engine: exports the adapter.
        base: begins the stream of the base weights.
        lora: the engine's.
        dtype: dtype of the served adapter.
    """

    def __init__(
        self, engine: Engine, base: Callable[[], EngineStream], lora: LoraConfig, dtype: torch.dtype
    ) -> None:
        self._tensors = iter(engine.get_per_tensor_param(dtype=dtype, adapter="only"))
        self._make_base = base
        self._lora = lora
        self._base: EngineStream | None = None
        self._asked = False
        self._seconds = 0.0

    def adapter(self) -> Adapter:
        """Return the adapter, whole on every rank, on the CPU.

        It is to be called first, and once.
        """
        begin = time.perf_counter()
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors}
        self._seconds = time.perf_counter() - begin
        return Adapter(lora=self._lora, tensors=tensors)

    def base(self, *, needed: bool) -> EngineStream | None:
        """Return the base weights' stream if any rank's rollout needs it, and None if not.

        All ranks then get it. To be called after ``adapter``.
        """
        self._asked = True
        self._base = self._make_base() if any(of_all(lambda: needed)) else None
        return self._base

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of ``gather``, for the adapter."""
        return {"gather": self._seconds}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that were not taken yet, so that a rank without a server takes part."""
        # Not "yield from": a caller that stops half-way would close the engine's generator, and no
        # rank may do that.
        for pair in self._tensors:
            yield pair
        if not self._asked:
            self.base(needed=False)
        for pair in self._base or ():
            yield pair


class _Lane:
    """Lane that makes buckets during the caller's work.

    Where the device has streams, one computes this rank's part of a bucket while the other gathers
    the parts of the bucket before.
    """

    def __init__(self, filler: Filler, phases: Phases) -> None:
        self._filler = filler
        self._phases = phases
        # Event by slot: the bucket in it is complete.
        self._done: dict[int, Any] = {}
        # Event by slot: its reader has finished.
        self._read: dict[int, Any] = {}
        self._last: int | None = None
        self._stream: Any = None
        self._wire: Any = None
        if device_of(filler.device.type).has_streams:
            if filler.stream is None:
                filler.stream = self._module.Stream(filler.device)
                filler.wire_stream = self._module.Stream(filler.device)
            self._stream = filler.stream
            self._wire = filler.wire_stream
            self._stream.wait_stream(self._callers)

    @property
    def _module(self) -> Any:
        return device_of(self._filler.device.type).module

    @property
    def _callers(self) -> Any:
        return self._module.current_stream(self._filler.device)

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context in which queued work comes before the lane's next computation."""
        return nullcontext() if self._stream is None else self._module.stream(self._stream)

    def make(self, bucket: Bucket, reader: Reader | None) -> Tensor:
        slot = bucket.wire.slot
        with self.queue():
            if self._stream is not None and slot in self._read:
                self._stream.wait_event(self._read[slot])
            buffer = self._filler.fill(bucket, reader, self._phases, gather)
        if self._stream is None:
            self._filler.complete(bucket, self._phases, gather)
            return buffer
        self._wire.wait_stream(self._stream)
        with self._module.stream(self._wire):
            self._filler.complete(bucket, self._phases, gather)
        self._done[slot] = self._wire.record_event()
        return buffer

    def hand_over(self, bucket: Bucket, buffer: Tensor) -> tuple[BucketPlan, Tensor]:
        self._last = bucket.wire.slot
        if self._stream is not None:
            self._module.current_stream(buffer.device).wait_event(self._done[self._last])
        return self._filler.rest_of(bucket), buffer[: bucket.wire.num_bytes]

    def note_taken(self) -> None:
        if self._stream is not None and self._last is not None:
            self._read[self._last] = self._callers.record_event()

    def finish(self) -> None:
        if self._stream is not None:
            self._callers.wait_stream(self._stream)
            self._callers.wait_stream(self._wire)


def collect_export(
    export: WeightExport,
    *,
    device: torch.device,
    dtype: torch.dtype,
    architecture: str | None,
    scales: ScalePolicy,
    audit: bool,
) -> EngineStream:
    """Collect a plain export of whole tensors, and return its stream.

    One copy of the weights is made as they come, so that a name or tensor that cannot be served is
    found before anything is installed. ``architecture``: quantize by its row of the table; None:
    quantize nothing.

    Raises:
        RolloutError: a name comes twice, a tensor has a dtype that is not cast, or there is no
            tensor at all.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in export:
        if name in tensors or tensor.dtype not in FLOATS:
            why = "it is exported twice" if name in tensors else f"it is {tensor.dtype}"
            raise RolloutError(
                f"cannot install {name}",
                where=WHERE,
                why=why,
                remedy="export each weight once, in float32, bfloat16 or float16",
            )
        tensors[name] = tensor.detach().to(device, copy=True)
    if not tensors:
        raise RolloutError(
            "the export is empty", where=WHERE, remedy="export every weight of the model"
        )
    whole = {name: ShardSpec.whole(tensor.shape) for name, tensor in tensors.items()}
    sources = [
        Source(
            name=name,
            stored=tensor.dtype,
            boxes=(whole[name],),
            quantized=architecture is not None and kind(architecture, name) == "quantized",
        )
        for name, tensor in tensors.items()
    ]
    plan = make_plan(sources, dtype=dtype, bucket_bytes=BUCKET_BYTES)
    filler = Filler(plan, device, scales=scales, audit=audit)
    return EngineStream(
        plan, filler, lambda: ((name, tensor, whole[name]) for name, tensor in tensors.items())
    )


def gather(receive: Tensor, send: Tensor) -> None:
    """Gather all ranks' ``send`` [S] (uint8) one after another into ``receive`` [world × S].

    ``send`` may lie inside ``receive``.
    """
    all_gather(receive, send)


def whole_tensors(buckets: Iterator[tuple[BucketPlan, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor), each when its last slice has come."""
    parts: dict[str, tuple[Tensor, int]] = {}
    for plan, buffer in buckets:
        for wire_slice in plan.slices:
            name = wire_slice.tensor.name
            part = wire_slice.view(buffer)
            if wire_slice.box == ShardSpec.whole(wire_slice.tensor.shape, wire_slice.box.replica):
                yield name, part
                continue
            whole, missing = parts.get(name) or (
                torch.empty(
                    wire_slice.tensor.shape, dtype=wire_slice.tensor.dtype, device=buffer.device
                ),
                wire_slice.tensor.num_bytes,
            )
            whole[wire_slice.box.slices] = part
            parts[name] = (whole, missing - wire_slice.num_bytes)
            if parts[name][1] == 0:
                yield name, parts.pop(name)[0]
    assert not parts, f"incomplete: {list(parts)}"
