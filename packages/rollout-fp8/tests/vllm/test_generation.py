"""Promises of vLLM's rollout beyond the conformance cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_peers as peers
from vllm_peers import DEVICE

from engine_api.errors import ConfigError, EngineError, RolloutError
from engine_api.rollout import SamplingParams
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


@pytest.fixture(scope="module")
def other(root: Path) -> str:
    return str(
        rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True), seed=11)
    )


def call(function: Any, *, world: int = 1, **kwargs: Any) -> Any:
    rows = get_pool(world, device=DEVICE).run(
        f"vllm_peers:{function.__name__}", deadline=240, **kwargs
    )
    return rows[0] if world == 1 else rows


def refused(error: EngineError | None, *words: str, kind: type[EngineError] = RolloutError) -> None:
    assert isinstance(error, kind), error
    assert error.remedy, error
    assert all(word in str(error) for word in words), error


@pytest.mark.slow
def test_a_draw_does_not_depend_on_its_batch(model: str) -> None:
    first, second, third = peers.PROMPTS
    # More prompts than vLLM begins in one step.
    many = [tuple(5 + (7 * i + 3 * j) % 200 for j in range(45)) for i in range(60)]
    batches = [[first], [second, first, third], [first, first], [*many, first]]
    alone, among, twice, last = call(
        peers.drawn, model=model, batches=batches, sampling=peers.SAMPLED
    )
    tokens = [c.tokens for c in alone]
    assert [c.tokens for c in among[2:4]] == tokens
    assert [c.tokens for c in last[-2:]] == tokens
    assert [c.tokens for c in twice[:2]] == tokens
    assert [c.tokens for c in twice[2:]] != tokens
    for one, other in zip(alone, among[2:4], strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.slow
def test_a_compiled_model_draws_the_same_and_is_let_go(model: str) -> None:
    # Dynamo keeps what it compiles; `opened` looks whether any weight is left.
    asked = {"model": model, "batches": [peers.PROMPTS], "sampling": peers.GREEDY}
    (eager,), (compiled,) = (
        call(peers.drawn, **asked),
        call(peers.drawn, **asked, enforce_eager=False),
    )
    assert [c.tokens for c in compiled] == [c.tokens for c in eager]


@pytest.mark.slow
def test_rows_of_a_batch_keep_their_own_temperature(model: str) -> None:
    # Rows end at different steps, so that vLLM moves rows of its batch while they run.
    prompts = [[*peers.PROMPTS[i % 3], 20 + i] for i in range(6)]
    sampling = [
        SamplingParams(max_new_tokens=3 + 3 * i, seed=7, temperature=(1.0, 0.5, 2.0)[i % 3])
        for i in range(6)
    ]
    together, apart = call(peers.mixed, model=model, prompts=prompts, samplings=sampling)
    assert [c.tokens for c in together] == [c.tokens for c in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.slow
def test_without_seeds_every_call_draws_anew_and_global_random_generators_stay(model: str) -> None:
    tokens, (before, after) = call(peers.drawn_freely, model=model)
    assert len({tuple(row) for row in tokens}) == 3
    assert before == after


@pytest.mark.slow
def test_global_random_generators_and_threads_stay(model: str) -> None:
    before, made, generated, threads = call(peers.random_states, model=model)
    assert before == made == generated
    assert threads


@pytest.mark.slow
def test_background(model: str) -> None:
    said = call(peers.background, model=model)
    alone, beside, greedy = said["beside"]
    assert [c.tokens for c in beside] == [c.tokens for c in alone]
    for one, other in zip(alone, beside, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert {c.prompt_index for c in beside} == {0}
    refused(said["sync"], "generating", "abort")
    refused(said["sleep"], "generating")
    assert said["running"]
    assert said["timeout"]
    (aborted,) = said["aborted"]
    assert aborted.finish_reason == "abort"
    assert (
        len(aborted.tokens)
        == len(aborted.log_probs)
        == len(aborted.weight_versions)
        < peers.LONG.max_new_tokens
    )
    assert set(aborted.weight_versions) <= {1}
    refused(said["bad"], "prompt 0 is empty")
    assert [c.tokens for c in said["after"]] == [c.tokens for c in greedy]
    assert set(said["after"][0].weight_versions) == {2}
    refused(said["lost"], "closed")


@pytest.mark.slow
def test_generation_during_a_sync_is_refused(model: str) -> None:
    generate, sync, after = call(peers.during_a_sync, model=model)
    refused(generate, "sync is running")
    refused(sync, "sync is running")
    assert after is None


@pytest.mark.slow
def test_weights_and_caches_sleep_apart(model: str, other: str) -> None:
    said = call(peers.naps, model=model, other=other)
    before, after, synced, again = said["tokens"]
    assert before == after != synced
    assert synced == again
    caches, order, asleep, half = said["errors"]
    refused(caches, "caches sleep")
    refused(order, "weights")
    refused(asleep, "wake_up")
    refused(half, "caches sleep")


@pytest.mark.slow
def test_a_failed_start_leaves_no_compiled_model(model: str) -> None:
    error, hooks, held = call(peers.left_by_failed_start, model=model)
    refused(error, "not enough memory")
    assert (hooks, held) == (0, [])


def test_memory_that_others_used_meanwhile_is_not_called_too_little() -> None:
    text = (
        "Error in memory profiling. Initial free memory 135.05 GiB, current free memory 136.26 GiB."
    )
    refused(call(peers.explained, text=text), "other processes used", "one process at a time")


def test_an_architecture_that_vllm_does_not_know_is_named_without_all_that_it_knows() -> None:
    text = (
        "Model architectures ['ZayaForCausalLM'] are not supported for now. "
        "Supported architectures: dict_keys(['LlamaForCausalLM'])"
    )
    error = call(peers.explained, text=text)
    refused(error, "does not serve this model", "ZayaForCausalLM", "rollout.name=local")
    assert "LlamaForCausalLM" not in str(error)


@pytest.mark.slow
def test_an_engine_of_float32_on_cuda_is_built_where_triton_does_not_round(model: str) -> None:
    assert call(peers.float32_of_starts, model=model) == {"bfloat16": None, "float32": "ieee"}


@pytest.mark.slow
def test_what_cannot_start_says_why(model: str) -> None:
    refused(call(peers.refused, model=model, enforce_eagre=True), "enforce_eager", kind=ConfigError)
    refused(call(peers.refused, model=model, dtype="float8"), "float8", kind=ConfigError)
    refused(
        call(peers.refused, model=model, kv_cache_bytes=1 << 50),
        "not enough memory",
        "kv_cache_bytes",
    )
    # More than a GPU has and less than a process can address, so that another step of vLLM's
    # allocator fails.
    if DEVICE == "cuda":
        refused(
            call(peers.refused, model=model, kv_cache_bytes=1 << 39),
            "not enough memory",
            "kv_cache_bytes",
        )
    both = {"kv_cache_bytes": 1 << 30, "kv_cache_for_batch": True}
    refused(call(peers.refused, model=model, **both), "give one of the two", kind=ConfigError)
    refused(
        call(peers.refused, model=model, tensor_parallel_size=2), "1 ranks", "tensor_parallel_size"
    )
    # And the rank is as good as new.
    assert call(peers.drawn, model=model, batches=[[(5, 6)]], sampling=peers.GREEDY)


@pytest.mark.skipif(
    DEVICE != "cpu" or "amx_tile" in Path("/proc/cpuinfo").read_text(),
    reason="this device has FP8 kernels",
)
def test_fp8_without_kernels_is_refused(model: str) -> None:
    refused(
        call(peers.refused, model=model, dtype="bfloat16", quantization="fp8"),
        "AMX",
        "quantization=none",
    )
