"""Positions as vLLM computes them, compared with transformers' at the start of a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import SERVED_SIZES, tiny_model
from tiny_rollouts import NEAR
from vllm_peers import DEVICE

from engine_api.errors import RolloutError
from engine_conformance.ranks import get_pool

# The weights are engine-fsdp's on the CPU, and so is the server.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(DEVICE != "cpu", reason="compares vLLM's CPU build"),
]
# Of Ministral 3, with documents that are longer than the original length.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SCALED = YARN | {"llama_4_scaling_beta": 0.5}


def write(folder: Path, model_type: str, **changes: Any) -> str:
    tiny_model(model_type, sizes=SERVED_SIZES, **changes).save_pretrained(folder)
    return str(folder)


def run(name: str, folder: str, **arguments: Any) -> Any:
    return call(name, folder=folder, **arguments)


def call(name: str, **arguments: Any) -> Any:
    (found,) = get_pool(1, device=DEVICE).run(f"position_peers:{name}", deadline=280, **arguments)
    return found


@pytest.mark.slow
def test_a_server_that_passes_over_keys_of_yarn_is_refused_by_name(tmp_path: Path) -> None:
    error = run("refuse", write(tmp_path / "model", "llama", rope_parameters=YARN), former=True)
    assert isinstance(error, RolloutError)
    assert "vLLM computes positions differently than transformers" in str(error)
    assert "(FormerYarn) is not model.rotary_emb.inv_freq" in str(error)
    assert "the cosine of frequency 0 at position 0 is 1.2773, and in transformers 1.0000" in str(
        error
    )
    assert "another version of vLLM" in error.remedy


@pytest.mark.slow
def test_yarn_of_former_versions_gets_the_factor_that_it_lacks(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "ministral3", rope_parameters=SCALED)
    found = run("compare_former", folder)
    assert found["audited"]
    assert found["log_probs"] < NEAR


@pytest.mark.slow
def test_ministral_3_is_served_beyond_its_original_length(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "ministral3", rope_parameters=SCALED)
    (found,) = get_pool(1, device=DEVICE).run(
        "tiny_rollouts:compare_vllm", deadline=280, folder=folder
    )
    assert found["audited"]
    assert found["log_probs"] < NEAR
    assert found["served_as"] == "MistralForCausalLM"


@pytest.mark.slow
def test_a_server_that_does_not_scale_attention_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "ministral3", rope_parameters=SCALED)
    error = run("refuse", folder)
    assert isinstance(error, RolloutError)
    assert "scales its attention at position" in str(error)
    assert "by 1.0000, and transformers by 2.3863" in str(error)


@pytest.mark.slow
def test_a_scale_that_vllm_turns_off_for_short_models_is_refused_by_name(tmp_path: Path) -> None:
    # vLLM decides about it in Llama 4 by the model's length, whatever config.json says.
    folder = write(
        tmp_path / "model",
        "llama4_text",
        no_rope_layers=[1, 0, 1, 0],
        attn_temperature_tuning=True,
        floor_scale=8,
    )
    error = run("refuse", folder)
    assert isinstance(error, RolloutError)
    assert "model.layers.1.self_attn scales its attention at position" in str(error)
    assert "model.layers.0" not in str(error)
    assert error.remedy == "rollout.options.max_model_len above 32768, or of at most 7"


@pytest.mark.slow
def test_long_factors_for_short_sequences_are_refused_with_the_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    folder = write(
        tmp_path / "model",
        "phi3",
        rope_parameters=rope,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
    )
    # Without it, vLLM serves the original length.
    error = run("refuse", folder, max_model_len=256)
    assert isinstance(error, RolloutError)
    assert "(Phi3LongRoPEScaledRotaryEmbedding) is not" in str(error)
    assert error.remedy == "rollout.options.max_model_len of at most 128"


@pytest.mark.slow
def test_workers_of_their_own_tell_their_positions(tmp_path: Path) -> None:
    (tables,) = run("compare_workers", write(tmp_path / "model", "llama"))
    assert tables > 0


@pytest.mark.slow
def test_a_table_that_is_too_short_is_refused_with_its_length(tmp_path: Path) -> None:
    # vLLM's own length is 256 then.
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = write(tmp_path / "model", "llama", rope_parameters=rope, max_position_embeddings=128)
    error = run("refuse", folder)
    assert isinstance(error, RolloutError)
    assert "has a table of 128 positions for 256" in str(error)
    assert error.remedy == "rollout.options.max_model_len of at most 128"


@pytest.mark.parametrize("kind", [AttributeError, TypeError, IndexError])
def test_a_version_whose_attributes_cannot_be_read_is_refused(kind: type[Exception]) -> None:
    error = call("require_of_another_version", error=kind("cos_sin_cache"))
    assert isinstance(error, RolloutError)
    assert "cannot be compared" in str(error)
    assert f"got {kind.__name__}: cos_sin_cache" in str(error)
    assert "a tested version of vLLM" in error.remedy


def test_only_a_whole_language_model_gets_keys_for_its_scale(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "ministral3", rope_parameters=SCALED)
    keys = run("keys_of", folder, nested=False)
    assert keys["llama_4_scaling"] == {"original_max_position_embeddings": 8, "beta": 0.5}
    assert run("keys_of", folder, nested=True) == {}
