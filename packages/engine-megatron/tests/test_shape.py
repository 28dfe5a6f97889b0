"""Architectures that Megatron does not have, which are refused by key before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from damaged_folders import whole_folder

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_megatron.shape import read_hf_config, refuse_other_models


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
