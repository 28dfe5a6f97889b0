"""Architectures that Megatron does not have, which are refused by key before a weight is read."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damaged_folders import whole_folder
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from tiny_models import tiny_config

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_megatron.mechanisms import MECHANISMS, refuse
from engine_megatron.shape import read_hf_config, refuse_other_models, shape_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(whole_folder(tmp_path_factory.mktemp("whole"), "qwen3_moe"))


# transformers warns about damaged values.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("head_dim", [None], r"expected an integer as head_dim, got \[None\]"),
        ("hidden_size", [8, 8], r"expected an integer as hidden_size, got \[8, 8\]"),
        ("moe_intermediate_size", None, "expected an integer as moe_intermediate_size, got None"),
        ("rope_parameters", {"rope_theta": None}, "finite number as rope_theta .*, got None"),
        ("rms_norm_eps", None, "expected a finite number as rms_norm_eps, got None"),
        ("initializer_range", float("inf"), "finite number as initializer_range, got inf"),
    ],
)
def test_a_number_that_megatron_has_no_use_for_is_named(
    whole: Path, key: str, value: Any, expected: str
) -> None:
    config = read_hf_config(ModelSource(path=str(whole)), str(whole))
    # transformers refuses some of these itself, and which ones differs between its releases.
    values = {**config.to_dict(), "name_or_path": str(whole), key: value}
    with pytest.raises(ConfigError, match=expected):
        refuse_other_models(SimpleNamespace(**values))


def test_more_experts_than_any_model_has_are_refused_before_their_names_are_listed(
    tmp_path: Path, whole: Path
) -> None:
    content = json.loads((whole / "config.json").read_text())
    # transformers writes the number of experts under either name.
    experts = next(key for key in ("num_local_experts", "num_experts") if key in content)
    content |= {experts: 2**14, "num_hidden_layers": 17}
    content.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="expected at most 262,144 experts in all layers"):
        read_hf_config(ModelSource(path=str(tmp_path)), str(tmp_path))


@pytest.mark.parametrize(
    ("written", "alpha", "clamp"),
    [({}, 1.702, 7.0), ({"swiglu_alpha": 1.5, "swiglu_limit": 3.0}, 1.5, 3.0)],
)
def test_the_gate_of_gpt_oss_does_not_depend_on_whether_transformers_has_keys_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, float],
    alpha: float,
    clamp: float,
) -> None:
    """Transformers has them since 5.19."""
    folder = Path(whole_folder(tmp_path / "model", "gpt_oss"))
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for key in ("swiglu_alpha", "swiglu_limit"):
        content.pop(key, None)
    file.write_text(json.dumps(content | written))
    config = read_hf_config(ModelSource(path=str(folder)), str(folder))
    for key in {"swiglu_alpha", "swiglu_limit"} - set(written):
        vars(config).pop(key, None)
        monkeypatch.delattr(type(config), key, raising=False)
    refuse_other_models(config)
    mixture = shape_of(config, "language_model").mixture
    assert mixture is not None
    assert (mixture.alpha, mixture.clamp) == (alpha, clamp)


# transformers warns about damaged values.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
def test_a_gate_of_gpt_oss_that_is_null_is_refused(tmp_path: Path, key: str) -> None:
    folder = Path(whole_folder(tmp_path / "model", "gpt_oss"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}))
    # transformers refuses null itself since 5.19.
    with pytest.raises(ConfigError, match=key):
        refuse_other_models(read_hf_config(ModelSource(path=str(folder)), str(folder)))


@pytest.mark.parametrize(
    "kind", ["indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"]
)
def test_indexed_attention_is_refused_under_its_names_of_all_releases(kind: str) -> None:
    config = SimpleNamespace(model_type="any", layer_types=["full_attention", kind])
    with pytest.raises(UnsupportedCapability) as caught:
        refuse(config, MECHANISMS)
    assert caught.value.capability == "sparse_attention"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_gated_delta_rule_is_refused_with_what_megatron_lacks(
    tmp_path: Path, family: str
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedCapability) as caught:
        refuse_other_models(read_hf_config(ModelSource(path=str(tmp_path)), str(tmp_path)))
    assert caught.value.capability == "linear_attention"
    version = importlib.metadata.version("megatron-core")
    for part in (f"megatron-core {version}", "packed documents", "flash-linear-attention"):
        assert part in caught.value.why


@pytest.mark.parametrize("kind", ["mamba", "conv"])
def test_other_layers_with_a_state_are_refused_without_a_word_on_that_rule(kind: str) -> None:
    with pytest.raises(UnsupportedCapability, match="no such layers") as caught:
        refuse(SimpleNamespace(model_type="any", layer_types=[kind]), MECHANISMS)
    assert caught.value.capability == "linear_attention"


def test_megatron_still_lacks_what_the_refusal_says() -> None:
    """A release that has it is to be served instead."""
    layer: Any = SimpleNamespace(sp_size=1)
    with pytest.raises(NotImplementedError, match="does not support packed sequence"):
        gated_delta_net.GatedDeltaNet.forward(
            layer, torch.zeros(4, 1, 8), None, packed_seq_params=PackedSeqParams(qkv_format="thd")
        )
    assert not hasattr(gated_delta_net, "GatedDeltaNetContextParallel")
    if not gated_delta_net.HAVE_FLA:
        with pytest.raises(ImportError, match="FLA is not installed"):
            gated_delta_net.GatedDeltaNet(layer, gated_delta_net.GatedDeltaNetSubmodules())
    settings = SimpleNamespace(transformer_impl="local")
    with pytest.raises(AssertionError, match="only supports transformer engine"):
        get_transformer_block_with_experimental_attention_variant_spec(settings)
