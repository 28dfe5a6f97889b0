"""Losses as sums over tokens, and the token weights of the common aggregations.

A loss function takes the per-token outputs and the batch that they belong to, and returns a
differentiable *sum* over those tokens, with metrics that are sums too. The engine divides by one
global denominator and only ever adds, so that loss, gradient and update do not depend on ranks,
micro-batches, packing or layout.

A loss that needs more than log-probs says so in an attribute ``needs``
(``("log_probs", "entropy")``, ``("values",)``); a plain function needs ``log_probs``. One that
needs ``divergence`` has an attribute ``teaching`` (``engine_api.distillation``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

from engine_api.arguments import check_coefficients, check_loss_output
from engine_api.batch import Batch
from engine_api.errors import ConfigError, kind_of
from engine_api.results import LossOutput, TokenOutputs

if TYPE_CHECKING:
    import torch

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


class LossFn(Protocol):
    """A function that computes a differentiable sum over the tokens of a micro-batch."""

    def __call__(self, outputs: TokenOutputs, batch: Batch, /) -> LossOutput:
        """Return the sum over one micro-batch, whose ``outputs`` are aligned with ``batch``."""
        ...


def needs_of(loss: LossFn) -> tuple[str, ...]:
    """Return the names of the outputs that ``loss`` needs.

    Raises ``ConfigError`` if ``loss.needs`` is not a collection of names.
    """
    needs: object = getattr(loss, "needs", ("log_probs",))
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise ConfigError(
            "loss.needs",
            f"expected a tuple of names, got {needs!r:.100}",
            remedy='write ("log_probs",)',
        )
    names = tuple(cast("Iterable[object]", needs))
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                "loss.needs",
                f"expected a tuple of names, got {name!r:.100} in it",
                remedy='write ("log_probs",)',
            )
    return cast("tuple[str, ...]", names)


def coefficients_of(loss: LossFn, batch: Batch) -> torch.Tensor | None:
    """Return the derivative ``[T]`` of the loss with respect to each log-prob, or None.

    It is None where the loss does not know the derivative before the forward pass. An engine may
    form gradients in its forward pass with it, and may leave it unused. A loss that offers a method
    ``coefficients(batch)`` promises to be ``Σ_t c_t log p_t`` plus terms that do not depend on the
    weights.
    """
    method = getattr(loss, "coefficients", None)
    if method is not None and not callable(method):
        raise ConfigError(
            "loss.coefficients", f"expected a method, got {kind_of(method)}", remedy="take it out"
        )
    result = None if method is None else cast("torch.Tensor | None", method(batch))
    check_coefficients(result, batch.input_ids)
    return result


def evaluate(loss: LossFn, outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return the output of ``loss`` for a micro-batch.

    Raises ``ConfigError`` for an output that an engine cannot differentiate or add up.
    """
    result = loss(outputs, batch)
    check_loss_output(result)
    return result


class SFTLoss:
    """The negative log-likelihood ``-Σ_t w_t log p_t`` with ``w = batch.loss_weight``."""

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum, with the metrics ``nll`` and ``tokens``."""
        assert outputs.log_probs is not None
        weight = batch.loss_weight.to(outputs.log_probs.device)
        loss = -(weight * where_counted(outputs.log_probs, weight)).sum()
        return LossOutput(
            loss=loss, metrics={"nll": loss.detach(), "tokens": weight.count_nonzero()}
        )

    def coefficients(self, batch: Batch) -> torch.Tensor:
        """Return the derivative with respect to each log-prob, ``-w``, ``[T]``."""
        return -batch.loss_weight


sft_loss = SFTLoss()


def zero_loss(outputs: TokenOutputs) -> LossOutput:
    """Return a zero that depends on every output, and thereby on the weights.

    With it a rank takes part in the collectives of a backward pass to which it adds nothing.
    """
    sums = [tensor.sum() for tensor in outputs.tensors()]
    return LossOutput(loss=sum(sums[1:], start=sums[0]) * 0.0)


def where_counted(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``values`` where ``weight`` is above 0, and 0 elsewhere.

    The result is differentiable. A loss passes its inputs through this function before it
    multiplies them by weights. 0 · NaN and 0 · ∞ are NaN, so one such number at a token that
    carries no loss (of a prompt or of a tool's output) would make the loss of the whole batch NaN.
    """
    return values.where(weight > 0, 0.0)


def token_weights(mask: torch.Tensor, cu_seqlens: torch.Tensor, mode: Aggregation) -> torch.Tensor:
    """Return the token weights of an aggregation mode, for a sum that the caller divides.

    Args:
        mask: ``[T]``, 1 where a token counts.
        cu_seqlens: ``[D+1]`` document boundaries.
        mode: ``token-mean``: every token weighs the same (divide by Σ mask; DAPO,
            arXiv:2503.14476);
            ``seq-mean-token-sum``: the same weights (divide by the number of documents instead);
            ``seq-mean-token-sum-norm``: the same weights (divide by the number of documents times a
            constant length; Dr. GRPO, arXiv:2503.20783); ``seq-mean-token-mean``: each document
            weighs the same (GRPO, arXiv:2402.03300).

    Returns:
        ``[T]`` float32.
    """
    import torch

    mask = mask.float()
    if mode not in AGGREGATIONS:
        raise ConfigError(
            "loss.aggregation", f"unknown mode {mode!r}", remedy=f"one of {', '.join(AGGREGATIONS)}"
        )
    if mode != "seq-mean-token-mean":
        return mask
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(mask.device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    counts = torch.zeros(len(lengths), dtype=mask.dtype, device=mask.device)
    counts.index_add_(0, document, mask)
    return mask / counts.clamp(min=1.0)[document]
