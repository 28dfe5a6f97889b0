"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.losses import where_counted
from engine_api.results import LossOutput, TokenOutputs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """PPO's value loss, clipped about the values before the update.

    Engstrom et al. 2020, arXiv:2005.12729, section 3.

    With V the values, R the returns, w the weight, the sum over tokens of::

        w / 2 · max( (V - R)², (clip(V, V_old - clip, V_old + clip) - R)² )

    Fields of the batch, ``[T]``: ``loss_weight``, ``returns`` and, with a clip, ``old_values``.

    Attributes:
        clip: how far a value may go from ``old_values`` in one step's updates; in the unit of
            rewards; None: any way.

    Metrics (sums over tokens with weight): ``tokens``, ``value``, ``return``, ``return_square``,
    ``error`` (R - V), ``error_square`` and ``clipped`` (a count: the clipped term is the larger
    one).

    Raises:
        ConfigError: for a clip that is not above 0.
    """

    clip: float | None = None

    needs = ("values",)

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                "algorithm.critic.value_clip",
                f"expected a number above 0, got {self.clip!r}",
                remedy="give a number above 0, or null",
            )

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum over ``batch`` (see the class)."""
        assert outputs.values is not None
        weight = batch.loss_weight
        counted = weight > 0
        values = where_counted(outputs.values, weight)
        returns = where_counted(batch["returns"], weight)
        square = (values - returns).square()
        metrics = _metrics(values.detach(), returns, counted)
        if self.clip is not None:
            old = where_counted(batch["old_values"], weight)
            near = values.maximum(old - self.clip).minimum(old + self.clip)
            clipped = (near - returns).square()
            metrics["clipped"] = ((clipped > square) & counted).sum()
            square = square.maximum(clipped)
        return LossOutput(loss=(weight * square).sum() / 2, metrics=metrics)


def _metrics(
    values: torch.Tensor, returns: torch.Tensor, counted: torch.Tensor
) -> dict[str, torch.Tensor]:
    sums = {
        "value": values,
        "return": returns,
        "return_square": returns.square(),
        "error": returns - values,
        "error_square": (returns - values).square(),
    }
    return {"tokens": counted.sum(), **{name: (x * counted).sum() for name, x in sums.items()}}


def explained_variance(sums: dict[str, float]) -> float:
    """Return ``1 - Var(R - V) / Var(R)`` from the loss's metrics.

    1: V is right, 0: no better than the mean. It is 0 where R is one number.
    """
    n = sums["tokens"]
    if not n:
        return 0.0
    variance = sums["return_square"] / n - (sums["return"] / n) ** 2
    rest = sums["error_square"] / n - (sums["error"] / n) ** 2
    return 1 - rest / variance if variance > 1e-12 else 0.0
