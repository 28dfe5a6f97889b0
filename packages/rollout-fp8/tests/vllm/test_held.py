"""Outputs that are held back until a completion ends, against vLLM's own processing of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_peers as peers
from vllm.sampling_params import RequestOutputKind
from vllm_peers import DEVICE

from engine_api.errors import RolloutError
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool
from rollout_fp8.vllm.held import HeldOutputs


def output(request: str, *tokens: int, ends: bool = False) -> Any:
    """Return an output of vLLM's engine core, whose log-prob of token t is -t."""
    rows = -np.array([[token, 99] for token in tokens], dtype=np.float32).reshape(-1, 2)
    return SimpleNamespace(
        request_id=request,
        new_token_ids=list(tokens),
        new_logprobs=SimpleNamespace(logprobs=rows) if tokens else None,
        routed_experts=None,
        finish_reason="stop" if ends else None,
    )


@pytest.fixture
def processed() -> list[list[tuple[str, list[int], bool]]]:
    """The outputs that were processed in each step: request, tokens, whether log-probs came."""
    return []


@pytest.fixture
def requests() -> dict[str, Any]:
    """The states of vLLM's processor: two requests that are read at their end, and a stream."""
    return {
        name: SimpleNamespace(output_kind=kind, external_req_id=name[0])
        for name, kind in {
            "a-1": RequestOutputKind.FINAL_ONLY,
            "b-1": RequestOutputKind.FINAL_ONLY,
            "c-1": RequestOutputKind.DELTA,
        }.items()
    }


@pytest.fixture
def held(processed: list[Any], requests: dict[str, Any]) -> HeldOutputs:
    def process(outputs: list[Any], timestamp: float) -> int:
        assert timestamp == 0.5
        rows = [(one.request_id, one.new_token_ids, bool(one.new_logprobs)) for one in outputs]
        processed.append(rows)
        return len(outputs)

    return HeldOutputs(process, requests)


def test_tokens_are_processed_together_at_the_end(held: HeldOutputs, processed: list[Any]) -> None:
    assert held.process([output("a-1", 1), output("b-1", 2, 3)], timestamp=0.5) == 0
    assert held.process([output("b-1", 4, ends=True), output("a-1", 5)], timestamp=0.5) == 1
    # It ends without a token of this step.
    assert held.process([output("a-1", ends=True)], timestamp=0.5) == 1
    assert processed == [[], [("b-1", [2, 3, 4], False)], [("a-1", [1, 5], False)]]
    assert held.take_log_probs("a") == [-1.0, -5.0]
    assert held.take_log_probs("b") == [-2.0, -3.0, -4.0]
    assert held.take_log_probs("b") is None


def test_what_is_read_as_it_comes_is_not_held(held: HeldOutputs, processed: list[Any]) -> None:
    held.process([output("c-1", 7), output("gone", 8)], timestamp=0.5)
    held.process([output("c-1", 9, ends=True)], timestamp=0.5)
    assert processed == [
        [("c-1", [7], True), ("gone", [8], True)],
        [("c-1", [9], True)],
    ]
    assert held.take_log_probs("c") is None


def test_aborted_completions_are_forgotten(
    held: HeldOutputs, processed: list[Any], requests: dict[str, Any]
) -> None:
    held.process([output("a-1", 1), output("b-1", 2)], timestamp=0.5)
    del requests["a-1"]
    held.forget_aborted()
    # It had ended before vLLM knew of the abort.
    held.process([output("a-1", 3, ends=True), output("b-1", 4, ends=True)], timestamp=0.5)
    assert processed == [[], [("a-1", [3], True), ("b-1", [2, 4], False)]]
    assert held.take_log_probs("a") is None
    assert held.take_log_probs("b") == [-2.0, -4.0]
    assert not held._held


def test_a_vllm_that_reports_log_probs_in_another_way_is_refused(held: HeldOutputs) -> None:
    last = output("a-1", 1, 2, ends=True)
    last.new_logprobs = None
    with pytest.raises(RolloutError, match="each of 2 tokens, got 0"):
        held.process([last], timestamp=0.5)


@pytest.mark.slow
@pytest.mark.distributed
def test_completions_are_those_that_stream(root: Any) -> None:
    """Each is processed once where it is read at its end, and at each of its steps if it streams.

    Draws have seeds. On a CPU bits are the same. A GPU adds up in another order for another size of
    the batch.
    """
    target = Target(backend="vllm", device=DEVICE, root=root, rollout=True)
    said = get_pool(1, device=DEVICE).run(
        "vllm_peers:held_and_streamed", deadline=240, model=str(rollout_model(target))
    )[0]
    together, streamed, counts, left = said
    near = 0.0 if DEVICE == "cpu" else 1e-4
    for (tokens, log_probs), (streamed_tokens, others) in zip(together, streamed, strict=True):
        assert tokens == streamed_tokens
        assert log_probs == pytest.approx(others, rel=0, abs=near)
    number = len(peers.PROMPTS) * peers.SAMPLED.n
    tokens = sum(len(one) for one, _ in together)
    assert counts == [number, tokens]
    assert tokens > number
    assert left == 0
