"""A rank that goes away in any of the engine's calls is named by other ranks, which do not hang."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from engine_api.stores import serve_store

PEERS = Path(__file__).with_name("rank_peers.py")
DEADLINE_S = 300.0
OTHER_CALLS = (
    "train_batch",
    "optimizer_step",
    "forward_backward",
    "infer_batch",
    "load_checkpoint",
    "get_per_tensor_param",
    "save_hf",
)
TIMEOUTS = """
import torch
import torch.distributed as dist
from datetime import timedelta
from engine_api.config import Parallelism
from engine_api.process_groups import ensure_process_group
from engine_fsdp.parallel import build_layout, limit_groups

ensure_process_group("cpu", timedelta(seconds=77))
layout = build_layout(Parallelism(dp_replicate=2), "cpu")
limit_groups(layout, "cpu", 77)
groups = [dist.group.WORLD, *layout.mesh.get_all_groups(), layout.shard_group]
options = [group._get_backend(torch.device("cpu")).options for group in groups]
print({option._timeout.total_seconds() for option in options})
dist.destroy_process_group()
"""
SAID = {"killed": "is gone (killed? out of memory?)", "raises": "MemoryError: this rank's own"}


@contextlib.contextmanager
def ranks(world, *arguments):
    """Start ``world`` processes over a store of this process, as torchrun does.

    All of them are killed at the end of the block.
    """
    store = serve_store("127.0.0.1", world, DEADLINE_S)
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(2 * DEADLINE_S)
def test_every_group_of_the_mesh_has_the_engines_timeout():
    with ranks(2, "-c", TIMEOUTS) as started:
        for process in started:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert out == "{77.0}\n", errors


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    ("world", "how", "call"),
    [
        (2, "killed", "save_checkpoint"),
        *(pytest.param(2, "killed", call, marks=pytest.mark.nightly) for call in OTHER_CALLS),
        (2, "raises", "train_batch"),
        pytest.param(2, "raises", "save_hf", marks=pytest.mark.nightly),
        (3, "killed", "train_batch"),
        pytest.param(2, "killed", "random 1", marks=pytest.mark.nightly),
        pytest.param(3, "killed", "random 2", marks=pytest.mark.nightly),
    ],
)
def test_every_other_rank_names_the_one_that_goes_away(tmp_path, world, how, call):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "model")
    with ranks(world, str(PEERS), how, call, str(tmp_path)) as started:
        *left, gone = started
        for process in left:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors
            (told,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            assert list(told) == [str(world - 1)], told
            assert SAID[how] in told[str(world - 1)]
            assert f"process {gone.pid} on" in told[str(world - 1)]
