"""Both ends of a sync as functions for separate processes, with the defects that tests need."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint

from engine_api.weights import ShardSpec
from rollout_fp8.export import exporter
from rollout_fp8.export.exporter import EngineStream
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.phases import Phases
from rollout_fp8.transports.remote import receive_weights
from rollout_fp8.transports.sender import Sender

CPU = torch.device("cpu")


def stream_of(
    seed: int,
    *,
    fp8: bool,
    device: torch.device = CPU,
    bucket_bytes: int = 300_000,
    kept: Any = None,
) -> Any:
    """Return a stream over several buckets, of the weights that ``seed`` makes.

    It uses the buffers of ``kept``, if given.
    """
    weights = checkpoint(seed)
    if kept is not None:
        shards = [
            (name, tensor.to(device), ShardSpec.whole(tensor.shape))
            for name, tensor in weights.items()
        ]
        return EngineStream(kept._plan, kept._filler, lambda: iter(shards))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "BUCKET_BYTES", bucket_bytes)
        stream = exporter.collect_export(
            iter(weights.items()),
            device=device,
            dtype=torch.bfloat16,
            scales="fp32",
            audit=True,
            architecture="Qwen3ForCausalLM" if fp8 else None,
        )
    assert len(stream.plan.buckets) >= 4
    return stream


class Spoilt:
    """Stream that calls ``at`` before bucket 2 is sent."""

    def __init__(self, stream: Any, at: Any) -> None:
        self._stream, self._at = stream, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def buckets(self):
        for index, (bucket, buffer) in enumerate(self._stream.buckets()):
            if index == 2:
                self._at(bucket, buffer)
            yield bucket, buffer


def serve(
    addresses: Any,
    results: Any,
    rank: int,
    tp: int,
    fp8: bool,
    device: str,
    defect: str | None,
    timeout_s: float,
) -> None:
    """Run a receiver: one sync for each address until None, then report its parameters' bytes."""
    torch.set_num_threads(1)
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    model = ServedModel(tp=tp, rank=rank, fp8=fp8, dtype=torch.bfloat16).to(place)
    model.names = dict(model.named_parameters())
    receiver: Receiver | None = None
    seen: set[int] = set()
    results.put("up")
    while (address := addresses.get()) is not None:
        try:
            with receive_weights(address, rank=rank, device=place, timeout_s=timeout_s) as stream:
                plan = stream.plan
                receiver = receiver or Receiver(model, plan, model.load_weights)
                receiver.sync(_watched(stream, defect, seen), Phases(place))
                stream.answer = (receiver.boxes, receiver.served().tolist())
            raw = {
                name: p.detach().cpu().contiguous().view(torch.uint8).numpy()
                for name, p in model.named_parameters()
            }
            results.put(
                (
                    "ok",
                    rank,
                    raw,
                    id(plan),
                    sorted(seen),
                    dict(stream.seconds()),
                    dict(stream.checksums()),
                )
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the test hears of it
            results.put(("error", rank, type(error).__name__, str(error)))


def _watched(stream: Any, defect: str | None, seen: set[int]) -> Any:
    class Watched:
        plan, device, audit = stream.plan, stream.device, stream.audit

        def buckets(self):
            for index, (bucket, buffer) in enumerate(stream.buckets()):
                seen.add(buffer.data_ptr())
                if index == 2 and defect == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if index == 2 and defect == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if index == 2 and defect == "raise":
                    raise ValueError("no room for bucket 2")
                if index == 2 and defect == "slow":
                    time.sleep(0.2)
                yield bucket, buffer
                if defect == "late":  # an overwrite of a slot that is still read is found
                    time.sleep(0.02)

    return Watched()


def send(addresses: Any, results: Any, kind: str, defect: str | None, timeout_s: float) -> None:
    """Run a sender: one sync."""
    torch.set_num_threads(1)
    sender = Sender(kind=kind, timeout_s=timeout_s)
    addresses.put(sender.address)

    def spoil(bucket: Any, buffer: Any) -> None:
        if defect == "raise":
            raise ValueError("the engine broke")
        os.kill(os.getpid(), signal.SIGKILL if defect == "kill" else signal.SIGSTOP)

    try:
        sender.send_weights(Spoilt(stream_of(0, fp8=False), spoil))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test hears of it
        results.put(("error", type(error).__name__, str(error)))
