"""Functions that test_workers.py calls in ranks, with a stand-in for vLLM's call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exporter_ranks import Shards, exporter
from served_model import checkpoint

from engine_api.errors import RankFailure
from rollout_fp8.export.exporter import EngineStream
from rollout_fp8.vllm.sync import InProcess


def fails_on_one(folder: str) -> tuple[list[str], int]:
    """Return the report of each step in which rank 1's worker fails, and the count of a good sync.

    It fails before it took a weight, or after a bucket.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    home = Path(folder, str(rank))
    home.mkdir(parents=True)
    export = exporter(home, "none", bucket_bytes=200_000)
    said: list[str] = []
    for where in ("learn", "sync", "bucket"):
        workers = InProcess(
            lambda *call, where=where, **given: _call(rank, where, *call, **given),
            {},
            parallel=world,
        )
        stream = export.export(Shards(checkpoint(0), rank, world))
        try:
            workers.learn(stream.plan)
            workers.sync(stream)
        except MemoryError as error:
            said.append(f"own: {error}")
        except RankFailure as error:
            said.append(f"other: {error.failures}")
        finally:
            for _ in stream:
                pass
    workers = InProcess(lambda *call, **given: _call(rank, "", *call, **given), {}, parallel=world)
    ((taken, _), *_) = workers.sync(export.export(Shards(checkpoint(0), rank, world)))
    return said, len(taken)


def _call(rank: int, where: str, method: str, args: tuple[Any, ...]) -> list[Any]:
    if rank == 1 and method == f"rollout_fp8_{where}":
        raise MemoryError(where)
    if method == "rollout_fp8_learn":
        return [()]
    (stream,) = args
    assert isinstance(stream, EngineStream)
    return [(list(_taken(stream, fails=rank == 1 and where == "bucket")), {})]


def _taken(stream: EngineStream, *, fails: bool) -> Iterator[int]:
    for bucket, buffer in stream.buckets():
        if fails:
            raise MemoryError("bucket")
        yield int(torch.count_nonzero(buffer)) and len(bucket.slices)
