"""Losses over pairs of a chosen and a rejected document, for DPO and reward models.

A pair's loss f(h) is a function of one number h, a difference of two sums over tokens: of log-prob
ratios (DPO), or of the values at the last tokens (a reward model). Its gradient is ``f'(h) (∇
sum_chosen - ∇ sum_rejected)``. So with ``f'(h)`` taken at the present weights the training pass is
a *linear* sum over tokens (``LinearLoss``): the two documents of a pair need not be in one
micro-batch, nor on one rank, the head may form its gradients in the forward pass, and the gradient
is that of f itself. The price is one more forward pass per step, for h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from engine_api.batch import Batch
from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.losses import where_counted
from engine_api.results import LossOutput, TokenOutputs

PairLossName = Literal["sigmoid", "hinge", "ipo"]
Output = Literal["log_probs", "values"]


def pair_loss(
    margin: torch.Tensor, beta: float, name: PairLossName = "sigmoid"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each pair and its derivative by the margin.

    Args:
        margin: ``[N]`` h. For DPO ``(log π(chosen) - log ref(chosen)) - (log π(rejected) - log
            ref(rejected))``, nats.
        beta: β > 0, nats⁻¹.
        name: ``sigmoid``: -log σ(β h) (DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7; with β =
            1 and h a difference of rewards Bradley and Terry's likelihood, as in arXiv:2203.02155,
            eq. 1); ``hinge``: max(0, 1 - β h) (SLiC's with a reference, arXiv:2309.06657); ``ipo``:
            (h - 1 / (2β))² (Azar et al. 2023, arXiv:2310.12036, eq. 17, τ = β).

    Returns:
        Loss and slope, both ``[N]`` float64.

    Raises:
        ConfigError: for an unknown name.
    """
    compute = _LOSSES.get(name)
    if compute is None:
        raise ConfigError(
            "dpo.loss", f"unknown loss {name!r}", remedy=near_matches(name, list(_LOSSES))
        )
    return compute(margin.double(), beta)


def _sigmoid(margin: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    return -logsigmoid(beta * margin), -beta * (-beta * margin).sigmoid()


def _hinge(margin: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    rest = 1 - beta * margin
    return rest.clamp(min=0.0), -beta * (rest > 0).double()


def _ipo(margin: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    rest = margin - 1 / (2 * beta)
    return rest.square(), 2 * rest


_LOSSES: dict[str, Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLoss:
    """The sum ``Σ_t coefficient_t x_t`` of the log-probs or the values x.

    The batch's field ``coefficient`` carries the slopes. ``loss_weight`` says which tokens carry
    loss at all, and is not a factor.
    """

    output: Output = "log_probs"

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        return (self.output,)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum, without metrics, because those of the pairs are known beforehand."""
        given = outputs.log_probs if self.output == "log_probs" else outputs.values
        assert given is not None
        weight = batch.loss_weight
        terms = where_counted(batch["coefficient"], weight) * where_counted(given, weight)
        return LossOutput(loss=terms.sum())

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """Return the derivative by each log-prob, which is known beforehand: ``[T]``."""
        if self.output != "log_probs":
            return None
        return where_counted(batch["coefficient"], batch.loss_weight)
