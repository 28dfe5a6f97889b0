"""Tests of the reader of a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_api.errors import ConfigError
from engine_api.hf_config import read_hf_config
from engine_api.hf_overrides import override

transformers = pytest.importorskip("transformers")

# transformers would need gigabytes for the names of so many labels.
MANY = 40_000_000


def write(folder: Path, **content: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | content))
    return str(folder)


@pytest.fixture
def _reads_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers build no configuration."""

    def read(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError("transformers was asked to build it")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)


@pytest.mark.usefixtures("_reads_no_further")
@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"num_labels": MANY}, "num_labels"),
        ({"num_labels": 10**30}, "num_labels"),
        ({"num_hidden_layers": MANY}, "num_hidden_layers"),
        ({"model_type": "gpt2", "n_layer": MANY}, "n_layer"),
        ({"text_config": {"num_hidden_layers": MANY}}, "text_config.num_hidden_layers"),
        ({"num_nextn_predict_layers": MANY}, "num_nextn_predict_layers"),
        ({"first_k_dense_replace": MANY}, "first_k_dense_replace"),
        ({"attention_types": [[["global"], MANY]]}, "attention_types"),
    ],
    ids=str,
)
def test_a_count_that_transformers_would_list_is_refused_before_it_reads_on(
    tmp_path: Path, content: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"expected at most 131,072 as {key}, got ") as caught:
        read_hf_config(write(tmp_path, **content), remedy="none")
    assert caught.value.field == "model.path"
    assert caught.value.remedy


@pytest.mark.parametrize("count", [-1, 2**14 + 1])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3_moe", "num_experts"),
        ("mixtral", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("ernie4_5_moe", "moe_num_experts"),
    ],
)
def test_no_family_has_an_impossible_number_of_experts(
    tmp_path: Path, family: str, key: str, count: int
) -> None:
    folder = write(tmp_path, model_type=family, **{key: count})
    # transformers has another name beside the file's key in most families.
    with pytest.raises(ConfigError, match=f"integer from 0 to 16384 as .*experts, got {count}"):
        read_hf_config(folder, remedy="none")


def test_counts_of_a_model_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, num_labels=5, num_hidden_layers=3, max_position_embeddings=MANY)
    config = read_hf_config(folder, remedy="none")
    assert (config.num_labels, config.num_hidden_layers) == (5, 3)


def test_an_override_of_such_a_count_is_refused_before_it_is_set() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=2)
    # 4,000 labels more than the bound are built at once where nothing looks at it.
    with pytest.raises(ConfigError, match="expected at most 131,072 as num_labels, got 135,072"):
        override(config, {"num_labels": 2**17 + 4000})
    assert config.num_labels == 2


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "passes over"])
def test_a_part_of_each_head_is_rotated_also_where_transformers_passes_over_rotary_dim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    family = transformers.MiniMaxM2Config
    if not reads:
        # As before transformers 5.18.
        monkeypatch.setattr(
            family,
            "convert_rope_params_to_dict",
            transformers.PreTrainedConfig.convert_rope_params_to_dict,
        )
    # The keys of MiniMaxAI/MiniMax-M2.
    published = {"head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000}
    path = write(tmp_path, model_type="minimax_m2", **published)
    config = read_hf_config(path, remedy="none")
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.rope_parameters["rope_theta"] == 5000000
    # A folder that the engine saves is read in the same way by all.
    config.save_pretrained(tmp_path / "saved")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert again.rope_parameters == config.rope_parameters


def test_a_rotation_of_whole_heads_stays(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"head_dim": 64, "rotary_dim": 64}
    for family in ("minimax", "minimax_m2"):
        config = read_hf_config(write(tmp_path, model_type=family, **sizes), remedy="none")
        assert config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0


def test_a_rotation_that_transformers_passes_over_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="minimax", head_dim=128, rotary_dim=64)
    with pytest.raises(ConfigError, match="rotation of 64 of each head's 128 dimensions") as caught:
        read_hf_config(path, remedy="none")
    assert caught.value.field == "model.path"
    assert caught.value.remedy


def test_a_part_that_a_class_declares_and_does_not_compute_is_refused(tmp_path: Path) -> None:
    # The class has 64 as default. No module of the family reads it.
    family: dict[str, Any] = {"model_type": "minimax_m3_vl_text", "head_dim": 128}
    with pytest.raises(ConfigError, match="rotation of 64 of each head's 128 dimensions") as caught:
        read_hf_config(write(tmp_path, **family), remedy="none")
    assert "set rotary_dim in config.json to 128" in caught.value.remedy
    config = read_hf_config(write(tmp_path, **family, rotary_dim=128), remedy="none")
    assert "partial_rotary_factor" not in config.rope_parameters
    config = read_hf_config(write(tmp_path, **family, partial_rotary_factor=0.5), remedy="none")
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_a_part_that_a_family_computes_by_rotary_dim_is_read(
    tmp_path: Path, model_type: str
) -> None:
    config = read_hf_config(write(tmp_path, model_type=model_type, rotary_dim=8), remedy="none")
    assert config.rotary_dim == 8


def test_a_part_wider_than_the_heads_is_left_to_transformers(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="minimax", head_dim=16, rotary_dim=64)
    config = read_hf_config(path, remedy="none")
    assert "partial_rotary_factor" not in config.rope_parameters


def test_code_of_the_folder_may_read_rotary_dim_itself(tmp_path: Path) -> None:
    lines = (
        "from transformers import PreTrainedConfig",
        "class Config(PreTrainedConfig):",
        "    model_type = 'own'",
        "    def __init__(self, **keys):",
        "        self.head_dim = 16",
        "        self.rotary_dim = 8",
        "        self.rope_parameters = {'rope_type': 'default', 'rope_theta': 1e4}",
        "        super().__init__(**keys)",
    )
    (tmp_path / "own.py").write_text("\n".join(lines))
    path = write(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Config"})
    config = read_hf_config(path, remedy="none", trust_remote_code=True)
    assert config.rotary_dim == 8
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


LAYERED: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": None,
    },
}


def test_a_type_of_layers_without_rope_rotates_no_part(tmp_path: Path) -> None:
    path = write(tmp_path, **LAYERED, head_dim=16, rotary_dim=8)
    with pytest.raises(ConfigError, match="rotation of 8 of each head's 16 dimensions"):
        read_hf_config(path, remedy="none")
    content: dict[str, Any] = LAYERED | {"head_dim": 16, "rotary_dim": 8}
    parts: dict[str, Any] = content["rope_parameters"]
    in_part: dict[str, Any] = parts["full_attention"] | {"partial_rotary_factor": 0.5}
    content["rope_parameters"] = parts | {"full_attention": in_part}
    config = read_hf_config(write(tmp_path, **content), remedy="none")
    assert config.rope_parameters["full_attention"]["partial_rotary_factor"] == 0.5


def test_a_part_of_heads_of_unknown_size_is_left_to_transformers(tmp_path: Path) -> None:
    # The class has neither head_dim nor num_attention_heads.
    rope = {"rope_type": "default", "rope_theta": 1e4}
    path = write(tmp_path, model_type="mamba", rotary_dim=8, rope_parameters=rope)
    assert read_hf_config(path, remedy="none").rope_parameters == rope
