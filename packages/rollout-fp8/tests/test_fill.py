"""Filling of buckets where the device's queue matters, with stand-ins for tensors and streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporter_ranks import Shards
from exporter_ranks import exporter as exporter_of
from served_model import checkpoint
from transport_peers import stream_of

from rollout_fp8.export import exporter, fill


class Elsewhere:
    """Stand-in for a shard on a GPU, for the copy to the host."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.non_blocking: list[bool] = []

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Elsewhere:
        self.non_blocking.append(non_blocking)
        return self

    def is_contiguous(self) -> bool:
        return True


@pytest.mark.parametrize("queued", [False, True], ids=["host", "device"])
def test_what_comes_to_the_host_has_come_before_it_is_read(monkeypatch, queued) -> None:
    """Check that only a device with a queue gets a copy that does not wait.

    The host would read data that is not there yet.
    """
    monkeypatch.setattr(fill, "device_of", lambda _: SimpleNamespace(has_streams=queued))
    filler: Any = stream_of(0, fp8=False)._filler
    shard = Elsewhere()
    assert filler._here(shard) is shard
    assert shard.non_blocking == [queued]


class Streams:
    """Stand-in for a device's module of streams.

    It records its calls, and the places where an engine is read.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.at = "caller"
        # What has happened before the next work of each queue.
        self.before: dict[str, set[str]] = defaultdict(set)

    def do(self, work: str) -> None:
        """Queue work on the current queue, and keep what has happened before it."""
        self.before[work] = set(self.before[self.at])
        self.before[self.at].add(work)

    def current_stream(self, _: Any = None) -> Queue:
        return Queue(self, self.at)

    def Stream(self, _: Any) -> Queue:  # noqa: N802 - torch's name
        self.made += 1
        return Queue(self, ("lane", "wire")[self.made - 1])

    @contextmanager
    def stream(self, queue: Queue) -> Iterator[None]:
        before, self.at = self.at, queue.name
        try:
            yield
        finally:
            self.at = before


class Queue:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Queue) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")
        self.wait_event(other.record_event())

    def wait_event(self, event: frozenset[str]) -> None:
        self.streams.before[self.name] |= event

    def record_event(self) -> frozenset[str]:
        return frozenset(self.streams.before[self.name])


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(
        exporter, "device_of", lambda _: SimpleNamespace(has_streams=True, module=streams)
    )
    return streams


def watched(streams: Streams, stream: Any, *, fails_at: int = -1) -> Any:
    """Return the stream with a log of where counters are cleared and the export computes."""
    export, begin = stream._export, stream._filler.begin

    def reads() -> Iterator[Any]:
        for index, shard in enumerate(export()):
            streams.log.append(f"{streams.at} computes a shard")
            if index == fails_at:
                raise MemoryError
            yield shard

    def clears(places: Any) -> None:
        streams.log.append(f"{streams.at} clears")
        begin(places)

    stream._export, stream._filler.begin = reads, clears
    return stream


def test_what_an_engine_computes_and_what_reads_it_are_in_one_queue(streams) -> None:
    """Check that the first shard is in the queue, too, after the counters are cleared.

    With its first shard an engine may gather the tensors that it computes later ones from.
    """
    list(watched(streams, stream_of(0, fp8=True)).buckets())
    first, second, *computed, third, fourth = streams.log
    assert (first, second) == ("caller clears", "lane waits for caller")
    assert (third, fourth) == ("caller waits for lane", "caller waits for wire")
    assert set(computed) == {"lane computes a shard", "wire waits for lane"}


def test_a_bucket_is_computed_while_the_one_before_is_gathered(streams, monkeypatch) -> None:
    """Check by what happens before what that no buffer is written before it has been read."""
    monkeypatch.setattr(exporter, "BUCKET_BYTES", 1 << 16)
    stream = stream_of(0, fp8=True)
    filler = stream._filler
    number = {id(bucket): index for index, bucket in enumerate(stream._plan.buckets)}
    fill_one = filler.fill

    def note_fill(bucket: Any, *rest: Any) -> Any:
        streams.do(f"fill {number[id(bucket)]}")
        return fill_one(bucket, *rest)

    def note_gather(bucket: Any, *_: Any) -> None:
        streams.do(f"gather {number[id(bucket)]}")

    monkeypatch.setattr(filler, "fill", note_fill)
    monkeypatch.setattr(filler, "complete", note_gather)
    for index, _ in enumerate(stream.buckets()):
        streams.do(f"install {index}")
    assert len(number) > 3
    for index in range(len(number)):
        assert f"fill {index}" in streams.before[f"gather {index}"]
        assert f"gather {index}" in streams.before[f"install {index}"]
        assert f"gather {index - 1}" not in streams.before[f"fill {index}"]
        assert index < 2 or f"install {index - 2}" in streams.before[f"fill {index}"]
    assert {f"gather {index}" for index in range(len(number))} <= streams.before["caller"]


def test_an_export_that_fails_leaves_nothing_in_a_queue_that_the_next_does_not_wait_for(
    streams,
) -> None:
    with pytest.raises(MemoryError):
        list(watched(streams, stream_of(0, fp8=True), fails_at=12).buckets())
    assert streams.log[-2:] == ["caller waits for lane", "caller waits for wire"]


def test_all_syncs_are_filled_in_the_same_queues(streams, tmp_path) -> None:
    """Check that all syncs use one stream to compute and one to gather.

    PyTorch keeps freed memory for the stream that it was taken on: with one for each sync it would
    keep the memory of all.
    """
    export = exporter_of(tmp_path, "fp8")
    for version in range(3):
        list(export.export(Shards(checkpoint(version), 0, 1)).buckets())
    assert streams.made == 2
