"""Weights from the engine's first process to rollouts in processes of their own.

They travel over the rollout's own wire, or as whole tensors. Whole tensors are broadcast in
buckets (``buckets``), so that every dtype travels over every backend: the device's (NCCL, HCCL) or
gloo. The group has a store of its own, apart from the default group of the engine's ranks. In an
elastic run they travel over a connection to each replica instead (``streams``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from engine_api.capabilities import Capability
from engine_api.devices import device_of
from engine_api.errors import PluginUnavailable, RolloutError
from engine_api.registry import RolloutRegistry
from engine_api.rollout import WeightExporter, WeightWire, WholeExporter
from engine_api.stores import reach_store, serve_store
from engine_api.weights import WeightExport
from engine_trainer.placement.ray.buckets import pack, unpack
from engine_trainer.placement.ray.streams import StreamWire
from engine_trainer.placement.replica import RolloutSpec, create_exporter

# Values sent instead of a header's length.
END = 0
FAILED = -1


def why_whole(spec: RolloutSpec, capabilities: Collection[Capability]) -> str:
    """Return the reason why whole tensors are sent.

    It is empty where the rollout's own wire carries the exports of its exporter.
    """
    if spec.device != spec.engine_device:
        return f"the rollout is on {spec.device}, the engine on {spec.engine_device}"
    try:
        plugin = RolloutRegistry.resolve(backend=spec.section.name, device=spec.device).plugin
    except PluginUnavailable as error:
        # It is missing in this process; where the replicas are it may be installed.
        return (
            "the engine's process cannot create the exporter: "
            f"{'; '.join(error.trace) or error.what}"
        )
    if plugin.wire is None:
        return f"rollout {spec.section.name!r} has no wire of its own"
    if Capability.EXPORT_SHARDS not in capabilities:
        return f"engine {spec.engine.backend!r} exports no shards"
    return ""


def make_wire(
    spec: RolloutSpec, timeout_s: float, *, whole: bool, elastic: bool = False
) -> WeightWire:
    """Build an end of either kind of wire.

    With ``elastic`` no replica's end can leave another process in a collective operation.

    Raises ``PluginError``.
    """
    if not whole:
        wire = RolloutRegistry.create_wire(
            name=spec.section.name, device=spec.device, timeout_s=timeout_s
        )
        assert wire is not None, "why_whole said so"
        return wire
    if elastic:
        return StreamWire(spec.device, timeout_s)
    return WholeWire(spec.device if spec.device == spec.engine_device else "cpu", timeout_s)


def exporter_for(spec: RolloutSpec, *, whole: bool) -> WeightExporter:
    """Build the exporter for the wire. Raises ``PluginError``, ``ConfigError``."""
    if not whole:
        return create_exporter(spec)
    # A rollout that quantizes by itself takes the weights as they are stored.
    quantizes = spec.section.quantization != "none"
    return WholeExporter(None if quantizes else getattr(torch, spec.dtype))


class WholeWire:
    """A wire of whole tensors for any rollout (see ``engine_api.rollout.WeightWire``).

    The first sync connects all of its processes. A replica that fails does not tell the sender: all
    replicas read the export to its end, and the controller receives the error.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._store: Any = None  # on the sender's side

    def serve(self, host: str, receivers: int) -> WholeWire:
        """Serve the store (see ``WeightWire.serve``)."""
        self._store = serve_store(host, receivers + 1, self._timeout_s)
        self.address = f"{host}:{self._store.port}:{receivers + 1}"
        return self

    def send(self, export: WeightExport) -> int:
        """Send an export (see ``WeightSender.send``)."""
        return self._connected(self.address, 0, self._store).send(export)

    @contextmanager
    def receive(self, address: str, rank: int) -> Iterator[WeightExport]:
        """Receive an export (see ``WeightWire.receive``).

        A tensor is valid until the next one is requested.
        """
        export = self._connected(address, rank + 1, None).receive()
        try:
            yield export
        finally:
            # The broadcasts of other receivers need this one to take part to the end.
            for _ in export:
                pass

    def close(self) -> None:
        """Close the channel (see ``WeightWire.close``)."""
        if self._channel is not None:
            self._channel.close()

    def _connected(self, address: str, rank: int, store: Any) -> Channel:
        if self._channel is None:
            host, port, size = address.rsplit(":", 2)
            store = store or reach_store(host, int(port), int(size), self._timeout_s)
            self._channel = Channel(store, rank, int(size), self._device, self._timeout_s)
        return self._channel


class Channel:
    """A process group that broadcasts from rank 0, the sender.

    All processes construct it together.
    """

    def __init__(self, store: Any, rank: int, size: int, device: str, timeout_s: float) -> None:
        kind = device_of(device)
        self._device = kind.current()
        self._store = store  # lives as long as the group
        self._group = kind.process_group(store, rank, size, timedelta(seconds=timeout_s))

    def send(self, export: WeightExport) -> int:
        """Broadcast a whole export, and return the number of bytes sent.

        The export is read to its end. Raises the export's error, after the receivers have been
        notified.
        """
        sent = 0
        buckets = pack(export, self._device)
        while True:
            try:
                bucket = next(buckets, None)
            except Exception:
                # Whatever the error, the receivers must not wait for more.
                self._broadcast(torch.tensor([FAILED, 0]))
                raise
            if bucket is None:
                self._broadcast(torch.tensor([END, 0]))
                return sent
            header, buffer = bucket
            self._broadcast(torch.tensor([len(header), len(buffer)]))
            self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            self._broadcast(buffer)
            sent += len(buffer)

    def receive(self) -> WeightExport:
        """Yield (name, tensor) as they arrive, to be exhausted by the caller.

        A tensor is valid until the next one is requested. Raises ``RolloutError`` when the sender
        failed.
        """
        while True:
            size, length = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if size == END:
                return
            if size == FAILED:
                raise RolloutError(
                    "the engine's export failed",
                    where="weight sync",
                    remedy="see the engine's error",
                )
            header = self._broadcast(torch.empty(size, dtype=torch.uint8))
            buffer = self._broadcast(torch.empty(length, dtype=torch.uint8))
            yield from unpack(bytes(header.cpu().numpy()), buffer)

    def close(self) -> None:
        """Abort hanging broadcasts, and free the group."""
        self._group.abort()

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        moved = buffer.to(self._device)
        self._group.broadcast(moved, 0).wait()
        return moved
