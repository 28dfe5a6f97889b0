"""The distance of the engine's log-probs from the rollout's, as sums over ranks and micro-batches.

Both are log-probs of the sampled tokens, at the rollout's temperature and of the same weights: in
exact arithmetic they are equal. Let q be the rollout's probability of a token, p the engine's, Δ =
log p - log q and r = p / q; tokens were drawn from q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine_api.batch import Batch
from engine_api.losses import LossFn, coefficients_of, needs_of
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.algorithms.correction import Ratios, correct, effective_size, ratios
from engine_trainer.algorithms.losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    from engine_trainer.config import CorrectionSection

PREFIX = "mismatch_"


def mismatch_sums(
    given: Ratios, engine: torch.Tensor, rollout: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the sums for ``mismatch_figures``, scalars named ``mismatch_…``.

    Sums over sequences are over the sequences that count.

    Args:
        given: ``ratios(engine, rollout, mask, cu_seqlens)``.
        engine, rollout: ``[T]`` log-probs.
    """
    delta = given.log
    counted = given.counted
    sequences = given.counts > 0
    clamped = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # The mean negative log-prob of a sequence, whose exponential is the perplexity.
    engine_nll, rollout_nll = (
        -given.per_document(x) / given.counts.clamp(min=1.0) for x in (engine.detach(), rollout)
    )
    tokens = {
        "tokens": counted,
        "k1": -delta,
        "k3": clamped.expm1() - clamped,
        "square": delta.square(),
        "mult_error": clamped.abs().exp(),
        "ratio": given.token,
        "ratio_square": given.token.square(),
    }
    wholes = {
        "sequences": sequences,
        "sequence_ratio": given.sequence,
        "sequence_ratio_square": given.sequence.square(),
        "engine_ppl": _exp(engine_nll),
        "rollout_ppl": _exp(rollout_nll),
        "ppl_ratio": _exp(engine_nll - rollout_nll),
    }
    sums = {name: (value * counted).sum() for name, value in tokens.items()}
    sums |= {name: (value * sequences).sum() for name, value in wholes.items()}
    return {PREFIX + name: value for name, value in sums.items()}


def mismatch_figures(sums: Mapping[str, float], largest: Sequence[float]) -> dict[str, float]:
    """Return ``mismatch/…`` from sums over all ranks and the ranks' largest |Δ|.

    It is empty where nothing counts.

    Over tokens: ``kl_k1`` (mean of -Δ) and ``kl_k3`` (mean of r - 1 - log r), both estimates of
    KL(rollout ‖ engine) in nats (Schulman 2020, "Approximating KL divergence"); ``rms`` and ``max``
    of Δ, nats; ``token_mult_prob_error`` (mean of exp(|Δ|), NeMo-RL's; 1 is perfect);
    ``chi2_token`` (mean of r², less 1; E_q[(p/q)²] - 1 is χ²(p ‖ q)); ``ess_token`` (Kish's
    effective sample size of the bare ratios, as a fraction).

    Over sequences, with the product of the ratios: ``chi2_sequence``, ``ess_sequence``; and the
    means of ``ppl_engine``, ``ppl_rollout`` and ``ppl_ratio`` (engine over rollout, per sequence).
    """
    given = {
        name.removeprefix(PREFIX): value for name, value in sums.items() if name.startswith(PREFIX)
    }
    n = given.get("tokens", 0.0)
    s = given.get("sequences", 0.0)
    if not n:
        return {}
    figures = {
        "kl_k1": given["k1"] / n,
        "kl_k3": given["k3"] / n,
        "rms": math.sqrt(given["square"] / n),
        "max": max(largest),
        "token_mult_prob_error": given["mult_error"] / n,
        "chi2_token": given["ratio_square"] / n - 1,
        "chi2_sequence": given["sequence_ratio_square"] / s - 1,
        "ess_token": effective_size(given["ratio"], given["ratio_square"], n),
        "ess_sequence": effective_size(given["sequence_ratio"], given["sequence_ratio_square"], s),
        "ppl_engine": given["engine_ppl"] / s,
        "ppl_rollout": given["rollout_ppl"] / s,
        "ppl_ratio": given["ppl_ratio"] / s,
    }
    return {f"mismatch/{name}": value for name, value in figures.items()}


def largest_of(given: Ratios) -> float:
    """Return the largest |Δ| in nats, which is not a sum and hence no metric of a loss."""
    return float(given.log.abs().max()) if given.log.numel() else 0.0


class MismatchWatch:
    """A loss that adds ``mismatch_sums`` to the metrics of the loss that it wraps.

    The sums are over its own log-probs and the fields ``rollout_log_probs`` and ``mask``. It is for
    the first update, where the engine's log-probs were not computed beforehand: without dropout
    those of the update's own forward pass are the same. With ``correction`` the loss is also
    corrected by them, see ``apply``.
    """

    def __init__(self, loss: LossFn, correction: CorrectionSection | None = None) -> None:
        self._loss = loss
        self._correction = correction if correction is not None and correction.enabled else None
        self.needs = needs_of(loss)
        # Read where the loss needs a divergence (``engine_api.distillation``).
        self.teaching = getattr(loss, "teaching", None)
        # On the device: to read it at each micro-batch would be to wait for the device each time.
        self._largest: torch.Tensor | None = None

    @property
    def observed(self) -> float:
        """The largest |Δ| on this rank so far, in nats (see ``Trained``)."""
        return 0.0 if self._largest is None else float(self._largest)

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """Return the wrapped loss's coefficients, or None with a correction.

        With a correction they depend on the log-probs.
        """
        return coefficients_of(self._loss, batch) if self._correction is None else None

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the wrapped loss with the additional metrics."""
        assert outputs.log_probs is not None
        engine = outputs.log_probs.detach()
        rollout = batch["rollout_log_probs"]
        given = ratios(engine, rollout, batch["mask"], batch.cu_seqlens)
        if given.log.numel():
            # Together, so that a NaN stays one.
            before = [] if self._largest is None else [self._largest]
            self._largest = torch.stack([given.log.abs().max(), *before]).max()
        sums = mismatch_sums(given, engine, rollout)
        if self._correction is not None:
            batch, corrected = apply(batch, given, self._correction)
            sums |= corrected
        result = self._loss(outputs, batch)
        return LossOutput(loss=result.loss, metrics={**result.metrics, **sums})


def apply(
    batch: Batch, given: Ratios, section: CorrectionSection
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """Return ``batch`` with its rollout corrected, and the sums for ``correction_figures``."""
    result = correct(given, section)
    corrected = batch.with_computed(
        correction=result.weights, loss_weight=batch.loss_weight * result.kept
    )
    return corrected, result.sums


def _exp(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
