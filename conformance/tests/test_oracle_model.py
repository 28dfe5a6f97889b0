"""Tests of the oracle against transformers in float64, and of its refusals."""

from __future__ import annotations

import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engine_conformance.cases import mechanisms, models
from engine_conformance.cases._case import LM
from engine_conformance.fixtures import (
    LENGTHS,
    TinyModel,
    packed_documents,
    write_adapter,
    write_checkpoint,
)
from engine_conformance.oracle import (
    UnsupportedModel,
    WeightMismatch,
    expected_shapes,
    load_oracle,
    merge_adapter,
    read_config,
    read_safetensors,
)
from float64 import Float64Everywhere

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2"]
WINDOWED = {"use_sliding_window": True, "sliding_window": 4}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 10,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "attention_factor": 1.3,
}
# The models of the cases, by table and name.
REQUESTS = {
    f"{table}: {name}": request
    for table, requests in {
        "rope": models.ROPES,
        "windows": models.WINDOWS,
        "caps": models.CAPS,
        "shapes": models.SHAPES,
        "dropout": models.DROPOUTS[LM],
        "files": models.FILES,
    }.items()
    for name, request in requests.items()
}
# Both sides are float64; what is left is the order of sums.
TIGHT = {"rtol": 0.0, "atol": 1e-9}


def reference(folder: Path, ids: Tensor, *, value_model: bool = False) -> Tensor:
    auto = AutoModelForTokenClassification if value_model else AutoModelForCausalLM
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with Float64Everywhere(), torch.no_grad():
        model = auto.from_pretrained(folder, dtype=torch.float64, **plain).eval()
        return model(input_ids=ids[None]).logits[0]


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 256, (11,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(checkpoint: Any, ids: Tensor, family: str, tied: bool) -> None:
    folder = checkpoint(family=family, tied=tied)
    torch.testing.assert_close(load_oracle(folder).logits(ids), reference(folder, ids), **TIGHT)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"family": "qwen3_moe", "norm_topk_prob": False},
        {"family": "llama", "num_kv_heads": 4},
        {"family": "qwen3", "num_kv_heads": 1, "head_dim": 32, "rope_theta": 1e6},
        {"family": "qwen2", "old_config_keys": True, "rope_theta": 5e4},
        {"family": "qwen3", "shards": 3, "num_layers": 3},
        {"family": "llama", "rope": YARN},
        {"family": "llama", "rope": LONGROPE},
        {"family": "qwen3_moe", "keys": WINDOWED},
        {"family": "gemma2", "keys": {"sliding_window": 4, "query_pre_attn_scalar": 24}},
        {
            "family": "gemma2",
            "keys": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
        },
        {"family": "gemma2", "keys": {"final_logit_softcapping": None, "attention_bias": True}},
    ],
    ids=[
        "moe-not-normed",
        "no-gqa",
        "mqa-wide",
        "old-keys",
        "sharded",
        "yarn-by-hand",
        "longrope-by-hand",
        "window-moe",
        "gemma-window",
        "gemma-tight-caps",
        "gemma-no-cap",
    ],
)
def test_variants_equal_transformers(checkpoint: Any, ids: Tensor, kwargs: dict[str, Any]) -> None:
    folder = checkpoint(**kwargs)
    torch.testing.assert_close(load_oracle(folder).logits(ids), reference(folder, ids), **TIGHT)


@pytest.mark.parametrize("length", [11, 24])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_models_of_the_cases_equal_transformers(
    checkpoint: Any, request_: models.ModelRequest, length: int
) -> None:
    assert 11 < models.CONTEXT < 24, "one document is within the context, and one beyond it"
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))
    folder = checkpoint(**request_.model)
    torch.testing.assert_close(load_oracle(folder).logits(ids), reference(folder, ids), **TIGHT)


@pytest.mark.parametrize(
    "arguments",
    [*mechanisms.MODELS.values(), *mechanisms.OTHERS.values()],
    ids=lambda one: one["family"],
)
def test_models_of_mechanisms_equal_transformers(
    checkpoint: Any, ids: Tensor, arguments: dict[str, Any]
) -> None:
    folder = checkpoint(**arguments)
    torch.testing.assert_close(load_oracle(folder).logits(ids), reference(folder, ids), **TIGHT)


