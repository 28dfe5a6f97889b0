"""The best step of a run by a figure of its evaluations (``run.keep_best``, ``run.patience``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError

# The last part of the names of figures that are better when they are lower.
_LOWER = ("loss", "perplexity")


class BestStep:
    """The step whose evaluation gave the best figure so far.

    Args:
        metric: name of the figure; None watches none.
        patience: number of evaluations in a row without a better figure after which ``is_over``;
            None is never.
    """

    def __init__(self, metric: str | None, patience: int | None) -> None:
        self.metric = metric
        self.patience = patience
        self.step: int | None = None
        self.value = 0.0
        self.worse = 0  # evaluations since the best one

    @property
    def is_over(self) -> bool:
        """True if the run should end."""
        return self.patience is not None and self.worse >= self.patience

    @property
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        return {"metric": self.metric, "step": self.step, "value": self.value, "worse": self.worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved ``state``, unless it is of another figure."""
        if state.get("metric") == self.metric:
            self.step, self.value, self.worse = state["step"], state["value"], state["worse"]

    def check(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the figures are those of an evaluation.

        Raises ``ConfigError`` for an evaluation that does not have the figure.
        """
        measured = sorted(name for name in metrics if name.startswith("eval/"))
        if measured and self.metric is not None and self.metric not in metrics:
            raise ConfigError(
                "run.keep_best",
                f"the evaluation has no figure {self.metric!r}",
                why=f"it has {', '.join(measured)}",
                remedy=near_matches(self.metric, measured, listed=True),
            )
        return bool(measured)

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Note the figures of a step, and return whether it is the best one so far.

        Steps without an evaluation change nothing. A figure that is NaN is never better.

        Raises ``ConfigError`` for an evaluation that does not have the figure.
        """
        if self.metric is None or not self.check(metrics):
            return False
        value = metrics[self.metric]
        lower = self.metric.rpartition("/")[2] in _LOWER
        if self.step is None:
            better = not math.isnan(value)
        else:
            better = value < self.value if lower else value > self.value
        if better:
            self.step, self.value, self.worse = step, value, 0
        else:
            self.worse += 1
        return better

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4g} at step {self.step}"
