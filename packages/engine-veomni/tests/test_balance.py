"""The balance loss of engine-fsdp's code over VeOmni's routers."""

from __future__ import annotations

from pathlib import Path

import pytest
from balance_ranks import COEFFICIENT, step
from balance_reference import assert_step, expect
from tiny_models import tiny_model

pytest.importorskip("veomni")


@pytest.mark.slow
def test_a_router_of_veomni_has_the_gradient_of_the_loss_by_document(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_experts=8, norm_topk_prob=True, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    expected = expect(str(tmp_path), COEFFICIENT)
    memory = {"max_tokens": 24, "recompute": "full"}
    assert_step(step(str(tmp_path), "veomni", memory=memory), expected)