@pytest.mark.parametrize("normed", [True, False])
def test_replayed_experts_have_the_weights_of_their_router(
    checkpoint: Any, ids: Tensor, normed: bool
) -> None:
    """Routers of transformers are replaced by the formula of their paper with other experts."""
    folder = checkpoint(family="qwen3_moe", tied=False, norm_topk_prob=normed)
    bounds = [0, len(ids)]
    batch = packed_documents(0, bounds[1:]).with_experts(3, layers=2, experts=4, top_k=2, some=True)
    experts = torch.as_tensor(batch.routed_experts).long()
    with Float64Everywhere(), torch.no_grad():
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)
        for index, layer in enumerate(model.model.layers):

            def replayed(_: Any, __: Any, output: Any, index: int = index) -> Any:
                logits, _, own = output
                chosen = torch.where(experts[:, index] < 0, own, experts[:, index])
                weights = logits.softmax(-1).gather(-1, chosen)
                if normed:
                    weights = weights / weights.sum(-1, keepdim=True)
                return logits, weights, chosen

            layer.mlp.gate.register_forward_hook(replayed)
        want = model.eval()(input_ids=ids[None]).logits[0].log_softmax(-1)
    got = load_oracle(folder).token_outputs(ids, bounds, routed_experts=experts).log_probs
    torch.testing.assert_close(got[1:], want[:-1].gather(-1, ids[1:, None])[:, 0], **TIGHT)
    live = load_oracle(folder).token_outputs(ids, bounds).log_probs
    assert (live - got).abs().max() > 0.1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_transformers(checkpoint: Any, ids: Tensor, family: str, bias: bool) -> None:
    folder = checkpoint(family=family, value_model=True, value_bias=bias)
    oracle = load_oracle(folder)
    assert ("score.bias" in oracle.params) is bias
    want = reference(folder, ids, value_model=True)[:-1, 0]
    got = oracle.values(ids, [0, len(ids)])
    torch.testing.assert_close(got[1:], want, **TIGHT)
    assert got[0] == 0


def test_token_outputs_are_aligned_and_isolated(checkpoint: Any) -> None:
    folder = checkpoint(family="qwen3")
    oracle = load_oracle(folder)
    batch = packed_documents(0, LENGTHS["uneven"])
    got = oracle.token_outputs(batch.input_ids, batch.cu_seqlens, temperature=0.7)
    for start, stop in pairwise(batch.cu_seqlens):
        assert got.log_probs[start] == got.entropy[start] == 0
        document = torch.as_tensor(batch.input_ids[start:stop])
        if len(document) == 1:
            continue
        dist = torch.distributions.Categorical(logits=reference(folder, document)[:-1] / 0.7)
        torch.testing.assert_close(
            got.log_probs[start + 1 : stop], dist.log_prob(document[1:]), **TIGHT
        )
        torch.testing.assert_close(got.entropy[start + 1 : stop], dist.entropy(), **TIGHT)


def test_every_parameter_matters(checkpoint: Any) -> None:
    """Require scaled weights under which no parameter's gradient is negligible.

    A negligible gradient would hide defects.
    """
    for family in FAMILIES:
        oracle = load_oracle(checkpoint(family=family), requires_grad=True)
        batch = packed_documents(0, LENGTHS["uneven"])
        oracle.token_outputs(batch.input_ids, batch.cu_seqlens).log_probs.sum().backward()
        sizes = {
            name: p.grad.norm().item() for name, p in oracle.params.items() if p.grad is not None
        }
        assert sizes.keys() == oracle.params.keys()
        negligible = {name for name, size in sizes.items() if size < 1e-3 * max(sizes.values())}
        # A key bias adds the same to every score of a query, but for RoPE: small is its nature.
        assert negligible <= {name for name in sizes if name.endswith("k_proj.bias")}


