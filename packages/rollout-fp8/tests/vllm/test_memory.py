"""Memory that vLLM's rollout takes, of which it leaves none behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_peers as peers
import pytest
from vllm_peers import DEVICE

from engine_api.errors import RolloutError
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


def call(function: Any, **kwargs: Any) -> Any:
    return get_pool(1, device=DEVICE).run(
        f"memory_peers:{function.__name__}", deadline=240, **kwargs
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [True, False], ids=["all", "caches"])
def test_one_that_is_closed_asleep_gives_its_memory_back_and_another_begins(
    model: str, weights: bool
) -> None:
    before, after, tokens, again = call(peers.closed_asleep, model=model, weights=weights)
    assert tokens == again
    # The caches have 1 GiB. Free memory moves when other processes use the GPU, too.
    assert before - after < 64 << 20


@pytest.mark.slow
def test_a_cache_for_the_batch_holds_it_and_hardly_more(model: str) -> None:
    blocks, size, tokens = call(peers.cache_for_batch, model=model, batch_size=5, max_model_len=300)
    assert 5 * 300 <= (blocks - 1) * size < 5 * 384 + 128  # the empty block has the size of vLLM's
    assert tokens == [292] * 5


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing sleeps on a CPU")
def test_what_sleeps_wakes_up_in_memory_that_pytorch_keeps(model: str) -> None:
    error, free, before, after = call(peers.crowded, model=model)
    assert isinstance(error, RolloutError), error
    assert "cannot wake up" in str(error)
    assert "offload_engine" in error.remedy
    assert free < GIB  # not even the cache fits, as far as the driver knows
    assert before == after


def test_the_compiler_of_a_failed_start_keeps_no_layer() -> None:
    assert call(peers.attention_of_failed_start) == []


def test_vllms_caches_keep_no_tower() -> None:
    assert call(peers.tower_in_caches) == []


def test_dynamos_guards_keep_no_layer() -> None:
    """torch 2.11 keeps each layer without the attribute that a guard reads, as 0.32's Llama has."""
    assert call(peers.layer_in_guards) == []


def test_a_sleep_leaves_an_engine_of_this_process_the_memory_that_pytorch_keeps() -> None:
    assert call(peers.emptied_by_sleep, executor="in_process") == ["behind it"]
    assert call(peers.emptied_by_sleep, executor="workers") == ["in a sleep", "behind it"]


def test_pytorchs_cache_is_emptied_only_where_it_must_be() -> None:
    woken = ["weights", "kv_cache"]
    assert call(peers.woken, executor="in_process", need=2 * GIB, free=2 * GIB, kept=0) == (
        [woken],
        None,
    )
    assert call(peers.woken, executor="in_process", need=3 * GIB, free=2 * GIB, kept=GIB) == (
        ["empty_cache", woken],
        None,
    )
    assert call(peers.woken, executor="workers", need=0, free=0, kept=0) == (
        ["empty_cache", woken],
        None,
    )
    calls, error = call(peers.woken, executor="in_process", need=4 * GIB, free=2 * GIB, kept=GIB)
    assert calls == ["empty_cache"]
    assert isinstance(error, RolloutError)
    assert "kv_cache and weights need 4.00 GiB, 3.00 GiB are free" in str(error)
    assert "take 3.00 GiB" in str(error)  # of 7 that PyTorch counts, the 4 that sleep among them
