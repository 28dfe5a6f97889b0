"""The balance loss and the replay of engine-fsdp's code over VeOmni's routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from balance_ranks import COEFFICIENT, RATE, create, step
from balance_reference import assert_step, expect, pack
from tiny_models import tiny_model
from torch import Tensor

from engine_api import sft_loss
from engine_api.batch import ROUTED_EXPERTS
from engine_api.errors import ConfigError, UnsupportedCapability

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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_replayed_as_by_engine_fsdp(tmp_path: Path, name: str) -> None:
    """Log-probs and the step, of experts that the routers would not select."""
    tiny_model(name, num_hidden_layers=3, **MODELS[name]).save_pretrained(tmp_path)
    plain = pack()
    generator = torch.Generator().manual_seed(5)
    # Two of four experts in three layers.
    drawn = torch.rand(plain.num_tokens, 3, 4, generator=generator).argsort(-1)[..., :2]
    replayed = plain.with_fields(**{ROUTED_EXPERTS: drawn.to(torch.int8)})
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for backend in ("veomni", "fsdp2"):
        engine = create(str(tmp_path), backend, options={}, router_replay=True)
        engine.initialize()
        log_probs = engine.infer_batch(replayed).log_probs
        assert (engine.infer_batch(plain).log_probs - log_probs).abs().max() > 0.01
        engine.train_batch(replayed, sft_loss)
        weights = {n: one.to("cpu", copy=True) for n, one in engine.get_per_tensor_param()}
        found.append((log_probs, weights))
        engine.close()
    (got, weights), (want, exact) = found
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    for key, one in exact.items():
        torch.testing.assert_close(weights[key], one, atol=1e-4 * RATE, rtol=0, msg=key)


def test_a_router_that_leaves_the_selection_to_its_layer_is_refused(tmp_path: Path) -> None:
    """VeOmni's DeepSeek-V3 is of a transformers whose routers returned logits alone."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="experts cannot be balanced") as caught:
        create(str(tmp_path), "veomni").initialize()
    assert caught.value.field == "options.balance_loss"
    with pytest.raises(UnsupportedCapability, match="not known") as refused:
        create(str(tmp_path), "veomni", options={}, router_replay=True).initialize()
    assert refused.value.capability == "router_replay"
