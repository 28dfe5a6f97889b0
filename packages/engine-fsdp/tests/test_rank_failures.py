"""A rank that goes away in any of the engine's calls is named by the other ones, which do not hang."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

PEERS = Path(__file__).with_name("rank_peers.py")
DEADLINE_S = 300.0
CALLS = (
    "train_batch",
    "forward_backward",
    "optimizer_step",
    "infer_batch",
    "save_checkpoint",
    "load_checkpoint",
    "get_per_tensor_param",
    "save_hf",
)
TIMEOUTS = """
import torch
import torch.distributed as dist
from engine_api.config import Parallelism
from engine_fsdp.parallel import build_layout, ensure_process_group, limit_groups

ensure_process_group("cpu", 77)
layout = build_layout(Parallelism(dp_replicate=2), "cpu")
limit_groups(layout, "cpu", 77)
groups = [dist.group.WORLD, *layout.mesh.get_all_groups(), layout.shard_group]
print({group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups})
dist.destroy_process_group()
"""
SAID = {"killed": "is gone (killed? out of memory?)", "raises": "MemoryError: this rank's own"}


def launch(world, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.mark.distributed
@pytest.mark.timeout(2 * DEADLINE_S)
def test_every_group_of_the_mesh_has_the_engines_timeout():
    started = launch(2, "-c", TIMEOUTS)
    try:
        for process in started:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert out == "{77.0}\n", errors
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    ("world", "how", "call"),
    [
        *((2, "killed", call) for call in CALLS),
        (2, "raises", "train_batch"),
        (2, "raises", "save_hf"),
        (3, "killed", "train_batch"),
        (2, "killed", "random 1"),
        (3, "killed", "random 2"),
    ],
)
def test_every_other_rank_names_the_one_that_goes_away(tmp_path, world, how, call):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "model")
    started = launch(world, str(PEERS), how, call, str(tmp_path))
    try:
        *left, gone = started
        for process in left:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors
            (told,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            assert list(told) == [str(world - 1)], told
            assert SAID[how] in told[str(world - 1)]
            assert f"process {gone.pid} on" in told[str(world - 1)]
    finally:
        for process in started:
            process.kill()
            process.communicate()
