"""Two engines of one process: with one layout they live together, with two they are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_conformance.fixtures import TinyModel, write_checkpoint

PEERS = Path(__file__).with_name("layout_peers.py")
RANKS = 2


@pytest.mark.distributed
@pytest.mark.slow
def test_another_layout_beside_a_living_engine_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(family="qwen3"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", str(PEERS), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("parallelism: ")]
    assert len(refused) == RANKS, done.stdout
    for line in refused:
        assert "dp_shard 2, ulysses 1, got dp_replicate 1, dp_shard 1, ulysses 2" in line
        assert "close the other one first" in line
