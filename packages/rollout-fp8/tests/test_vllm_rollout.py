"""Parts of the vLLM rollout that need no vLLM: its options and the environment variables."""

from __future__ import annotations

import os

import pytest

from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from rollout_fp8.kernels.float32 import exact_float32
from rollout_fp8.options import VllmOptions
from rollout_fp8.vllm import environment, in_flight, speculation


def test_options() -> None:
    options = VllmOptions.parse(
        {
            "max_model_len": 512,
            "gpu_memory_utilization": 1,
            "scales": "pow2",
            "audit": False,
            "kv_cache_bytes": None,
            "executor": "workers",
        }
    )
    assert (options.max_model_len, options.scales, options.audit, options.executor) == (
        512,
        "pow2",
        False,
        "workers",
    )
    assert options.kv_cache_bytes is None


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("gpu_memory_utilisation", 0.5, "gpu_memory_utilization"),
        ("gpu_memory_utilization", 1.5, "at most 1"),
        ("gpu_memory_utilization", True, "number"),
        ("max_model_len", 0, "integer"),
        ("max_model_len", True, "integer"),
        ("tensor_parallel_size", None, "integer"),
        ("scales", "pow_2", "pow2"),
        ("executor", "inprocess", "in_process"),
        ("prefix_caching", 1, "true or false"),
        ("enforce_eager", "yes", "true or false"),
        ("gdn_prefill_backend", "trition", "triton"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VllmOptions.parse({name: value})
    assert caught.value.field == f"rollout.options.{name}"
    assert remedy in caught.value.remedy


NGRAM = {"speculative": "ngram", "truncation": False, "deterministic": False}


@pytest.mark.parametrize(
    ("given", "refused", "words"),
    [
        ({"num_speculative_tokens": 2}, "options.num_speculative_tokens", "speculative=ngram"),
        ({"prompt_lookup_max": 2}, "options.prompt_lookup_max", "speculative=ngram"),
        ({"prompt_lookup_min": 2}, "options.prompt_lookup_min", "speculative=ngram"),
        (NGRAM | {"truncation": True}, "options.truncation", "top_p"),
        (NGRAM | {"tower": True}, "options.speculative", "speculative=none"),
        ({"speculative": "ngram", "tower": True}, "options.speculative", "speculative=none"),
        (NGRAM | {"deterministic": True}, "options.deterministic", "deterministic=false"),
        (NGRAM | {"prompt_lookup_min": 5}, "options.prompt_lookup_min", "prompt_lookup_max = 4"),
        (NGRAM | {"tensor_parallel_size": 2}, "options.tensor_parallel_size", "executor=workers"),
        (NGRAM | {"routed_experts": True}, "routed_experts", "routed_experts=off"),
        (NGRAM | {"adapter": True}, "lora", "lora=merged"),
    ],
)
def test_options_that_speculation_excludes_are_refused_by_name(
    given: dict[str, object], refused: str, words: str
) -> None:
    asked = {name: bool(given.get(name)) for name in ("routed_experts", "adapter", "tower")}
    options = VllmOptions.parse({name: v for name, v in given.items() if name not in asked})
    with pytest.raises(ConfigError) as caught:
        speculation.check(options, **asked)
    assert caught.value.field == f"rollout.{refused}"
    assert words in str(caught.value)


def test_n_grams_become_arguments_of_vllm_and_nothing_else_does() -> None:
    options = VllmOptions.parse(NGRAM | {"prompt_lookup_min": 1})
    speculation.check(options, routed_experts=False, adapter=False, tower=False)
    assert speculation.arguments(options) == {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    }
    assert speculation.arguments(VllmOptions()) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"adapter": True}, "rollout.lora=merged"),
        ({"routed_experts": True}, "rollout.routed_experts=off"),
        ({"vision": True}, "rollout.name=local"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=auto"),
        ({"tensor_parallel_size": 2}, "executor=workers"),
    ],
)
def test_arguments_that_syncs_during_generation_exclude_are_refused_by_name(
    given: dict[str, object], words: str
) -> None:
    asked = {name: bool(given.get(name)) for name in ("adapter", "routed_experts", "vision")}
    options = VllmOptions.parse({name: v for name, v in given.items() if name not in asked})
    in_flight.check(options, in_flight=False, **asked)
    with pytest.raises(UnsupportedCapability) as caught:
        in_flight.check(options, in_flight=True, **asked)
    assert caught.value.capability == "in_flight"
    assert words in str(caught.value)


def test_kept_keys_and_values_need_syncs_during_generation() -> None:
    options = VllmOptions.parse({"kv_cache_in_flight": "keep"})
    nothing = {"adapter": False, "routed_experts": False, "vision": False}
    in_flight.check(options, in_flight=True, **nothing)
    with pytest.raises(ConfigError) as caught:
        in_flight.check(options, in_flight=False, **nothing)
    assert caught.value.field == "rollout.options.kv_cache_in_flight"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a copy of the environment that ends with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return monkeypatch


def test_the_user_keeps_what_he_set(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    variables.delenv(environment.E8M0, raising=False)
    environment.prepare()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ[environment.E8M0] == "0"


@pytest.mark.parametrize(
    ("device", "dtype", "given", "want"),
    [
        ("cuda", "float32", None, "ieee"),
        ("cuda", "float32", "tf32x3", "tf32x3"),
        ("cuda", "bfloat16", None, None),
        ("cpu", "float32", None, None),
    ],
)
def test_float32_on_cuda_is_not_rounded_to_tf32_unless_the_user_says_so(
    variables: pytest.MonkeyPatch, device: str, dtype: str, given: str | None, want: str | None
) -> None:
    variables.delenv("TRITON_F32_DEFAULT", raising=False)
    if given is not None:
        variables.setenv("TRITON_F32_DEFAULT", given)
    exact_float32(device, dtype)
    assert os.environ.get("TRITON_F32_DEFAULT") == want


def test_requantized_weights_are_refused(variables: pytest.MonkeyPatch) -> None:
    variables.setenv(environment.E8M0, "1")
    with pytest.raises(RolloutError, match="requantize") as caught:
        environment.prepare()
    assert "scales=pow2" in caught.value.remedy


def test_variables_of_one_construction_are_given_back(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("RANK", "7")
    variables.delenv("LOCAL_RANK", raising=False)
    with environment.in_process(3, 1):
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("3", "1")
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["RANK"] == "7"
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [("4,5,6,7", "6,7"), (None, "2,3"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")],
)
def test_workers_are_no_ranks_and_see_their_devices(
    variables: pytest.MonkeyPatch, visible: str | None, wanted: str
) -> None:
    variables.setenv("RANK", "1")
    variables.setenv("MASTER_PORT", "1234")
    variables.setenv("TORCHELASTIC_RUN_ID", "x")
    if visible is None:
        variables.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        variables.setenv("CUDA_VISIBLE_DEVICES", visible)
    with environment.workers(2, 2):
        assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(os.environ)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert os.environ["RANK"] == "1"
