"""Processes that receive weights, with the fixtures that close them: for tests on any device."""

from __future__ import annotations

import multiprocessing
import tempfile
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint
from sync_parts import expected
from transport_peers import serve
from waiting import DEADLINE_S, NEVER_S

from rollout_fp8.transports import channel

# New processes, which need not import torch again.
SPAWN = multiprocessing.get_context("forkserver")
# A trace needs the first module.
SPAWN.set_forkserver_preload(
    ["torch._dynamo", "rollout_fp8.install.receiver", "rollout_fp8.transports.remote"]
)
channel.secret("channel")  # before the first of them, that they inherit it


class Receivers:
    """Processes that serve, one for each rank."""

    def __init__(
        self,
        tp: int = 1,
        *,
        fp8: bool = False,
        defects: tuple[str | None, ...] = (),
        timeout_s: float = NEVER_S,
        device: str = "cpu",
    ) -> None:
        self.results: Any = SPAWN.Queue()
        self.addresses = [SPAWN.Queue() for _ in range(tp)]
        defects = defects or (None,) * tp
        self.processes = [
            SPAWN.Process(
                target=serve,
                args=(self.addresses[r], self.results, r, tp, fp8, device, defects[r], timeout_s),
            )
            for r in range(tp)
        ]
        for process in self.processes:
            process.start()
        for _ in self.processes:
            assert self.results.get(timeout=DEADLINE_S) == "up"

    def tell(self, address: str) -> None:
        for queue in self.addresses:
            queue.put(address)

    def rows(self) -> list[Any]:
        return sorted(
            (self.results.get(timeout=DEADLINE_S) for _ in self.processes), key=lambda row: row[1]
        )

    def close(self) -> None:
        for queue, process in zip(self.addresses, self.processes, strict=True):
            queue.put(None)
            process.join(2)  # they may end well; those that are stopped or wait are killed
            process.kill()
            process.join()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Return the folder that all processes inherit for files of those that are killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("sockets")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def started():
    """Return a list whose members are closed after the test."""
    things: list[Any] = []

    def add(thing):
        things.append(thing)
        return thing

    yield add
    for thing in things:
        thing.close()


def check_bytes(row: Any, seed: int, tp: int, fp8: bool) -> None:
    """Check that a receiver serves what the server's own loader makes of the checkpoint."""
    assert row[0] == "ok", row
    model = ServedModel(tp=tp, rank=row[1], fp8=fp8, dtype=torch.bfloat16)
    want = expected(checkpoint(seed), model, fp8=fp8)
    assert row[2].keys() == want.keys()
    for name, raw in row[2].items():
        assert (raw == want[name].contiguous().view(torch.uint8).numpy()).all(), name