def test_adapter_equals_merged_weights(checkpoint: Any, tmp_path: Path, ids: Tensor) -> None:
    folder = checkpoint(family="qwen3")
    adapter = write_adapter(tmp_path / "adapter", folder, rank=4, alpha=12.0)
    raw = read_safetensors(folder)
    stem = "model.layers.1.self_attn.q_proj"
    oracle = load_oracle(folder, adapter=adapter, requires_grad=True)
    a = oracle.trainable[f"base_model.model.{stem}.lora_A.weight"]
    b = oracle.trainable[f"base_model.model.{stem}.lora_B.weight"]
    merged = merge_adapter(load_oracle(folder).params, adapter)[f"{stem}.weight"]
    torch.testing.assert_close(merged, raw[f"{stem}.weight"].double() + 3.0 * b @ a)
    assert not torch.allclose(oracle.logits(ids), load_oracle(folder).logits(ids), atol=0.1)
    oracle.logits(ids).sum().backward()
    assert all(p.grad is not None for p in oracle.trainable.values())
    assert not any(p.requires_grad for p in oracle.params.values())


def test_names_are_exact_and_tied_head_absent(checkpoint: Any) -> None:
    folder = checkpoint(family="qwen3", tied=True)
    assert load_oracle(folder).params.keys() == expected_shapes(read_config(folder)).keys()
    assert "lm_head.weight" not in load_oracle(folder).params


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "whole heads"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu_fast"}, "gelu_fast"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "SequenceClassification"),
    ],
)
def test_refuses_what_it_does_not_compute(
    checkpoint: Any, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    raw = json.loads((checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(UnsupportedModel, match=word):
        read_config(tmp_path)


def test_refuses_wrong_weights(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint() / "config.json").read_text())
    tensors = read_safetensors(checkpoint())
    odd = dict(tensors)
    odd["model.norm.wait"] = odd.pop("model.norm.weight")
    save_file(odd, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"missing \['model.norm.weight'\], unexpected"):
        load_oracle(tmp_path)
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"model.norm.weight is \(3,\), expected \(64,\)"):
        load_oracle(tmp_path)


def test_refuses_bad_bounds_and_wrong_heads(checkpoint: Any, ids: Tensor) -> None:
    oracle = load_oracle(checkpoint())
    with pytest.raises(ValueError, match="must rise strictly from 0 to 11"):
        oracle.token_outputs(ids, [0, 5, 5, 11])
    with pytest.raises(ValueError, match="ForTokenClassification"):
        oracle.values(ids, [0, 11])
    with pytest.raises(ValueError, match=r"use values\(\)"):
        load_oracle(checkpoint(value_model=True)).logits(ids)


def test_routing_margin_is_the_closest_choice_so_far(checkpoint: Any, ids: Tensor) -> None:
    folder = checkpoint(family="qwen3_moe")
    got = load_oracle(folder).routing_margin(ids, [0, len(ids)])
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with Float64Everywhere(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)
        logits = torch.stack(model(input_ids=ids[None], output_router_logits=True).router_logits)
    ordered = logits.sort(dim=-1, descending=True).values
    gaps = (ordered[..., 1] - ordered[..., 2]).amin(dim=0).cummin(dim=0).values
    assert got[0] == float("inf")
    torch.testing.assert_close(got[1:], gaps[:-1], **TIGHT)
    assert load_oracle(checkpoint()).routing_margin(ids, [0, len(ids)]).isinf().all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "gemma2"])
def test_logits_over_the_keys_and_values_of_other_weights_are_those_of_transformers(
    family: str, tmp_path: Path, ids: Tensor
) -> None:
    folders = [
        write_checkpoint(tmp_path / str(seed), TinyModel(family=family, tied=False, seed=seed))
        for seed in (0, 11)
    ]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with Float64Everywhere(), torch.no_grad():
        old, new = (
            AutoModelForCausalLM.from_pretrained(one, dtype=torch.float64, **plain).eval()
            for one in folders
        )
        # transformers 5.24 renamed the cache, and warns of the earlier name.
        known = inspect.signature(new.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        cache = old(input_ids=ids[None, :7], use_cache=True)[name]
        want = new(input_ids=ids[None, 7:], **{name: cache}).logits[0]
    before, after = map(load_oracle, folders)

    torch.testing.assert_close(after.logits_over(before, ids, 7), want, **TIGHT)
    torch.testing.assert_close(after.logits_over(after, ids, 7), after.logits(ids)[7:], **TIGHT)
    apart = after.logits_over(before, ids, 7) - after.logits(ids)[7:]
    assert apart.abs().max() > 1e-2
