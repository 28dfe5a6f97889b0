"""Adapters on vLLM: a sync of the adapter alone serves the same as the engine and a merged sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import adapter_peers as peers
import pytest
from vllm_peers import DEVICE, HAS_FP8_CACHE

from engine_api.errors import ConfigError, EngineError, RolloutError
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]
# In bfloat16 a merged weight is rounded once, a base weight and its adapter apart: tokens may part,
# log-probs stay near.
EXACT = peers.DTYPE == "float32"
NEAR = 1e-5 if EXACT else 0.15
SPLIT = 1e-4 if EXACT else NEAR  # two parts are summed in another order


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


@pytest.fixture(scope="module")
def said(model: str) -> dict[str, Any]:
    """Return the results of two servers for all tests of this module."""
    (found,) = get_pool(1, device=DEVICE).run("adapter_peers:adapters", deadline=280, model=model)
    return found


def refused(error: EngineError | None, *words: str) -> None:
    assert isinstance(error, RolloutError), error
    assert error.remedy, error
    assert all(word in str(error) for word in words), error


def same_tokens(some: Sequence[peers.Said], others: Sequence[peers.Said]) -> None:
    assert not EXACT or peers.greedy_tokens(some) == peers.greedy_tokens(others)


def close(one: peers.Said, near: float = NEAR) -> None:
    assert [len(c.tokens) for c in one.drawn] == [len(row) for row in one.told]
    for completion, told in zip(one.drawn, one.told, strict=True):
        assert completion.log_probs == pytest.approx(told, abs=near)


@pytest.mark.slow
def test_every_version_is_served_as_the_engine_and_as_a_merged_sync_have_it(
    said: dict[str, Any],
) -> None:
    first, second = said["versions"]
    for one in (first, second, said["merged"]):
        close(one)
    with pytest.raises(AssertionError):  # the tolerance tells two versions apart
        close(said["outdated"])
    assert [c.weight_versions[0] for c in (*first.greedy[:1], *second.greedy[:1])] == [1, 2]
    same_tokens([second], [said["merged"]])
    assert not EXACT or [c.tokens for c in second.drawn] == [c.tokens for c in said["merged"].drawn]
    for got, want in zip(second.greedy, said["merged"].greedy, strict=True):
        assert not EXACT or got.log_probs == pytest.approx(want.log_probs, abs=NEAR)
    assert [c.log_probs for c in first.greedy] != [c.log_probs for c in second.greedy]


def test_the_second_sync_carries_the_adapter_alone(said: dict[str, Any]) -> None:
    first, second = (one.sync for one in said["versions"])
    merged = said["merged"].sync
    assert second.num_tensors == 2 * 2 * len(peers.LORA.target_modules)  # A and B, two layers
    assert first.num_tensors == merged.num_tensors + second.num_tensors
    assert first.num_bytes == merged.num_bytes + second.num_bytes
    assert 0 < second.num_bytes < merged.num_bytes / 4
    assert all(
        one.audited and {"gather", "transfer", "install", "audit"} <= one.seconds.keys()
        for one in (first, second)
    )


@pytest.mark.parametrize("kind", peers.BAD)
def test_what_does_not_fit_is_named_and_nothing_is_generated(
    said: dict[str, Any], kind: str
) -> None:
    sync, generate = said["bad"][kind]
    refused(sync, {"name": "gate_prj", "nan": "not finite"}.get(kind, kind), "layers.1.mlp.gate_p")
    refused(generate, "last weight sync failed")


def test_a_worker_that_holds_something_else_is_found_out(said: dict[str, Any]) -> None:
    kept, silent, slot, mute = said["audit"]
    refused(kept, "differs from the exported one", "layers.0.self_attn.o_proj.lora_A.weight")
    refused(slot, "differs from the exported one", "model.layers.1.mlp.down_proj")
    refused(silent, "last weight sync failed")
    refused(mute, "last weight sync failed")


def test_the_base_comes_again_after_sleep_and_not_for_a_bad_adapter(said: dict[str, Any]) -> None:
    first, second = (one.sync for one in said["versions"])
    again, (woken, after) = said["again"], said["woken"]
    assert woken.sync.num_bytes == first.num_bytes
    assert again.sync.num_bytes == after.sync.num_bytes == second.num_bytes
    for one in (again, woken, after):
        close(one)
        same_tokens([one], [said["merged"]])


def test_merged_weights_are_refused_and_no_folder_is_left(said: dict[str, Any]) -> None:
    refused(said["merged export"], "merged weights", "same lora")
    assert said["folders"] == []


def test_what_vllm_cannot_serve_is_refused_before_it_starts(model: str, root: Path) -> None:
    experts = str(
        rollout_model(
            Target(backend="vllm", device=DEVICE, root=root, rollout=True),
            family="qwen3_moe",
            tied=False,
        )
    )
    cases = [(experts, peers.LORA, "rollout.lora")] if DEVICE == "cpu" else []
    cases += [
        (model, replace(peers.LORA, rank=513), "engine.lora.rank"),
        (model, replace(peers.LORA, target_modules=("lm_head",)), "engine.lora.target_modules"),
    ]
    for folder, lora, field in cases:
        (error,) = get_pool(1, device=DEVICE).run(
            "vllm_peers:refused", deadline=120, model=folder, lora=lora, dtype=peers.DTYPE
        )
        assert isinstance(error, ConfigError), error
        assert error.field == field


@pytest.mark.slow
def test_two_ranks_that_share_a_server(model: str, said: dict[str, Any]) -> None:
    rows = get_pool(2, device=DEVICE).run(
        "adapter_peers:on_ranks", deadline=280, model=model, tensor_parallel_size=2
    )
    for one, _ in rows:
        same_tokens([one], said["versions"][1:])
        close(one, SPLIT)
        assert one.sync.num_bytes == said["versions"][1].sync.num_bytes


@pytest.mark.skipif(not HAS_FP8_CACHE, reason="this CPU has no kernels for an FP8 cache")
@pytest.mark.slow
def test_an_fp8_cache_of_two_ranks_that_share_a_server_serves_each_adapter(model: str) -> None:
    rows = get_pool(2, device=DEVICE).run(
        "adapter_peers:on_ranks",
        deadline=280,
        model=model,
        tensor_parallel_size=2,
        kv_cache_dtype="fp8",
    )
    for one, _ in rows:
        apart = [
            abs(served - told)
            for completion, row in zip(one.drawn, one.told, strict=True)
            for served, told in zip(completion.log_probs, row, strict=True)
        ]
        # Random weights make single tokens sensitive.
        assert fmean(apart) < 0.15


@pytest.mark.slow
def test_workers_of_its_own_read_one_folder(model: str, said: dict[str, Any]) -> None:
    ((one, _),) = get_pool(1, device=DEVICE).run(
        "adapter_peers:on_ranks",
        deadline=280,
        model=model,
        executor="workers",
        tensor_parallel_size=2,
    )
    close(one, SPLIT)
    same_tokens([one], said["versions"][1:])
    assert one.sync.num_bytes == said["versions"][1].sync.num_bytes
