"""Pools of ranks on the device that tests of engines run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tested_device import DEVICE, NEAR

from engine_conformance.ranks import RankPool

__all__ = ["DEVICE", "NEAR", "Pools", "open_pools"]


class Pools(dict[int, RankPool]):
    """Pools by their number of ranks, each of which starts when it is first asked for.

    A test that asks for more ranks than there are GPUs is skipped.
    """

    def __missing__(self, ranks: int) -> RankPool:
        if DEVICE == "cuda" and ranks > torch.cuda.device_count():
            pytest.skip(f"needs {ranks} GPUs")
        # Compiling a step took 281 s on a busy machine.
        self[ranks] = RankPool(ranks, device=DEVICE, deadline=800.0)
        return self[ranks]


@contextmanager
def open_pools() -> Iterator[Pools]:
    """Yield pools, which are closed behind the block."""
    pools = Pools()
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()
