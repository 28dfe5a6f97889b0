"""Learning-rate schedules as one pure function that all engines share."""

from __future__ import annotations

import math

from engine_api.config import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int) -> float:
    """Return the factor on the base learning rate at optimizer step ``step``.

    Steps are counted from 0, and only those that were applied.

    Warm-up: ``(step + 1) / warmup_steps`` while ``step < warmup_steps``. After it, with
    ``p = (step - warmup) / (total - warmup)`` clamped to [0, 1] and ``m = min_ratio``:
    linear ``m + (1 - m)(1 - p)``; cosine ``m + (1 - m)(1 + cos(pi p)) / 2`` (Loshchilov and
    Hutter 2017, arXiv:1608.03983, without restarts).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    # EngineConfig has checked it.
    assert schedule.total_steps is not None
    span = max(1, schedule.total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    if schedule.name == "linear":
        decay = 1.0 - progress
    else:
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * decay
