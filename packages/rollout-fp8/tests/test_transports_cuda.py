"""CUDA IPC and NCCL between processes: the cases of ``test_transports`` that need GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transport_peers import Spoilt, stream_of
from transport_processes import Receivers, check_bytes, folder, started
from waiting import NEVER_S

from engine_api.errors import RolloutError
from rollout_fp8.transports.sender import Sender
from rollout_fp8.wire.audit import Audit

__all__ = ["folder", "started"]  # fixtures
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.distributed, needs_gpu]
HERE = torch.device("cuda", 0)
# Each on the sender's GPU, or on the next one.
PLACES = [
    pytest.param("ipc", "cuda:0", id="ipc, same GPU"),
    pytest.param(
        "ipc",
        "cuda:1",
        id="ipc, a peer",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    ),
    pytest.param(
        "collective",
        "cuda:1",
        id="nccl",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    ),
]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_every_byte_arrives_sync_after_sync_over_the_same_plan_and_buffers(
    started, kind, place, fp8
) -> None:
    receivers = started(Receivers(fp8=fp8, defects=("late",), device=place, timeout_s=NEVER_S))
    sender = started(Sender(kind=kind, timeout_s=NEVER_S))
    kept: Any = None
    seen = []
    for seed in range(4):
        stream = kept = stream_of(seed, fp8=fp8, device=HERE, kept=kept)
        receivers.tell(sender.address)
        delivery = sender.send_weights(stream)
        (row,) = receivers.rows()
        check_bytes(row, seed, 1, fp8)
        ((boxes, sums),) = delivery.answers
        Audit(stream.plan, [boxes]).check(delivery.checksums, [sums])
        seen.append((row[3], row[4]))
    assert len({plan for plan, _ in seen}) == 1
    assert all(buffers == seen[0][1] for _, buffers in seen)
    assert len(seen[0][1]) == 2


def test_buffers_that_were_made_anew_are_opened_anew(started) -> None:
    receivers = started(Receivers(device="cuda:0", timeout_s=NEVER_S))
    sender = started(Sender(kind="ipc", timeout_s=NEVER_S))
    streams = []
    for seed in range(3):
        # The last stream's buffers still exist, so these are others.
        streams.append(stream_of(seed, fp8=False, device=HERE))
        receivers.tell(sender.address)
        sender.send_weights(streams[-1])
        check_bytes(receivers.rows()[0], seed, 1, False)


def test_two_receivers_on_one_gpu(started) -> None:
    receivers = started(Receivers(2, defects=("late", None), device="cuda:0", timeout_s=NEVER_S))
    sender = started(Sender(kind="ipc", receivers=2, timeout_s=NEVER_S))
    kept: Any = None
    for seed in range(2):
        kept = stream_of(seed, fp8=False, device=HERE, kept=kept)
        receivers.tell(sender.address)
        sender.send_weights(kept)
        for row in receivers.rows():
            check_bytes(row, seed, 2, False)


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_a_corrupted_bucket_is_found_by_the_audit(started, kind, place) -> None:
    receivers = started(Receivers(fp8=True, device=place, timeout_s=NEVER_S))
    sender = started(Sender(kind=kind, timeout_s=NEVER_S))
    receivers.tell(sender.address)
    stream = stream_of(0, fp8=True, device=HERE)
    flipped: list[str] = []

    def flip(bucket: Any, buffer: torch.Tensor) -> None:
        buffer[bucket.slices[0].start + 5] ^= 4
        flipped.append(bucket.slices[0].tensor.name)

    delivery = sender.send_weights(Spoilt(stream, flip))
    ((boxes, sums),) = delivery.answers
    with pytest.raises(RolloutError, match=f"1 of .* tensors differ: {flipped[0]}"):
        Audit(stream.plan, [boxes]).check(delivery.checksums, [sums])


@pytest.mark.parametrize(("kind", "place"), PLACES)
@pytest.mark.parametrize(
    ("defect", "said"), [("kill", "closed the channel"), ("raise", "no room"), ("stop", "silent")]
)
def test_a_receiver_that_breaks_is_an_error_in_time_and_the_next_sync_is_good(
    started, kind, place, defect, said
) -> None:
    receivers = started(Receivers(defects=(defect,), device=place, timeout_s=NEVER_S))
    sender = started(Sender(kind=kind, timeout_s=20 if defect == "stop" else NEVER_S))
    receivers.tell(sender.address)
    with pytest.raises(RolloutError, match=said):
        sender.send_weights(stream_of(0, fp8=False, device=HERE))
    again = started(Receivers(device=place, timeout_s=NEVER_S))
    again.tell(sender.address)
    sender.send_weights(stream_of(1, fp8=False, device=HERE))
    check_bytes(again.rows()[0], 1, 1, False)
