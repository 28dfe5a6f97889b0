"""Families with different mechanisms, synced from engine-fsdp and compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_rollouts import NEAR, make_served_model
from vllm_peers import DEVICE

from engine_api.errors import RolloutError
from engine_conformance.ranks import get_pool

# The weights are engine-fsdp's on the CPU, and so is the server.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(DEVICE != "cpu", reason="compares vLLM's CPU build"),
]
FAMILIES = (
    "llama",
    "gemma2",
    "mistral",
    "qwen2",
    "granite",
    "granite_swa",
    "mixtral",
    "falcon_h1",
    # Its weights come turned.
    "gpt2",
    # It copies into sinks and experts, which it holds turned, without a loader.
    "gpt_oss",
    # Each layer has a saved buffer.
    "gemma4_text",
    # vLLM has no class of its own for them. The last one has experts.
    "olmo2",
    "smollm3",
    "starcoder2",
    "mellum",
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_log_probs_are_transformers_after_every_sync(
    tmp_path: Path, model_type: str
) -> None:
    make_served_model(model_type, tmp_path / "model")
    (found,) = get_pool(1, device=DEVICE).run(
        "tiny_rollouts:compare_vllm", deadline=280, folder=str(tmp_path / "model")
    )
    # Experts that are packed and states' weights that are transformed cannot be read back.
    assert found["audited"] == (model_type not in ("falcon_h1", "gpt_oss", "mellum", "mixtral"))
    assert found["log_probs"] < NEAR
    assert found["greedy"] < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("ernie4_5_moe", "log-probs of Ernie4_5_MoeForCausalLM differ from transformers'"),
        ("lfm2", "log-probs of Lfm2ForCausalLM differ from transformers'"),
    ],
)
def test_a_family_that_vllm_does_not_serve_rightly_is_refused_by_name(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    make_served_model(model_type, tmp_path / "model")
    (error,) = get_pool(1, device=DEVICE).run(
        "tiny_rollouts:refusal", deadline=280, folder=str(tmp_path / "model")
    )
    assert isinstance(error, RolloutError)
    assert reason in str(error)


@pytest.mark.slow
def test_transformers_reads_a_folder_as_before_where_vllm_has_a_configuration_of_its_own(
    tmp_path: Path,
) -> None:
    """No model of transformers could be made of vLLM's."""
    from transformers import DeepseekV32Config

    make_served_model("deepseek_v32", tmp_path / "model")
    (found,) = get_pool(1, device=DEVICE).run(
        "vllm_peers:read_configurations", deadline=280, folder=str(tmp_path / "model")
    )
    assert found == [DeepseekV32Config, DeepseekV32Config]
