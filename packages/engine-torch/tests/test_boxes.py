"""Boxes of DTensors on a mesh of 2 x 2, compared with the whole tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_api.weights import assemble
from engine_torch.boxes import find_box, find_replica, find_row_group

PEERS = Path(__file__).with_name("boxes_peers.py")
RANKS = 4


def test_a_plain_tensor_is_one_box() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    box = find_box(whole)
    assert torch.equal(whole[box.slices], whole)
    assert find_replica(whole) == 0
    assert find_row_group(whole) is None
    assert find_box(torch.tensor(1.0)).shape == ()


@pytest.mark.distributed
@pytest.mark.slow
def test_boxes_of_any_placements_make_up_the_whole_exactly_once(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", str(PEERS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}", weights_only=False) for rank in range(RANKS)]
    for placement, first in ranks[0].items():
        for name, whole in first["whole"].items():
            parts = [rank[placement]["boxes"][name] for rank in ranks]
            assert torch.equal(assemble(parts), whole), (placement, name)
