"""A schedule, which counts the updates of all mini-batches and epochs of every step.

It ends with the run's last update.
"""

from __future__ import annotations

import pytest
from rl_runs import configure, rows_of

from engine_trainer.rl.loop import train_rl

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_a_linear_schedule_ends_with_the_last_update_of_policy_and_critic(sums_model, tmp_path):
    """Train two steps of 2 mini-batches.

    The policy has 2 · 2 · 2 updates, whose u-th is at 1 - u/8; the critic has 2 · 2 · 3.
    """
    linear = {"name": "linear"}
    out = tmp_path / "out"
    model = {"path": str(sums_model)}
    critic = {"optimizer": {"lr": 0.012}, "schedule": linear, "epochs": 3}
    train_rl(
        configure(
            sums_model,
            out,
            run={"steps": 2},
            engine={
                "model": model,
                "device": "cpu",
                "schedule": linear,
                "optimizer": {"lr": 0.008},
            },
            algorithm={"advantage": "gae", "mini_batches": 2, "epochs": 2, "critic": critic},
        )
    )
    rows = rows_of(out)
    assert [(r["train/updates"], r["critic/updates"]) for r in rows] == [(4, 6), (4, 6)]
    # The rates are those of the 4th and the 8th update.
    assert [r["train/lr"] for r in rows] == pytest.approx([0.005, 0.001], rel=1e-12)
    # The rates are those of the 6th and the 12th update.
    assert [r["critic/lr"] for r in rows] == pytest.approx([0.007, 0.001], rel=1e-12)
