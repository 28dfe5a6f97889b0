"""Two engines of one process, with one layout or two, and experts that are spread over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from balance_reference import assert_gradients
from tested_ranks import open_pools
from tiny_models import tiny_model

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


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"memory": {"max_tokens": 24, "recompute": "full"}}])
def test_spread_experts_compute_what_transformers_does(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """The reference is engine-fsdp on as many ranks, each with all experts."""
    path = str(tmp_path)
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(path)
    with open_pools() as pools:
        pool = pools[RANKS]
        want, _ = pool.run("experts_ranks:step", path=path, layout={}, backend="fsdp2")
        ranks = pool.run(
            "experts_ranks:step", path=path, layout={"ep": 2}, backend="veomni", **config
        )
    for found in ranks:
        assert {shape[0] for shape in found.kept.values()} == {2}
        assert_gradients(found.gradients, want.gradients)
        assert found.norm == pytest.approx(want.norm, rel=1e-5)
        assert found.loss == pytest.approx(want.loss, rel=1e-5)
