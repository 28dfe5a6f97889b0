"""Arguments of the runs that ``benchmarks.rollout_throughput`` compares."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import rollout_throughput


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        (["--pair", "cache"], "cache"),
        (["--pair=cache"], "cache"),
        (["--both"], "quantization"),
        (["--rollout={}", "--pair=ngram"], "ngram"),
    ],
)
def test_the_runs_of_a_pair_are_asked_for_no_pair(
    monkeypatch: pytest.MonkeyPatch, given: list[str], pair: str
) -> None:
    """Every way to write a pair is left out, or the runs would run it again without end."""
    asked: list[Any] = []
    monkeypatch.setattr(rollout_throughput, "compare", lambda *all_: asked.append(all_))
    monkeypatch.setattr(
        sys, "argv", ["rollout_throughput", "--new", "3", *given, "--server=sglang"]
    )
    rollout_throughput.main()
    assert asked == [(pair, ["--new", "3", "--server=sglang"], "{}")]


def test_an_abbreviated_argument_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An abbreviation would be passed on to the runs of a pair."""
    monkeypatch.setattr(sys, "argv", ["rollout_throughput", "--pai=cache"])
    with pytest.raises(SystemExit):
        rollout_throughput.main()
    assert "unrecognized arguments: --pai=cache" in capsys.readouterr().err
