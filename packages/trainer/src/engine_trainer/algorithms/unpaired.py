"""Losses over single completions that are labelled desirable or undesirable (KTO).

As with pairs (``engine_trainer.algorithms.preference``), a row's loss is a function of one sum over
its tokens, so that with the slope taken at the present weights the training pass is a linear sum
over tokens. The baseline of KTO is a number of the whole step, without a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine_trainer.algorithms.preference import check_losses
from engine_trainer.extensions.built_in import UNPAIRED_LOSSES


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Labelled completions, as a loss of such rows gets them.

    All tensors are ``[N]``, one number for each row, and float64 unless said otherwise.

    Attributes:
        log_probs: log-prob of the completion given its prompt, summed over its tokens; with a
            gradient.
        ref_log_probs: the same of the reference model.
        tokens: tokens of the completion that carry loss, at least 1.
        desirable: bool, the label.
        kl: ``log π / ref`` of completions of other rows given a row's prompt, in nats, as a mean
            over the step's rows on all ranks. It is the same for every row, may be below 0, and is
            0 for a loss with ``baseline=False``.
    """

    log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    tokens: torch.Tensor
    desirable: torch.Tensor
    kl: torch.Tensor

    @property
    def log_ratios(self) -> torch.Tensor:
        """``log π / ref`` of the completions, in nats."""
        return self.log_probs - self.ref_log_probs

    @property
    def signs(self) -> torch.Tensor:
        """1 for a desirable row, -1 for an undesirable one."""
        return 2.0 * self.desirable.double() - 1.0


@dataclass(frozen=True, kw_only=True)
class UnpairedObjective:
    """A loss of labelled rows with the weights of the labels, and its slope.

    Attributes:
        function: the loss of each row, ``LabelledRows`` → ``[N]``.
        name: its name in errors.
        beta: factor of the rewards in the metrics.
        desirable, undesirable: factors of the losses of rows with this label.
    """

    function: Callable[[LabelledRows], torch.Tensor]
    name: str
    beta: float
    desirable: float = 1.0
    undesirable: float = 1.0

    @staticmethod
    def named(
        name: str,
        beta: float,
        options: Mapping[str, Any] | None = None,
        *,
        desirable: float = 1.0,
        undesirable: float = 1.0,
    ) -> UnpairedObjective:
        """Return the objective of a built-in loss, an entry point, or ``file.py:function``.

        ``beta`` is an option of a loss that has a parameter of this name.
        """
        keys = {"beta": beta} if UNPAIRED_LOSSES.reads(name, "beta") else {}
        function = functools.partial(UNPAIRED_LOSSES.function(name), **keys, **(options or {}))
        return UnpairedObjective(
            function=function,
            name=name,
            beta=beta,
            desirable=desirable,
            undesirable=undesirable,
        )

    def __call__(self, rows: LabelledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted loss of each row and its derivative by ``log_probs``.

        Both are ``[N]`` float64. Raises ``ConfigError`` for a loss that returns no number a row.
        """
        with torch.enable_grad():
            leaves = replace(rows, log_probs=rows.log_probs.detach().requires_grad_())
            losses = check_losses(
                UNPAIRED_LOSSES,
                self.name,
                self.function(leaves),
                rows.log_probs.shape,
                remedy="compute it from rows.log_probs, element by element",
            )
            losses = losses * self._weights(rows)
            (slopes,) = torch.autograd.grad(
                losses.sum(), (leaves.log_probs,), materialize_grads=True
            )
        return losses.detach(), slopes

    def rewards(self, rows: LabelledRows) -> torch.Tensor:
        """Return the reward β log π / ref of each row, for metrics: ``[N]``."""
        return self.beta * rows.log_ratios

    def _weights(self, rows: LabelledRows) -> torch.Tensor:
        desirable = torch.full_like(rows.log_probs, self.desirable)
        return desirable.where(rows.desirable, self.undesirable)


# --- the built-in losses --------------------------------------------------------------------------


def kto(rows: LabelledRows, *, beta: float = 0.1) -> torch.Tensor:
    """Return 1 - σ(β (h - z)) of a desirable row and 1 - σ(β (z - h)) of an undesirable one.

    KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7, without the weights λ). h is the
    row's log-ratio, and z = max(0, ``rows.kl``) estimates KL(π ‖ ref).
    """
    return (-beta * rows.signs * (rows.log_ratios - rows.kl.clamp(min=0.0))).sigmoid()


def apo_zero_unpaired(rows: LabelledRows, *, beta: float = 0.1) -> torch.Tensor:
    """Return 1 - σ(β h) of a desirable row and σ(β h) of an undesirable one.

    The terms of APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7), as TRL takes them
    without pairs: KTO's loss with z = 0.
    """
    return (-beta * rows.signs * rows.log_ratios).sigmoid()
