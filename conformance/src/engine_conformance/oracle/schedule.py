"""Learning-rate schedules as formulae of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate at step k, counted from 0.

    Step 0 is the first update.

    With W warm-up steps, N total steps and minimum ratio m:

    - ``k < W``: ``lr * (k + 1) / W``, so that the first update is not wasted on a rate of zero;
    - then, with ``p = min(1, (k - W) / (N - W))``: constant ``lr``;
      linear ``lr * (1 - (1 - m) * p)``; cosine ``lr * (m + (1 - m) * (1 + cos(pi * p)) / 2)``
      (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5). After step N the rate stays at
      ``m * lr``.

    ``total_steps`` must exceed ``warmup_steps``, unless the schedule is constant.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    lr: float = 1e-3
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"{self.kind}: total_steps {self.total_steps} must exceed {self.warmup_steps}"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of the update number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        shape = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * shape)
