"""Losses as sums, and how a caller builds token weights.

A loss function takes the per-token outputs and the batch that they belong to, and
returns a differentiable *sum* over those tokens, with metrics that are sums too.
The engine divides by one global denominator and only ever adds, so that loss,
gradient and update do not depend on ranks, micro-batches, packing or layout.

A loss that needs more than log-probs says so in an attribute ``needs``
(``("log_probs", "entropy")``, ``("values",)``); a plain function needs ``log_probs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.results import LossOutput, TokenOutputs

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class LossFn(Protocol):
    """A differentiable sum over the tokens that it is given."""

    def __call__(self, outputs: TokenOutputs, batch: Batch, /) -> LossOutput:
        """``outputs`` are aligned with ``batch``; both are of one micro-batch."""
        ...


def needs_of(loss: LossFn) -> tuple[str, ...]:
    """Which outputs ``loss`` wants to be computed."""
    return tuple(getattr(loss, "needs", ("log_probs",)))


def coefficients_of(loss: LossFn, batch: Batch) -> torch.Tensor | None:
    """``[T]``: the derivative of the loss by each log-prob, where the loss knows it before any forward; else None.

    An engine may form gradients in its forward pass with it, and may leave it unused. A loss that offers a method
    ``coefficients(batch)`` promises to be ``Σ_t c_t log p_t`` plus what does not depend on the weights.
    """
    method = getattr(loss, "coefficients", None)
    result: torch.Tensor | None = None if method is None else method(batch)
    return result


class SFTLoss:
    """Negative log-likelihood: ``-Σ_t w_t log p_t`` with ``w = batch.loss_weight``."""

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """The sum, with metrics ``nll`` and ``tokens``."""
        assert outputs.log_probs is not None
        weight = batch.loss_weight.to(outputs.log_probs.device)
        loss = -(weight * outputs.log_probs).sum()
        return LossOutput(loss=loss, metrics={"nll": loss.detach(), "tokens": weight.count_nonzero()})

    def coefficients(self, batch: Batch) -> torch.Tensor:
        """``[T]``: ``-w``."""
        return -batch.loss_weight


sft_loss = SFTLoss()


def token_weights(mask: torch.Tensor, cu_seqlens: torch.Tensor, mode: Aggregation) -> torch.Tensor:
    """The field's aggregation modes as weights on tokens, to be divided by their sum or by a caller's denominator.

    Args:
        mask: ``[T]``, 1 where a token counts.
        cu_seqlens: ``[D+1]`` document boundaries.
        mode: ``token-mean``: every token weighs the same (divide by Σ mask; DAPO, arXiv:2503.14476);
            ``seq-mean-token-sum``: the same weights (divide by the number of documents instead);
            ``seq-mean-token-mean``: each document weighs the same (GRPO, arXiv:2402.03300).

    Returns:
        ``[T]`` float32.
    """
    import torch

    mask = mask.float()
    if mode in ("token-mean", "seq-mean-token-sum"):
        return mask
    if mode != "seq-mean-token-mean":
        raise ConfigError("loss.aggregation", f"unknown mode {mode!r}",
                          remedy="token-mean, seq-mean-token-sum or seq-mean-token-mean")  # fmt: skip
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(mask.device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    counts = torch.zeros(len(lengths), device=mask.device).index_add_(0, document, mask)
    return mask / counts.clamp(min=1.0)[document]
