"""Engines of one process with different layouts live together, and compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.errors import ConfigError
from engine_conformance.fixtures import TinyModel, write_checkpoint

PEERS = Path(__file__).with_name("layout_peers.py")
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}],
    4: [{}, {"tp": 2, "cp": 2}, {"tp": 2, "dp_replicate": 2}, {"cp": 2, "dp_replicate": 2}],
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(LAYOUTS))
def test_layouts_beside_each_other_compute_the_same(tmp_path: Path, ranks: int) -> None:
    model = TinyModel(family="qwen3", num_heads=8, num_kv_heads=4)
    folder = write_checkpoint(tmp_path / "model", model)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    layouts = [json.dumps(sizes) for sizes in LAYOUTS[ranks]]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", str(PEERS), str(folder), *layouts],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 3}, {"dp_replicate": 2}])
def test_sizes_that_do_not_make_the_world_are_refused(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(family="qwen3"))
    config = EngineConfig(model=ModelSource(path=str(folder)), parallelism=Parallelism(**sizes))
    engine = EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    with pytest.raises(ConfigError, match="does not make a world of 1") as caught:
        engine.initialize()
    assert caught.value.field == "parallelism"
