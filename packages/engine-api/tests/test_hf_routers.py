"""Selections of experts in transformers models: recorded, replayed, and checked."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MiniMaxM2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine_api import Batch
from engine_api.balance import Balance
from engine_api.errors import BatchError, UnsupportedCapability
from engine_api.hf_routers import Routers, Routing, smallest_dtype

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# A softmax before the selection, one behind it, sigmoids with a bias and groups, and a router that
# is given its bias.
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=8, moe_intermediate_size=16, head_dim=16, mlp_only_layers=[1]
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=8, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "minimax_m2": MiniMaxM2Config(**SIZES, num_local_experts=8, head_dim=16),
}
ROUTED = {"qwen3_moe": {0, 2}, "deepseek_v3": {1, 2}}
IDS = torch.arange(1, 12)[None]


def build(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            # Some routers begin with equal scores.
            if name.endswith(("gate.weight", "router.weight")):
                torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replayed_selection_is_computed_and_a_recorded_one_changes_nothing(name):
    model = build(CONFIGS[name])
    plain = model(input_ids=IDS, use_cache=False).logits
    routers = Routers(model, where="engine")
    routing = routers.routing
    assert (routing.layers, routing.top_k, routing.experts) == (3, 2, 8)
    assert routing.routed == ROUTED.get(name, {0, 1, 2})
    with routers.record() as found:
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, plain)
    experts = torch.full((IDS.shape[1], 3, 2), -1, dtype=torch.int8)
    routers.replay(experts)
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, plain)
    for layer, indices in found.items():
        experts[:, layer] = indices
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, plain)
    # Another token's experts, at one token only: no token before it changes.
    experts[5] = (experts[5] + 1) % 8
    logits = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits[:, :5], plain[:, :5])
    assert (logits[:, 5] - plain[:, 5]).abs().max() > 1e-3
    with routers.record() as again:
        model(input_ids=IDS, use_cache=False)
    assert all(torch.equal(again[i][5], experts[5, i].long()) for i in routing.routed)


def test_a_router_has_the_gradient_of_the_experts_that_are_replayed():
    """The oracle is the family's own formula: a softmax over all, of which two are normalized."""
    model = build(CONFIGS["qwen3_moe"]).double()
    gate = model.model.layers[0].mlp.gate
    hidden = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1], [2, 3], [7, 4], [5, 6]])
    experts = chosen[:, None].expand(4, 3, 2)
    factors = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    routers = Routers(model, where="engine")
    routers.replay(experts)
    _, weights, indices = gate(hidden)
    assert torch.equal(indices, chosen)
    (weights.double() * factors).sum().backward()
    weight = gate.weight.detach().clone().requires_grad_()
    exact = (hidden @ weight.T).softmax(-1).gather(-1, chosen)
    if gate.norm_topk_prob:
        exact = exact / exact.sum(-1, keepdim=True)
    (exact * factors).sum().backward()
    assert weight.grad.abs().max() > 0.1
    # The family's softmax is in float32.
    torch.testing.assert_close(gate.weight.grad, weight.grad, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_scores_that_are_balanced_are_those_that_weigh_the_experts(name):
    """A family scales the scores of a token's experts, by one factor for all of them."""
    model = build(CONFIGS[name])
    seen = []

    class Seen(Balance):
        def add(self, layer, logits, served, outputs, *, sigmoid):
            seen.append((layer, logits, served, sigmoid))
            return super().add(layer, logits, served, outputs, sigmoid=sigmoid)

    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name:
            buffer.normal_()
    routers = Routers(model, where="engine", balanced=True)
    returned = {}
    for index, layer in enumerate(model.model.layers):
        if router := getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)):
            router.register_forward_hook(
                lambda _, __, out, index=index: returned.update({index: out})
            )
    length = IDS.shape[1]
    documents = torch.zeros(length, dtype=torch.int64)
    routers.balance(Seen(coefficient=1.0, documents=documents, count=1, total=length))
    model(input_ids=IDS, use_cache=False)
    assert {layer for layer, *_ in seen} == routers.routing.routed == returned.keys()
    for layer, logits, served, sigmoid in seen:
        _, weights, chosen = returned[layer]
        assert torch.equal(served, torch.zeros_like(served).scatter(1, chosen, True))
        scores = logits.sigmoid() if sigmoid else logits.exp()
        ratios = weights / scores.gather(1, chosen)
        torch.testing.assert_close(ratios[:, 0], ratios[:, 1])


def test_a_document_whose_experts_serve_equally_many_tokens_has_the_loss_1():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    served = torch.eye(4, dtype=torch.bool)[[0, 1, 2, 3, 1, 1]]
    documents = torch.tensor([0, 0, 0, 0, 1, 2])
    balance = Balance(coefficient=1.0, documents=documents, count=2, total=5)
    assert torch.equal(balance.add(0, logits, served, [logits], sigmoid=False)[0], logits)
    # The other document's token has one expert alone, and the last token is padding.
    alone = 4 * float(logits[4].softmax(-1)[1])
    assert float(balance.sum_losses()) == pytest.approx((4 * 1 + alone) / 5)


def build_dense():
    return AutoModelForCausalLM.from_config(
        Qwen3Config(**{key: size for key, size in SIZES.items() if "experts" not in key})
    )


def build_with_selectors():
    """Return a model of experts whose routers have a name that transformers gives to no router."""
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])
    for layer in ROUTED["qwen3_moe"]:
        gate = model.model.layers[layer].mlp.gate
        gate.__class__ = type("Selector", (type(gate),), {})
    return model


@pytest.mark.parametrize("make", [build_dense, build_with_selectors])
def test_a_model_whose_selection_is_not_known_is_refused(make):
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedCapability, match="no router") as caught:
        Routers(model, where="an engine")
    assert caught.value.capability == "router_replay"


ROUTING = Routing(layers=2, top_k=2, experts=4, routed=frozenset({1}))


def batch(experts):
    return Batch.pack([{"input_ids": [1, 2], "routed_experts": experts}])


def table(row):
    """Return the experts of two tokens; the first layer has none, and is not read."""
    return torch.tensor([[[9, 9], [0, 1]], [[9, 9], row]], dtype=torch.int16)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([3, 2], None),
        ([-1, -1], None),
        ([3, 3], "one expert twice"),
        ([0, 4], "none of the model's 4"),
        ([-2, -2], "none of the model's 4"),
        ([0, -1], "some of a layer's experts"),
    ],
)
def test_experts_are_checked_in_layers_that_have_some(row, problem):
    given = batch(table(row))
    if problem is None:
        ROUTING.check(given)
        return
    with pytest.raises(BatchError, match=problem) as caught:
        ROUTING.check(given)
    assert caught.value.index == 1


def test_experts_of_another_model_are_refused_with_both_shapes():
    with pytest.raises(BatchError, match=r"\(2, 1, 2\), not \[2, 2, 2\]"):
        ROUTING.check(batch(table([0, 1])[:, 1:]))


def test_the_smallest_dtype_holds_every_number():
    assert [smallest_dtype(n) for n in (2, 128, 129, 512)] == [
        torch.int8,
        torch.int8,
        torch.int16,
        torch.int16,
    ]
