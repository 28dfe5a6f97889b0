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
    out = tmp_path / "refusals"
    out.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", str(PEERS), str(folder), str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(RANKS):
        refusal = (out / f"rank-{rank}").read_text()
        assert refusal.startswith("parallelism: ")
        assert "dp_shard 2, ulysses 1, ep 1, got dp_replicate 1, dp_shard 1, ulysses 2" in refusal
        assert "close the other one first" in refusal
