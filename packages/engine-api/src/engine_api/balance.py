"""The balance loss of mixtures of experts, by document, added where a router has its scores.

It is the sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20). Of E
experts K serve each token. For a document of T tokens and an expert e, f is ``E / (K · T)`` times
the number of the tokens that e serves, and P the mean over the tokens of the router's normalized
score of e. The loss of a layer and a document is the sum of ``f · P`` over the experts, 1 where
they serve equally many tokens. It is added up over layers, and is the mean over the documents of a
step weighted by their tokens, prompts included. Padding is in no document.

The counts f are constants, so the loss is linear in the scores: each rank adds the terms of its own
tokens, with counts over all ranks that hold tokens of the same documents.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from engine_api.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from engine_api.config import EngineConfig

__all__ = ["BALANCE_LOSS", "Balance", "check_balance_loss", "check_balanced"]

BALANCE_LOSS = "balance_loss"
"""Name of the engines' option, and of the metric of a training call."""


def check_balance_loss(coefficient: float) -> None:
    """Raise ``ConfigError`` for a coefficient that is no finite number of at least 0."""
    if not 0 <= coefficient < math.inf:
        raise ConfigError(
            f"options.{BALANCE_LOSS}",
            f"expected a finite number of at least 0, got {coefficient}",
            remedy="give such a number, or 0 for no balance loss",
        )


def check_balanced(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for settings that exclude a balance loss."""
    if config.router_replay:
        raise ConfigError(
            f"options.{BALANCE_LOSS}",
            "expected 0 with router_replay: true",
            why="the loss is about the selection of the routers, which a replayed one is not",
            remedy=f"set options.{BALANCE_LOSS}: 0, or router_replay: false",
        )
    if config.memory.share_prefixes:
        raise ConfigError(
            f"options.{BALANCE_LOSS}",
            "expected 0 with memory.share_prefixes: true",
            why="the loss counts the tokens of each document, and documents share tokens there",
            remedy=f"set options.{BALANCE_LOSS}: 0, or memory.share_prefixes: false",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """The documents of a micro-batch, whose tokens the experts of each layer are to share.

    Attributes:
        coefficient: factor of the loss.
        documents: ``[n]`` int64, the document of each token that this rank's routers see, and
            ``count`` for padding.
        count: number of documents.
        total: number of tokens of the whole step, over all data-parallel ranks.
        groups: process groups that, one after the other, join the ranks with tokens of the same
            documents.
        losses: the loss without its factor, of this rank's tokens, by layer.
    """

    coefficient: float
    documents: torch.Tensor
    count: int
    total: int
    groups: Sequence[Any] = ()
    losses: dict[int, torch.Tensor] = field(default_factory=dict[int, Any])

    def add(
        self,
        layer: int,
        logits: torch.Tensor,
        served: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        *,
        sigmoid: bool,
    ) -> list[torch.Tensor]:
        """Return copies of a router's outputs whose backward pass also computes that of the loss.

        A layer that is computed again for its backward pass adds the same gradient, once.

        Args:
            layer: number of the router's layer.
            logits: ``[n, E]``, which the router's scores are made of.
            served: ``[n, E]`` bool, true where an expert serves a token.
            outputs: the floating-point outputs of the router, some of which reach the loss.
            sigmoid: true for scores that are sigmoids, false for a softmax.
        """
        loss = self._compute(logits, served, sigmoid=sigmoid)
        # By layer, because a layer that is computed again counts once.
        self.losses[layer] = loss.detach()
        if not loss.requires_grad:
            return list(outputs)
        return list(_joining()(self.coefficient * loss, *outputs))

    def _compute(
        self, logits: torch.Tensor, served: torch.Tensor, *, sigmoid: bool
    ) -> torch.Tensor:
        """Return the terms of this rank's tokens in the loss of one layer."""
        import torch
        import torch.distributed as dist

        scores = logits.float()
        if sigmoid:
            scores = scores.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        else:
            scores = scores.softmax(-1)
        with torch.no_grad():
            counts = scores.new_zeros(self.count + 1, scores.shape[-1])
            counts.index_add_(0, self.documents, served.to(counts.dtype))
            for group in self.groups:
                dist.all_reduce(counts, group=group)
            # All tokens have equally many experts, so the mean of the counts is K · T / E.
            loads = counts / counts.mean(-1, keepdim=True)
            # Without padding its row is 0 / 0.
            loads[self.count] = 0.0
        return (loads[self.documents] * scores).sum() / self.total

    def sum_losses(self) -> torch.Tensor:
        """Return the loss of the micro-batch's tokens over all layers, without its factor.

        All ranks that share the documents call it together.
        """
        import torch
        import torch.distributed as dist

        if not self.losses:
            return torch.zeros((), device=self.documents.device)
        loss = torch.stack(list(self.losses.values())).sum()
        for group in self.groups:
            dist.all_reduce(loss, group=group)
        return loss


@cache
def _joining() -> Any:
    """Return the function of a loss and tensors that gives copies of the tensors.

    The gradient of the loss is 1 once any of the copies has its own.
    """
    import torch

    class Joined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor, *tensors: torch.Tensor) -> Any:
            ctx.like = (loss.dtype, loss.device)
            # A copy that nothing uses needs no gradient of zeros.
            ctx.set_materialize_grads(False)
            return tuple(tensor.clone() for tensor in tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            dtype, device = ctx.like
            return (torch.ones((), dtype=dtype, device=device), *grads)

    joined: Any = Joined.apply  # pyright: ignore[reportUnknownVariableType]
    return joined
