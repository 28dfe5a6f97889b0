"""Routing weights of experts that are spread over ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import documents, tiny_model

from engine_conformance.ranks import RankPool

# Ranks import their functions from here.
sys.path.append(str(Path(__file__).parent))


@pytest.mark.distributed
@pytest.mark.slow
def test_routing_weights_stay_float32_on_their_way_to_spread_experts(tmp_path: Path) -> None:
    """FSDP would cast them to the dtype of the computation, with ep alone."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    with RankPool(2, device="cpu", deadline=120.0) as pool:
        found = pool.run(
            "routing_ranks:collect_dtypes", path=str(tmp_path), ids=documents()[0].tolist()
        )
    assert found == [{torch.float32}] * 2
