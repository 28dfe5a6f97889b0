"""Several ranks of one run do not share a running server, which would wait for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_api.errors import ConfigError
from engine_trainer.config.sections import RolloutSection
from engine_trainer.placement.spmd import Spmd, refuse_shared_server

URL = {"url": "http://127.0.0.1:8000"}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Spmd:
    """A launcher of two ranks, with nothing made."""
    comm = SimpleNamespace(world_size=2)
    monkeypatch.setattr("engine_trainer.placement.spmd.connect_ranks", lambda timeout_s: comm)
    return Spmd(SimpleNamespace(rollout=RolloutSection(name="vllm-server", options=URL)))


def test_it_is_refused_before_an_engine_is_made(launcher: Spmd) -> None:
    with pytest.raises(ConfigError, match="expected one rank, got 2") as caught:
        launcher.engines(None, None, "cpu")
    assert caught.value.field == "rollout.options.url"


def test_it_is_refused_where_the_caller_has_checked_the_rest(launcher: Spmd) -> None:
    spec = SimpleNamespace(section=RolloutSection(name="vllm-server", options=URL))
    with pytest.raises(ConfigError, match="expected one rank, got 2"):
        launcher.rollouts(spec, None)


@pytest.mark.parametrize(("ranks", "options"), [(1, URL), (2, {})])
def test_one_rank_and_servers_that_the_ranks_start_are_as_before(ranks, options) -> None:
    refuse_shared_server(RolloutSection(name="vllm-server", options=options), ranks)
