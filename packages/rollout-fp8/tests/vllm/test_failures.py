"""Failed generations and lost engines, after which nothing continues and no caller waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_peers import DEVICE

from engine_api.errors import RolloutError
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


def call(function: str, **kwargs: Any) -> Any:
    (row,) = get_pool(1, device=DEVICE).run(f"failure_peers:{function}", deadline=240, **kwargs)
    return row


@pytest.mark.slow
def test_whatever_ends_a_generation_leaves_nothing_scheduled(model: str) -> None:
    names = ["KeyboardInterrupt", "CancelledError", "SystemExit", "ZeroDivisionError"]
    assert call("interrupted", model=model) == [(name, False) for name in names]


@pytest.mark.slow
def test_an_engine_whose_step_failed_is_no_good_for_anything(model: str) -> None:
    errors, scheduled = call("failed_steps", model=model)
    for error in errors:
        assert isinstance(error, RolloutError), errors
        assert "no step" in error.why
        assert error.remedy
    assert not scheduled


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "busy"), [(1, False), (2, True)])
def test_the_end_of_a_process_of_vllms_ends_every_call_at_once(
    model: str, parallel: int, busy: bool
) -> None:
    *calls, closing = call("killed", model=model, parallel=parallel, busy=busy)
    assert closing is None
    assert len(calls) == 3 + busy
    for error in calls:
        assert isinstance(error, RolloutError), calls
        assert error.remedy
        assert "has ended" in str(error)


@pytest.mark.slow
def test_a_log_prob_that_is_none_is_refused(model: str) -> None:
    for error in call("not_finite", model=model):
        assert isinstance(error, RolloutError)
        assert "prompt 0: token 0 was drawn with log-prob nan" in error.what
        assert "dtype" in error.remedy


@pytest.mark.slow
def test_a_temperature_that_vllm_would_change_is_refused(model: str) -> None:
    said = call("temperatures", model=model)
    for given in (1e-6, 0.005, 3.0):
        error = said.pop((False, given))
        assert error.startswith(f"RolloutError: rollout 'vllm': temperature={given}"), error
        assert "truncation=true" in error
    assert all(isinstance(least, float) for least in said.values()), said


@pytest.mark.slow
def test_a_request_that_vllm_refuses_ends_no_other(model: str) -> None:
    (plain, odd), error, goes_on, scheduled = call("refused_requests", model=model)
    assert odd == plain  # what cannot be drawn ends nothing
    assert isinstance(error, RolloutError)
    assert "ValueError" in error.why
    assert goes_on
    assert not scheduled


@pytest.mark.slow
def test_what_fails_in_a_process_of_vllms_is_an_error_of_the_contract(model: str) -> None:
    error, served = call("worker_errors", model=model)
    assert isinstance(error, RolloutError)
    assert "message between processes: the bytes are no" in error.why
    assert served


@pytest.mark.slow
def test_a_start_that_is_interrupted_leaves_no_process(model: str) -> None:
    assert call("interrupted_start", model=model) == ([], [])


@pytest.mark.slow
def test_whatever_vllm_raises_at_its_start_is_an_error_of_the_contract(model: str) -> None:
    architecture, bug, interrupt = call("failed_starts", model=model)
    assert isinstance(architecture, RolloutError)
    assert "no such architecture" in architecture.why
    assert isinstance(bug, RolloutError)
    assert isinstance(interrupt, KeyboardInterrupt)


def test_a_request_that_vllm_gives_up_is_no_completion() -> None:
    for reason, (error, scheduled) in zip(
        ("error", "repetition", "abort"), call("given_up"), strict=True
    ):
        assert isinstance(error, RolloutError), (reason, error)
        assert f"prompt 1 ended with {reason!r}" in error.what
        assert scheduled == []
