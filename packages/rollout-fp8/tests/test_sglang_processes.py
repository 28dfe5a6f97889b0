"""Sync into schedulers in other processes, as SGLang's are: every byte on both, errors in time."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint
from sglang_scheduler import scheduler
from waiting import NEVER_S

from engine_api.errors import RolloutError
from rollout_fp8.export import exporter
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.install.session import SyncSession
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.sync import Schedulers
from rollout_fp8.transports import channel

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
TP = 2
# New processes, which need not import torch again.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(
    ["torch._dynamo", "rollout_fp8.install.receiver", "rollout_fp8.transports.remote"]
)
channel.secret("channel")  # before the first of them, that they inherit it


class Served:
    """Two schedulers, and the parts of SGLang's engine in front of them."""

    def __init__(self, store: str) -> None:
        self.defect = ""  # of the last scheduler, at the next sync
        self.loop = asyncio.new_event_loop()
        self.host = Host(lambda: self)
        self.host.open()
        self.workers = Schedulers(self.host, TP, CPU)
        self.session = SyncSession(self.workers)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(TP):
            here, there = SPAWN.Pipe()
            process = SPAWN.Process(target=scheduler, args=(there, TP, rank, store), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, weights: dict[str, torch.Tensor], version: int) -> None:
        stream = collect_export(
            iter(weights.items()),
            device=CPU,
            dtype=torch.float32,
            architecture=None,
            scales="fp32",
            audit=True,
        )
        assert self.session.run(stream, version).audited

    def update_weights_from_tensor(self, named: Any, **_: Any) -> tuple[bool, str]:
        for pipe in self.pipes:
            pipe.send((named[0][0], self.defect))
        told = [self.loop.run_in_executor(None, pipe.recv) for pipe in self.pipes]
        return self.loop.run_until_complete(asyncio.gather(*told))[0]

    def parameters(self) -> list[dict[str, bytes]]:
        for pipe in self.pipes:
            pipe.send(None)
        return [pipe.recv() for pipe in self.pipes]

    def shutdown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        self.host.close()
        self.workers.close()


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr(exporter, "BUCKET_BYTES", 1 << 18)  # several buckets a slot
    one = Served(str(tmp_path / "store"))
    yield one
    one.close()


@pytest.mark.slow
def test_other_processes_serve_every_byte_and_outlive_what_goes_wrong(served):
    served.run(checkpoint(1), 1)
    bad = checkpoint(2)
    bad["model.layers.1.mlp.down_proj.weight"] = bad["model.layers.1.mlp.down_proj.weight"][
        :, :-2
    ].clone()
    with pytest.raises(RolloutError, match="2 of 2 receivers failed"):
        served.run(bad, 2)
    served.session.forget()
    served.run(checkpoint(3), 3)
    served.defect = "raise"
    with pytest.raises(RolloutError, match="MemoryError: no room"):
        served.run(checkpoint(5), 4)
    served.defect = ""
    with pytest.raises(RolloutError, match="has not learned the plan"):
        served.run(checkpoint(5), 4)
    served.session.forget()
    served.run(checkpoint(4), 4)
    for rank, got in enumerate(served.parameters()):
        want = ServedModel(tp=TP, rank=rank)
        want.load_weights(checkpoint(4).items())
        for name, parameter in want.named_parameters():
            assert got[name] == bytes(parameter.detach().view(torch.uint8).numpy()), (
                f"{name} on rank {rank}"
            )


@pytest.mark.parametrize(
    ("defect", "said"), [("kill", "closed the channel"), ("stop", "silent|do not return")]
)
def test_a_scheduler_that_dies_or_hangs_in_the_middle_is_an_error_in_time(served, defect, said):
    served.run(checkpoint(1), 1)
    # Only one that hangs is to be given up by the clock.
    limit = 2.0 if defect == "stop" else NEVER_S
    for one in (sender := served.workers._sender)._session._channels:
        one.limit(limit)
    sender.timeout_s = limit
    served.defect = defect
    with pytest.raises(RolloutError, match=said):
        served.run(checkpoint(2), 2)
