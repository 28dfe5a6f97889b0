"""Wire of the contract (``engine_api.rollout.WeightWire``) for rollouts that use the exporter.

It brings an exporter's stream to replicas that another process has started.

Buckets are broadcast as bytes, as the exporter has filled them: FP8 stays FP8, and the checksums of
the engine's shards come along. The replicas inherit nothing of the engine's process, so the sender
makes a key, which is part of its address.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.registry import Resolution
from engine_api.weights import WeightExport
from rollout_fp8.export.exporter import EngineStream
from rollout_fp8.transports.channel import WHERE, Watch, no_watch
from rollout_fp8.transports.remote import hang_up, receive_weights
from rollout_fp8.transports.sender import Sender


class Wire:
    """See ``engine_api.rollout.WeightWire``."""

    def __init__(self, *, resolution: Resolution, timeout_s: float) -> None:
        self._device = resolution.device
        self._timeout_s = timeout_s
        self._senders: list[Sender] = []
        # Last address by rank.
        self._sources: dict[int, str] = {}

    def serve(self, host: str, receivers: int) -> WireSender:
        """See ``WeightWire.serve``."""
        key = secrets.token_bytes(32)
        sender = Sender(
            kind="collective", receivers=receivers, host=host, timeout_s=self._timeout_s, key=key
        )
        self._senders.append(sender)
        return WireSender(sender, key)

    @contextmanager
    def receive(self, address: str, rank: int) -> Iterator[WeightExport]:
        """See ``WeightWire.receive``: a ``RemoteStream``."""
        place, _, key = address.rpartition("#")
        self._sources[rank] = place
        device = device_of(self._device).current()
        with receive_weights(
            place, rank=rank, device=device, timeout_s=self._timeout_s, key=bytes.fromhex(key)
        ) as stream:
            yield cast("WeightExport", stream)

    def close(self) -> None:
        """See ``WeightWire.close``."""
        while self._senders:
            self._senders.pop().close()
        while self._sources:
            rank, place = self._sources.popitem()
            hang_up(place, rank)


class WireSender:
    """See ``engine_api.rollout.WatchedSender``."""

    def __init__(self, sender: Sender, key: bytes) -> None:
        self._sender = sender
        self._key = key

    @property
    def address(self) -> str:
        """See ``WeightSender.address``."""
        return f"{self._sender.address}#{self._key.hex()}"

    def send(self, export: WeightExport) -> int:
        """See ``WeightSender.send``. ``export`` is an ``Exporter``'s stream of merged weights."""
        return self.send_watched(export, no_watch)

    def send_watched(self, export: WeightExport, watch: Watch) -> int:
        """See ``WatchedSender.send_watched``."""
        if not isinstance(export, EngineStream):
            raise RolloutError(
                f"cannot carry a {type(export).__name__} to other processes",
                where=WHERE,
                remedy="use rollout_fp8.export.exporter.Exporter without lora "
                "(rollout.lora: merged)",
            )
        self._sender.send_weights(export, watch)
        return sum(bucket.num_bytes for bucket in export.plan.buckets)
