"""How far the engine's log-probs are from the rollout's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine_api.batch import Batch
from engine_api.losses import LossFn, coefficients_of, needs_of
from engine_api.results import LossOutput, TokenOutputs, TrainOutput


class MismatchWatch:
    """A loss that also measures how far the engine's log-probs are from the rollout's (field ``rollout_log_probs``).

    The same weights give other log-probs in another implementation; where they are far apart, the ratio lies.
    """

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss
        self.needs = needs_of(loss)
        self._largest = torch.zeros(())

    @property
    def largest(self) -> float:
        """The largest difference on this rank so far, nats; not a sum, hence no metric of a loss."""
        return float(self._largest)

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """The wrapped loss's."""
        return coefficients_of(self._loss, batch)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """The wrapped loss, with sums over tokens: ``mismatch_square``, ``mismatch_kl`` (rollout ‖ engine, k3)."""
        assert outputs.log_probs is not None
        result = self._loss(outputs, batch)
        delta = (outputs.log_probs.detach() - batch["rollout_log_probs"]) * (batch.loss_weight > 0)
        self._largest = torch.maximum(self._largest.to(delta.device), delta.abs().max())
        sums = {"mismatch_square": delta.square().sum(), "mismatch_kl": (delta.expm1() - delta).sum()}
        return LossOutput(loss=result.loss, metrics={**result.metrics, **sums})

    @staticmethod
    def figures(outputs: Sequence[TrainOutput], largest: Sequence[float]) -> dict[str, float]:
        """``mismatch/rms``, ``mismatch/max`` (nats) and ``mismatch/kl`` of the first update."""
        sums = outputs[0].metrics if outputs else {}
        tokens = sums.get("tokens", 0.0)
        if not tokens:
            return {}
        return {"mismatch/rms": math.sqrt(sums["mismatch_square"] / tokens), "mismatch/max": max(largest),
                "mismatch/kl": sums["mismatch_kl"] / tokens}  # fmt: skip
