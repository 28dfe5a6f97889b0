"""Weight syncs while vLLM generates: versions and log-probs of the tokens before and after."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import in_flight_peers as peers
import pytest
import torch
from in_flight_peers import PROMPT, SHORT
from transformers import AutoModelForCausalLM
from vllm_peers import DEVICE

from engine_api.errors import EngineError, RolloutError, UnsupportedCapability
from engine_api.rollout import Completion
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool
from rollout_fp8.vllm import private
from rollout_fp8.vllm.generation import Job, Stepper

pytestmark = [pytest.mark.distributed]

PLAIN: dict[str, Any] = {"truncation": False, "deterministic": False}


@pytest.fixture(scope="module")
def target(root: Path) -> Target:
    return Target(backend="vllm", device=DEVICE, root=root, rollout=True)


@pytest.fixture(scope="module")
def model(target: Target) -> str:
    return str(rollout_model(target))


@pytest.fixture(scope="module")
def other(target: Target) -> str:
    return str(rollout_model(target, seed=11))


def call(function: Any, **kwargs: Any) -> Any:
    return get_pool(1, device=DEVICE).run(
        f"in_flight_peers:{function.__name__}", deadline=300, **kwargs
    )[0]


def expected(
    old: Any, new: Any, prompt: Sequence[int], one: Completion, *, keep: bool
) -> list[float]:
    """Return the log-probs of a completion's tokens, whose versions are 1 and then 2.

    ``keep``: the new model reads the old one's keys and values.
    """
    made = one.weight_versions.count(1)
    tokens = torch.tensor([[*prompt, *one.tokens]])
    first, place = len(prompt) - 1, len(prompt) - 1 + made
    with torch.no_grad():
        before = old(tokens).logits[0, first:place]
        if keep and made:
            # The last of the old tokens is no input yet.
            cache = old(tokens[:, :place], use_cache=True).past_key_values
            after = new(tokens[:, place:], past_key_values=cache).logits[0]
        else:
            after = new(tokens).logits[0, place:]
    log_probs = torch.cat([before, after[:-1]]).log_softmax(-1)
    drawn = torch.tensor(one.tokens)
    return log_probs[torch.arange(len(drawn)), drawn].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "cache", "speculative"),
    [
        ("in_process", "recompute", {}),
        ("in_process", "keep", {}),
        ("workers", "recompute", {}),
        ("workers", "keep", {}),
        pytest.param(
            "in_process", "recompute", {"speculative": "ngram"}, marks=pytest.mark.nightly
        ),
        pytest.param("in_process", "keep", {"speculative": "ngram"}, marks=pytest.mark.nightly),
    ],
)
def test_tokens_of_both_versions_have_log_probs_of_the_weights_that_made_them(
    model: str, other: str, executor: str, cache: str, speculative: dict[str, Any]
) -> None:
    # The last one waits for a place at the sync, and begins like the first one, whose keys and
    # values are in the cache.
    prompts = [PROMPT, SHORT, PROMPT]
    found, fresh, during, idle = call(
        peers.updated,
        model=model,
        other=other,
        prompts=prompts,
        batch_size=2,
        executor=executor,
        kv_cache_in_flight=cache,
        **(PLAIN | speculative if speculative else {}),
    )
    old, new = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model, other)
    )
    for one, prompt in zip(found, prompts, strict=True):
        made = one.weight_versions.count(1)
        assert one.weight_versions == [1] * made + [2] * (len(one.tokens) - made)
        assert len(one.log_probs) == len(one.tokens)
        assert one.log_probs == pytest.approx(
            expected(old, new, prompt, one, keep=cache == "keep"), abs=2e-4
        )
    for one in found[:2]:
        assert {1, 2} == set(one.weight_versions), "the sync came during the completion"
    # Begun after the sync, with a prompt of which old keys and values are in memory.
    for one in [found[2], *fresh]:
        assert set(one.weight_versions) == {2}
        assert one.log_probs == pytest.approx(
            expected(old, new, prompts[0], one, keep=False), abs=2e-4
        )
    # The two modes differ by more than the tolerance.
    first = found[0]
    apart = torch.tensor(expected(old, new, PROMPT, first, keep=True)) - torch.tensor(
        expected(old, new, PROMPT, first, keep=False)
    )
    assert apart.abs().max() > 1e-2
    assert during.audited
    assert during.seconds["paused"] > 0
    assert "paused" not in idle.seconds


def refused(error: EngineError | None, *words: str) -> None:
    assert isinstance(error, RolloutError), error
    assert error.remedy, error
    assert all(word in str(error) for word in words), error


@pytest.mark.slow
def test_a_failed_sync_ends_what_runs_and_an_abort_in_the_pause_gives_no_new_token(
    model: str, other: str
) -> None:
    said = call(peers.troubled, model=model, other=other)
    refused(said["sync"])
    for error in said["lost"]:
        refused(error, "weight sync during it failed", "update_weights")
    refused(said["unready"], "failed")
    assert {v for one in said["after"] for v in one.weight_versions} == {3}
    refused(said["submit"], "sync is running")
    refused(said["sleep"], "generating")
    (aborted,), (kept,), (generated,) = said["aborted"], said["kept"], said["generated"]
    assert aborted.finish_reason == "abort"
    assert aborted.tokens
    assert set(aborted.weight_versions) == {3}
    assert set(kept.weight_versions) == {3, 4}
    assert set(generated.weight_versions) == {4, 5}


def test_an_excluded_argument_is_refused_before_vllm_starts(model: str) -> None:
    error = call(peers.refused_with, model=model, in_flight=True, kv_cache_dtype="fp8")
    assert isinstance(error, UnsupportedCapability)
    assert error.capability == "in_flight"


class Idle:
    """An engine that never gives an output."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    def add_request(self, _: str, inputs: Any, *args: Any, **kwargs: Any) -> None:
        self.salts.append(inputs["cache_salt"])

    def abort_request(self, _: Any) -> None:
        pass

    def step(self) -> list[Any]:
        os.sched_yield()
        return []


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    monkeypatch.setattr(private, "pause", lambda _: iter(()))
    monkeypatch.setattr(private, "resume", lambda _: None)
    made = Stepper(Idle(), torch.device("cpu"), salted=True)  # type: ignore[arg-type]
    yield made
    made.close()


def begin(stepper: Stepper) -> Job:
    job = Job(stepper)
    job.add(0, [1, 2], params=None)  # type: ignore[arg-type]
    stepper.enter(job)
    return job


def test_a_pause_that_follows_a_failed_one_at_once_ends_nothing_too_few(stepper: Stepper) -> None:
    for _ in range(20):
        job = begin(stepper)
        stepper.pause()
        stepper.resume(RolloutError("the sync failed", where="x", remedy="y"))
        stepper.pause()
        stepper.resume()
        with pytest.raises(RolloutError, match="the sync failed"):
            job.result(timeout_s=60)


def test_what_begins_after_a_pause_finds_no_keys_and_values_from_before_it(
    stepper: Stepper,
) -> None:
    """Check that the version alone tells nothing: other weights may come under the same one."""
    job = begin(stepper)
    for _ in range(2):
        stepper.pause()
        stepper.resume()
    job.abort()
    assert job.result(timeout_s=60)
    salts = stepper._engine.salts
    assert len(salts) == len({*salts}) == 3
