"""Speculative decoding by vLLM: tokens and log-probs stay those of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_peers as peers
from transformers import AutoModelForCausalLM
from vllm_peers import DEVICE

from engine_api.errors import ConfigError
from engine_api.rollout import Completion, SamplingParams
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]

PLAIN: dict[str, Any] = {"truncation": False, "deterministic": False}
# A single token is looked for, so that almost every pass has proposals.
NGRAM: dict[str, Any] = PLAIN | {
    "speculative": "ngram",
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
REPEATED: tuple[int, ...] = (5, 6, 7, 8) * 6
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


def call(function: Any, **kwargs: Any) -> Any:
    return get_pool(1, device=DEVICE).run(
        f"vllm_peers:{function.__name__}", deadline=240, **kwargs
    )[0]


def distributions(model: str, prompts: Sequence[Sequence[int]], drawn: Sequence[Completion]) -> Any:
    """Return the log-probs of all tokens at each place of each completion, by transformers."""
    served = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for one in drawn:
            prompt = prompts[one.prompt_index]
            logits = served(torch.tensor([[*prompt, *one.tokens]])).logits[0, len(prompt) - 1 : -1]
            found.append((logits / TEMPERATURE).log_softmax(-1))
    return found


@pytest.mark.slow
def test_a_greedy_completion_is_that_without_speculation_in_fewer_passes(model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "batches": [[*peers.PROMPTS, REPEATED]],
        "sampling": SamplingParams(max_new_tokens=120, temperature=0.0),
    }
    (plain,) = call(peers.drawn, **asked, **PLAIN)
    (speculated,) = call(peers.drawn, **asked, **NGRAM)
    assert [c.tokens for c in speculated] == [c.tokens for c in plain]
    for one, other in zip(speculated, plain, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert 0 < one.passes <= len(one.tokens)
    assert sum(c.passes for c in speculated) < sum(len(c.tokens) for c in speculated)
    assert {c.passes for c in plain} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_process", "workers"])
def test_drawn_tokens_and_their_log_probs_follow_the_served_model(
    model: str, executor: str
) -> None:
    prompts = [REPEATED, (9, 9, 9, 9, 9), (11, 12, 11, 12, 11)]
    (drawn,) = call(
        peers.drawn,
        model=model,
        batches=[prompts],
        sampling=SamplingParams(max_new_tokens=24, temperature=TEMPERATURE, n=40),
        executor=executor,
        **NGRAM,
    )
    differences: list[tuple[float, float]] = []
    for one, log_probs in zip(drawn, distributions(model, prompts, drawn), strict=True):
        tokens = torch.tensor(one.tokens)
        expected = log_probs[torch.arange(len(tokens)), tokens].tolist()
        assert one.log_probs == pytest.approx(expected, abs=2e-4)
        text = [*prompts[one.prompt_index], *one.tokens]
        for place, token in enumerate(one.tokens):
            before = text[: len(text) - len(one.tokens) + place]
            earlier = [i for i, seen in enumerate(before[:-1]) if seen == before[-1]]
            # The likeliest token, and the tokens that ``ngram`` proposes most often.
            looked_for = {int(log_probs[place].argmax()), *(before[i + 1] for i in earlier[:1])}
            probability = sum(float(log_probs[place, one].exp()) for one in looked_for)
            differences.append(
                (float(token in looked_for) - probability, probability * (1 - probability))
            )
    assert sum(c.passes for c in drawn) < sum(len(c.tokens) for c in drawn)
    deviation = sum(variance for _, variance in differences) ** 0.5
    # Five standard deviations: once in 1.7 million runs by chance.
    assert abs(sum(difference for difference, _ in differences)) < 5 * deviation


def test_options_that_speculation_excludes_are_refused_by_name(model: str) -> None:
    error = call(peers.refused, model=model, speculative="ngram")
    assert isinstance(error, ConfigError), error
    assert error.field == "rollout.options.truncation"
