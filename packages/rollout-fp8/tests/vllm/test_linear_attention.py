"""Qwen3-Next's linear attention in vLLM: compared with transformers in bf16, and its refusals.

That of composite Qwen3.5 is compared in ``test_images.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_rollouts import make_served_model
from vllm_peers import DEVICE, require_error
from zoo import NEAR_MEAN, TIMES

from engine_api.errors import ConfigError, EngineError, RolloutError
from engine_conformance.ranks import get_pool

pytestmark = pytest.mark.distributed
ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="differs on a CPU alone")
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no kernels to choose from")


def call(name: str, **arguments: Any) -> Any:
    (found,) = get_pool(1, device=DEVICE).run(
        f"linear_attention_peers:{name}", deadline=280, **arguments
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next") / "model"
    make_served_model("qwen3_next", folder, DEVICE)
    return folder


@pytest.mark.slow
def test_qwen3_next_is_as_near_to_float64_as_transformers_in_bf16_after_every_sync(
    folder: Path,
) -> None:
    found = call("compare", folder=str(folder))
    assert found["served_as"] == "Qwen3NextForCausalLM"
    assert found["mean"] < TIMES["none"] * found["plain"] + NEAR_MEAN["none"]
    # vLLM's CPU build keeps experts packed.
    assert found["audited"] == (DEVICE != "cpu")


@pytest.mark.slow
@ON_A_CPU
def test_on_a_cpu_other_dtypes_than_bfloat16_are_refused_at_the_start(folder: Path) -> None:
    error = call("refused", folder=str(folder), dtype="float32")
    require_error(error, ConfigError, "rollout.options.dtype", "expected bfloat16 for a qwen3_next")


def test_on_a_gpu_float32_is_refused_at_the_start() -> None:
    error = call("check_on_hopper", asked="triton", chosen="triton", holds=None, dtype="float32")
    require_error(
        error, ConfigError, "rollout.options.dtype", "expected bfloat16 or float16 for a qwen3"
    )


@ON_A_CPU
def test_on_a_cpu_a_choice_of_kernels_is_refused(folder: Path) -> None:
    error = call("refused", folder=str(folder), gdn_prefill_backend="triton")
    require_error(error, ConfigError, "rollout.options.gdn_prefill_backend", "leave it out")


@ON_A_CPU
def test_vllms_own_rule_is_asked_for_the_kernel() -> None:
    """Without CUDA it chooses Triton's, whatever is asked for."""
    assert call("own_choice", asked="flashinfer") == "triton"


@pytest.mark.parametrize("kind", [AttributeError, TypeError, ValueError])
def test_a_rule_of_another_version_is_not_asked(kind: type[Exception]) -> None:
    assert call("choice_of_another_version", error=kind("another version")) is None


@ON_A_GPU
def test_vllms_own_choice_generates_or_is_refused_at_the_start(folder: Path) -> None:
    error = call("generate", folder=str(folder), gdn_prefill_backend="auto")
    if error is not None:
        require_error(error, RolloutError, "vLLM did not start", "gdn_prefill_backend: triton")


@pytest.mark.parametrize(
    ("asked", "chosen", "holds", "kind", "words"),
    [
        ("auto", "flashinfer", {"chunk_gated_delta_rule_sm90": None}, RolloutError, "unavailable"),
        ("flashinfer", "flashinfer", None, RolloutError, "its import fails"),
        ("cutedsl", "triton", {}, ConfigError, "vLLM would compute with triton"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_refused_with_the_option_that_chooses_another(
    asked: str, chosen: str, holds: dict[str, Any] | None, kind: type[EngineError], words: str
) -> None:
    error = call("check_on_hopper", asked=asked, chosen=chosen, holds=holds)
    require_error(error, kind, words, "triton", "rollout.options.gdn_prefill_backend")


@pytest.mark.parametrize(
    ("asked", "chosen", "holds"),
    [
        ("auto", "flashinfer", {"chunk_gated_delta_rule_sm90": len}),
        # Its kernels in another form are not named.
        ("auto", "flashinfer", {}),
        ("triton", "triton", None),
        # Another version of vLLM chooses in another way.
        ("auto", None, None),
    ],
)
def test_a_kernel_that_can_be_used_is_not_refused(
    asked: str, chosen: str | None, holds: dict[str, Any] | None
) -> None:
    assert call("check_on_hopper", asked=asked, chosen=chosen, holds=holds) is None


def test_a_model_that_vllm_was_seen_to_compute_wrongly_is_refused() -> None:
    name = "Glm4MoeLiteForCausalLM"
    error = call("refuse_wrong_model", device="cpu", architecture=name)
    require_error(error, RolloutError, f"log-probs of {name} differ", "rollout.name=local")
    assert call("refuse_wrong_model", device="cuda", architecture=name) is None


@pytest.mark.parametrize(
    ("device", "has_states", "expected"),
    [
        ("cuda", True, {None: True, True: True, False: False}),
        ("cuda", False, {None: False, True: True, False: False}),
        ("cpu", True, {None: True, True: True}),
        ("cpu", False, {None: True, True: True, False: False}),
    ],
)
def test_a_model_with_states_has_cuda_graphs_only_if_they_are_asked_for(
    device: str, has_states: bool, expected: dict[bool | None, bool]
) -> None:
    for asked, eager in expected.items():
        assert call("choose_eager", device=device, has_states=has_states, asked=asked) is eager


def test_a_model_with_states_is_not_compiled_on_a_cpu() -> None:
    error = call("choose_eager", device="cpu", has_states=True, asked=False)
    require_error(error, ConfigError, "rollout.options.enforce_eager", "on a CPU, got false")


def test_vllm_is_given_the_kernel_that_is_chosen() -> None:
    assert call("arguments_of", asked="auto") == {}
    assert call("arguments_of", asked="cutedsl") == {"gdn_prefill_backend": "cutedsl"}
