"""The sync into schedulers that are other processes, as SGLang's are: tensors cross by their handles, errors by the channel."""

from __future__ import annotations

import asyncio
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint
from sglang_scheduler import scheduler

from engine_api.errors import RolloutError
from rollout_fp8 import exporter
from rollout_fp8.exporter import collect
from rollout_fp8.session import SyncSession
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.sync import Schedulers

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


@pytest.fixture
def pipes():
    spawn, tp = multiprocessing.get_context("spawn"), 2
    started: list[tuple[Any, Any]] = []
    for rank in range(tp):
        here, there = spawn.Pipe()
        process = spawn.Process(target=scheduler, args=(there, tp, rank), daemon=True)
        process.start()
        started.append((process, here))
    yield [pipe for _, pipe in started]
    for process, pipe in started:
        process.join(10)
        if process.exitcode is None:
            process.kill()
            process.join()
        pipe.close()


def test_other_processes_serve_every_byte_and_outlive_a_bad_export(pipes, monkeypatch):
    monkeypatch.setattr(exporter, "BUCKET_BYTES", 1 << 18)

    def update(named: Any, **_: Any) -> tuple[bool, str]:
        for pipe in pipes:
            pipe.send(named[0][0])
        answers = [pipe.recv() for pipe in pipes]
        return answers[0]

    host = Host(
        lambda: SimpleNamespace(loop=asyncio.new_event_loop(), update_weights_from_tensor=update, shutdown=lambda: None)
    )
    session = SyncSession(Schedulers(host, len(pipes)))

    def run(weights: dict[str, torch.Tensor], version: int) -> None:
        stream = collect(
            iter(weights.items()), device=CPU, dtype=torch.float32, architecture=None, scales="fp32", audit=True
        )
        assert session.run(stream, version).audited

    run(checkpoint(1), 1)
    bad = checkpoint(2)
    bad["model.layers.1.mlp.down_proj.weight"] = bad["model.layers.1.mlp.down_proj.weight"][:, :-2].clone()
    with pytest.raises(RolloutError):
        run(bad, 2)
    session.forget()
    run(checkpoint(3), 3)
    run(checkpoint(4), 4)
    host.close()
    for rank, pipe in enumerate(pipes):
        pipe.send(None)
        want = ServedModel(tp=2, rank=rank)
        want.load_weights(checkpoint(4).items())
        got = pipe.recv()
        for name, parameter in want.named_parameters():
            assert got[name] == bytes(parameter.detach().view(torch.uint8).numpy()), f"{name} on rank {rank}"
