"""The models of benchmarks/mechanisms.py, and its comparison of gradients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.mechanisms import (
    BASELINE,
    MODELS,
    compare,
    compute_oracle,
    count_active,
    gradients_apart,
    make_config,
)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_a_model_has_as_many_active_parameters_as_the_first(name: str) -> None:
    """Each free size is chosen for that number."""
    want = count_active(make_config(BASELINE, tiny=True))
    found = count_active(make_config(name, tiny=True, active=want))
    # Sizes are multiples of 16.
    assert abs(found - want) < 0.1 * want


def test_experts_count_as_far_as_a_token_has_them() -> None:
    """Experts that a token does not have are no active parameters."""
    config = make_config("qwen3-moe", tiny=True)
    more = make_config("qwen3-moe", tiny=True)
    more.num_experts = 2 * config.num_experts
    rows = (more.num_experts - config.num_experts) * config.hidden_size * config.num_hidden_layers
    # Twice as many experts are twice as many rows of the routers, and no more.
    assert count_active(more) - count_active(config) == rows


def test_engine_fsdp_in_bf16_is_as_near_to_the_oracle_as_transformers_in_bf16(
    tmp_path: Path,
) -> None:
    """Rounding is the only difference, and it is of the same size."""
    folder = tmp_path / "gemma2"
    compute_oracle("gemma2", folder, device="cpu", tiny=True)
    options = argparse.Namespace(device="cpu", tiny=True, compile=False, recompute="none")
    row = compare("gemma2", folder, options)
    json.dumps(row)
    for key in ("log_probs", "mean", "gradient"):
        assert 0 < row[key] < 2 * row[f"plain_{key}"]


@pytest.mark.nightly
# torch's compiler warns of what it does with code of transformers.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_every_mechanism_is_compiled_right(name: str, tmp_path: Path) -> None:
    """A device that compiles by default compiles all of them."""
    folder = tmp_path / name
    compute_oracle(name, folder, device="cpu", tiny=True)
    options = argparse.Namespace(device="cpu", tiny=True, compile=True, recompute="none")
    row = compare(name, folder, options)
    # An indexer selects other tokens where scores in bf16 nearly tie.
    times = 4 if MODELS[name].model_type == "deepseek_v32" else 2
    for key in ("mean", "gradient"):
        assert 0 < row[key] < times * row[f"plain_{key}"]


def test_a_gradient_that_is_missing_or_no_number_is_the_worst() -> None:
    """Neither passes a comparison."""
    want = {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradients_apart({"a": torch.ones(2)}, want)[1:] == (1.0, "b")
    nan = {"a": torch.full((2,), torch.nan), "b": torch.ones(2)}
    assert gradients_apart(nan, want)[2] == "a"


def test_every_mechanism_has_a_model() -> None:
    """The families are those with kernels of their own on CUDA."""
    assert {one.model_type for one in MODELS.values()} >= {
        "gemma2",
        "gpt_oss",
        "deepseek_v3",
        "gemma4_text",
        "qwen3_next",
        "qwen3_5_text",
        "nemotron_h",
        "deepseek_v32",
    }
