"""The lengths of answers with random weights, and the figures of ``benchmarks.in_flight``."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import pytest
import torch

from benchmarks.in_flight import table
from benchmarks.rl_step import idle
from benchmarks.rl_work import end_scale


@pytest.mark.parametrize("tokens", [50, 500])
def test_the_end_token_has_the_probability_that_the_mean_length_needs(tokens: int) -> None:
    """The mean is over states, and over some heads."""
    hidden, vocab = 64, 4096
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4000, hidden, generator=generator)
    states = states / states.square().mean(1, keepdim=True).sqrt()
    # Several heads, because a single row decides the mean of one.
    found = []
    for _ in range(8):
        head = 0.02 * torch.randn(vocab, hidden, generator=generator)
        head[2] *= end_scale(hidden, vocab, tokens)
        found.append((states @ head.T).softmax(-1)[:, 2].mean().item())
    assert math.isclose(sum(found) / len(found), 1 / tokens, rel_tol=0.5)


def test_the_idle_share_is_that_of_each_gpu_between_two_times(tmp_path: Path) -> None:
    """A line that was cut does not count."""
    stamp = datetime(2026, 1, 1, 12).astimezone()
    rows = [(0, 0, 100), (1, 0, 80), (1, 1, 10), (2, 0, 60), (2, 1, 30), (9, 1, 100)]
    file = tmp_path / "gpus.csv"
    file.write_text(
        "".join(f"2026/01/01 12:00:0{s}.000, {gpu}, {value}\n" for s, gpu, value in rows)
        + "2026/01/01 12:00:02.0"
    )
    begin = stamp.timestamp() + 0.5
    assert idle(file, begin, begin + 2) == {"0": 0.3, "1": 0.8}


def test_a_step_is_compared_with_the_larger_of_generation_and_update() -> None:
    """The reward belongs to generation, and log-probs to the update."""
    alone = {
        "shape": "tiny",
        "response_length": 900,
        "step_s": 16.0,
        "phases_s": {"generate": 9.5, "reward": 0.5, "log_probs": 1.0, "train": 4.0, "sync": 1.0},
    }
    run = {
        "step_s": 10.5,
        "gpu_idle_each": {"0": 0.5, "1": 0.04},
        "worker_idle_each": {},
        "paused_s": 0.012,
        "continued": 0.5,
    }
    lines = table(alone, {"in flight": run}).splitlines()
    assert "generation alone 10.0 s, update alone 5.0 s, both in turn 16.0 s" in lines[0]
    assert lines[-1] == "| in flight | 10.5 s | 1.05 | 0 50%, 1 4% | unknown | 12 ms | 50% |"
