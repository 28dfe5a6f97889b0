"""Pipeline stages as one autograd graph across ranks, so that ``backward`` runs on every stage.

Every stage gets the last one's outputs and computes the same loss of them. Only the last stage's
gradient is used; on all others ``backward`` waits for the gradient of the tensors that they sent.
One micro-batch is in flight at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_loopback.parallel import Layout


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x)
        layout.send(x, +1)
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.layout.receive(x, +1), torch.zeros_like(grads[0]), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, anchor: Tensor, layout: Layout) -> Tensor:
        del anchor
        ctx.layout = layout
        return layout.receive(like, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        ctx.layout.send(grads[0], -1)
        return None, grads[0].new_zeros((), dtype=torch.float32), None


class _FromLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, sent: Tensor, layout: Layout) -> Tensor:
        del sent
        ctx.last = layout.is_last
        return layout.broadcast_from_last(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        return grads[0] if ctx.last else None, grads[0].new_zeros(()), None


def _anchor(device: torch.device) -> Tensor:
    # A tensor that needs a gradient, so that autograd runs the node even if no weight before it is
    # trained.
    return torch.zeros((), device=device, requires_grad=True)


def receive(like: Tensor, layout: Layout) -> Tensor:
    """Receive the previous stage's hidden states.

    Backward sends their gradient back.
    """
    result: Tensor = _Receive.apply(like, _anchor(like.device), layout)  # type: ignore[no-untyped-call]
    return result


def send(x: Tensor, layout: Layout) -> Tensor:
    """Send hidden states to the next stage and return a scalar through which backward gets back."""
    result: Tensor = _Send.apply(x, _anchor(x.device), layout)  # type: ignore[no-untyped-call]
    return result


def from_last(outputs: Tensor, sent: Tensor, layout: Layout) -> Tensor:
    """Return the last stage's outputs on every stage."""
    result: Tensor = _FromLast.apply(outputs, sent, layout)  # type: ignore[no-untyped-call]
    return result
