"""DeepSeek-V3 and gpt-oss beside transformers in float64, whole and in every layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import Expected, compare, expected, write
from folder_checks import create_on, edit_config
from safetensors.torch import load_file
from tested_ranks import Pools, open_pools
from tiny_models import documents, skip_unknown_gate, tiny_model
from transformers import AutoConfig

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_conformance.ranks import RankPool
from engine_torchtitan.families import _make_experts_of_gpt_oss
from engine_torchtitan.model import _refuse_context, _refuse_indivisible

# Ranks import their functions from here.
sys.path.append(str(Path(__file__).parent))

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Values are narrower than keys, and scores have a factor of their own.
    "deepseek_v3": (
        "deepseek_v3",
        GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "rms_norm_eps": 1e-2, "n_shared_experts": 2, "v_head_dim": 20}
        | {"norm_topk_prob": False},
    ),
    "dense latent attention": (
        "deepseek_v3",
        {"first_k_dense_replace": 4, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    # Windows of 12 tokens are shorter than all documents.
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss clamped": ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 1.4}),
    "gpt_oss without biases": (
        "gpt_oss",
        {"attention_bias": False, "rope_parameters": YARN}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
}
WHOLE_SEQUENCE = {"sequence_parallel": False}
LAYOUTS: dict[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "deepseek_v3": [
        ({}, {}),
        ({"tp": 2}, {}),
        ({"tp": 2}, WHOLE_SEQUENCE),
        ({"cp": 2}, {}),
        ({"ep": 2}, {}),
        ({"tp": 2, "ep": 2}, {}),
        ({"pp": 2}, {}),
    ],
    "moonlight": [({"tp": 2}, {}), ({"cp": 2}, {})],
    "dense latent attention": [({"tp": 2}, {})],
    "gpt_oss": [
        ({}, {}),
        ({"tp": 2}, {}),
        ({"tp": 2}, WHOLE_SEQUENCE),
        ({"ep": 2}, {}),
        ({"tp": 2, "ep": 2}, {}),
        ({"pp": 2}, {}),
    ],
    "gpt_oss clamped": [({"tp": 2}, {}), ({"ep": 2}, {})],
    "gpt_oss without biases": [({"tp": 2}, {})],
}


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    return [one.tolist() for one in documents()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Return the function that writes and computes a model once."""

    @cache
    def compute_once(name: str) -> Expected:
        family, keys = MODELS[name]
        skip_unknown_gate(keys)
        return expected(tmp_path_factory.mktemp("model") / "model", family, keys)

    return compute_once


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


