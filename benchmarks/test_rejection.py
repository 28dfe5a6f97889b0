"""The shares that ``benchmarks.rejection`` prints, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.rejection import rows_of
from engine_api import Batch


def test_the_shares_of_each_length_are_those_of_its_first_tokens() -> None:
    """Two completions of 1,024 tokens with different drift.

    One drifts by 0.0015 per token, one not at all for 512 tokens and then by 0.03.
    """
    drift = [[0.0015] * 1024, [0.0] * 512 + [0.03] * 512]
    documents = [
        {
            "input_ids": [1] * 1025,
            "mask": [0.0] + [1.0] * 1024,
            "rollout_log_probs": [0.0] + [-1.0] * 1024,
            "engine": [0.0, *(-1.0 + d for d in own)],
        }
        for own in drift
    ]
    batch = Batch.pack(documents)
    first, second = rows_of(batch, batch["engine"], 1024)
    assert (first["tokens"], first["completions"], second["tokens"]) == (512, 2, 1024)
    assert first["rejected_geometric"]["0.999…1.001"] == 0.5
    assert first["rejected_geometric"]["0.998…1.002"] == 0.0
    assert second["rejected_geometric"]["0.999…1.001"] == 1.0
    assert second["rejected_geometric"]["0.98…1.02"] == 0.0  # exp(0.015)
    assert second["rejected_sequence"]["0.5…2"] == 1.0  # exp(1.5) and exp(15)
    assert second["geometric"][0] == pytest.approx(math.exp(0.0015), abs=2e-4)
    square = torch.tensor(drift, dtype=torch.float64).square().mean()
    assert second["rms"] == pytest.approx(float(square.sqrt()), rel=1e-3)
