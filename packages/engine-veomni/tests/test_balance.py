"""The balance loss of engine-fsdp's code over VeOmni's routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from balance_ranks import COEFFICIENT, create, step
from balance_reference import assert_step, expect
from tiny_models import tiny_model

from engine_api.errors import ConfigError

pytest.importorskip("veomni")


MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_router_of_veomni_has_the_gradient_of_the_loss_by_document(
    tmp_path: Path, name: str
) -> None:
    tiny_model(name, num_hidden_layers=3, **MODELS[name]).save_pretrained(tmp_path)
    expected = expect(str(tmp_path), COEFFICIENT)
    memory = {"max_tokens": 24, "recompute": "full"}
    assert_step(step(str(tmp_path), "veomni", memory=memory), expected)


def test_a_router_that_leaves_the_selection_to_its_layer_is_refused(tmp_path: Path) -> None:
    """VeOmni's DeepSeek-V3 is of a transformers whose routers returned logits alone."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="experts cannot be balanced") as caught:
        create(str(tmp_path), "veomni").initialize()
    assert caught.value.field == "options.balance_loss"