def _compute(
    ranks: RankPool,
    want: Expected,
    ids: list[list[int]],
    parallelism: dict[str, int],
    options: dict[str, Any],
    **memory: Any,
) -> None:
    results = ranks.run(
        "family_checks:compute",
        backend="torchtitan",
        path=want.path,
        parallelism=parallelism,
        options=options,
        documents=ids,
        **memory,
    )
    compare(results, want, str(parallelism))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_computed_as_in_transformers(
    written: Callable[[str], Expected], ids: list[list[int]], pools: Pools, name: str
) -> None:
    """Log-probs of every token, gradients of every weight, and the export with its biases."""
    _compute(pools[1], written(name), ids, {}, {}, recompute="full")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallelism", "options"),
    [
        pytest.param(
            name,
            *layout,
            marks=() if name in ("deepseek_v3", "gpt_oss") else pytest.mark.nightly,
            id=f"{name}-{layout[0] or 'data'}{'' if not layout[1] else '-whole'}",
        )
        for name, layouts in LAYOUTS.items()
        for layout in layouts
    ],
)
def test_a_family_is_computed_as_in_transformers_on_two_ranks(
    written: Callable[[str], Expected],
    ids: list[list[int]],
    pools: Pools,
    name: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
) -> None:
    _compute(pools[2], written(name), ids, parallelism, options)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_bias_of_a_router_stays_float32_and_does_not_move(tmp_path: Path, master: str) -> None:
    path = write(tmp_path / "model", "deepseek_v3", GROUPS)
    engine = EngineRegistry.create(
        backend="torchtitan",
        device="cpu",
        config=EngineConfig(
            model=ModelSource(path=path),
            precision=Precision(master=master, compute="bfloat16", reduce=master),
            optimizer=OptimizerConfig(lr=0.1),
        ),
    )
    engine.initialize()
    ids = documents()[0].tolist()
    batch = Batch.pack([{"input_ids": ids, "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}])
    engine.train_batch(batch, sft_loss)
    engine.save_hf(tmp_path / "saved")
    engine.close()
    given, saved = (load_file(Path(one, "model.safetensors")) for one in (path, tmp_path / "saved"))
    biases = [name for name in given if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(torch.equal(given[name], saved[name]) for name in biases)
    assert all(saved[name].dtype == torch.float32 for name in biases)
    assert not torch.equal(given["lm_head.weight"], saved["lm_head.weight"].float())


@pytest.mark.distributed
@pytest.mark.slow
def test_every_stage_exports_biases_as_they_are(tmp_path: Path, pools: Pools) -> None:
    """Masters in bfloat16, and biases in float32 that other stages hold."""
    path = write(tmp_path / "model", "deepseek_v3", GROUPS)
    given = load_file(Path(path, "model.safetensors"))
    biases = [name for name in given if name.endswith("e_score_correction_bias")]
    for whole in pools[2].run("pipeline_ranks:export_in_bfloat16", path=path, sizes={"pp": 2}):
        assert all(torch.equal(whole[name], given[name]) for name in biases)
        assert {one.dtype for name, one in whole.items() if name not in biases} == {torch.bfloat16}


def test_biases_of_a_model_without_weights_are_those_that_are_exported(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "deepseek_v3", GROUPS)
    config = EngineConfig(model=ModelSource(path=path, init="random"), optimizer=None)
    engine: Any = EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    engine.initialize()
    live = [one for name, one in engine.module.named_buffers() if name.endswith("expert_bias_E")]
    exported = [
        one.clone()
        for name, one in engine.get_per_tensor_param()
        if name.endswith("e_score_correction_bias")
    ]
    engine.close()
    assert len(live) == len(exported) == 3
    assert all(torch.equal(*pair) for pair in zip(live, exported, strict=True))


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim"),
        ("deepseek_v3", {"invented_by_a_vendor": 3}, "invented_by_a_vendor"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_a_field_without_a_mapping_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedCapability, match=named) as caught:
        create_on("torchtitan", tmp_path).initialize()
    assert "fsdp2" in caught.value.remedy


def test_a_field_that_transformers_needs_is_to_be_set(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    edit_config(tmp_path, n_group=None)
    with pytest.raises(UnsupportedCapability, match=r"n_group: null in config\.json") as caught:
        create_on("torchtitan", tmp_path).initialize()
    assert caught.value.remedy == "set n_group in config.json or in model.config_overrides"


def test_fields_of_published_models_that_change_nothing_are_taken(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    idle = {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "moe_layer_freq": 1}
    edit_config(tmp_path, **idle, scoring_func="sigmoid", topk_method="noaux_tc")
    engine = create_on("torchtitan", tmp_path)
    engine.initialize()
    engine.close()


def test_the_gate_of_gpt_oss_does_not_depend_on_whether_transformers_has_keys_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers has them since 5.19."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for key in ("swiglu_alpha", "swiglu_limit"):
        vars(config).pop(key, None)
        monkeypatch.delattr(type(config), key, raising=False)
    experts = _make_experts_of_gpt_oss(config).routed_experts.inner_experts
    assert (experts.swiglu_alpha, experts.swiglu_limit) == (1.702, 7.0)


def test_sinks_and_windows_are_refused_in_parts_of_a_pack(tmp_path: Path) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="neither sinks nor windows") as caught:
        _refuse_context(AutoConfig.from_pretrained(tmp_path), 2)
    assert caught.value.field == "parallelism.cp"


@pytest.mark.parametrize(
    ("family", "keys", "tp", "ep", "named"),
    [
        ("deepseek_v3", {"n_routed_experts": 5}, 1, 2, "n_routed_experts 5"),
        ("deepseek_v3", {"moe_intermediate_size": 15}, 2, 1, "moe_intermediate_size 15"),
        ("gpt_oss", {"num_local_experts": 5}, 1, 2, "num_local_experts 5"),
        ("gpt_oss", {"intermediate_size": 15}, 2, 1, "intermediate_size 15"),
    ],
)
def test_sizes_that_a_layout_does_not_divide_are_refused_by_name(
    tmp_path: Path, family: str, keys: dict[str, int], tp: int, ep: int, named: str
) -> None:
    tiny_model(family, **keys).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        _refuse_indivisible(AutoConfig.from_pretrained(tmp_path), tp, ep)
    assert named in caught.value.what


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_training_goes_on_in_fsdp2(
    written: Callable[[str], Expected], ids: list[list[int]], tmp_path: Path, name: str
) -> None:
    """Weights, their moments and biases of routers are the same under the same names."""
    rows = [{"input_ids": one, "loss_weight": [0.0] + [1.0] * (len(one) - 1)} for one in ids]
    batch = Batch.pack(rows)
    found: list[dict[str, torch.Tensor]] = []
    for backend in ("torchtitan", "fsdp2"):
        engine = EngineRegistry.create(
            backend=backend,
            device="cpu",
            config=EngineConfig(
                model=ModelSource(path=written(name).path),
                optimizer=OptimizerConfig(lr=1e-3, eps=1e-4),
            ),
        )
        engine.initialize()
        if backend == "torchtitan":
            engine.train_batch(batch, sft_loss)
            engine.save_checkpoint(tmp_path / "one").result()
        else:
            engine.load_checkpoint(tmp_path / "one")
        engine.train_batch(batch, sft_loss)
        found.append({key: tensor.clone() for key, tensor in engine.get_per_tensor_param()})
        engine.close()
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        assert float((tensor - found[1][key]).abs().max()) < 2e-5, key
