"""AdamW and global-norm clipping in float64, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "AdamWConfig",
    "AdamWState",
    "adamw_step",
    "clip_coefficient",
    "global_norm",
    "zero_state",
]


def _every(_name: str, _param: Tensor) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig:
    """AdamW's constants, with the defaults of ``torch.optim.AdamW``.

    ``decays(name, param)`` selects the parameters to which the weight decay applies:
    all by default, as in one parameter group; ``lambda name, p: p.ndim >= 2`` leaves
    out norms and biases. ``max_grad_norm`` clips the global norm before the update;
    None leaves gradients as they are.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    decays: Callable[[str, Tensor], bool] = _every


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWState:
    """Moments by parameter name, float64, and the number of updates so far."""

    step: int
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


def zero_state(params: Mapping[str, Tensor]) -> AdamWState:
    """Return the state before the first update."""
    return AdamWState(
        step=0,
        exp_avg={name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()},
        exp_avg_sq={name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()},
    )


def global_norm(grads: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of all gradients as one vector."""
    return math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients (Pascanu et al. 2013, arXiv:1211.5063, algorithm 1).

    The 1e-6 is PyTorch's guard against a norm of zero; engines share it, so the oracle
    does.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


@torch.no_grad()
def adamw_step(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: AdamWState,
    config: AdamWConfig,
    *,
    lr: float,
) -> tuple[dict[str, Tensor], AdamWState]:
    """Make one update after clipping, and return the new parameters and state.

    The update is algorithm 2 of Loshchilov and Hutter 2019, arXiv:1711.05101. As in
    PyTorch, the decoupled decay is scaled by the learning rate: ``p * (1 - lr *
    weight_decay)``. Nothing is changed in place.

    Raises:
        KeyError: if a parameter has no gradient.
    """
    scale = clip_coefficient(global_norm(grads), config.max_grad_norm)
    beta1, beta2 = config.betas
    step = state.step + 1
    new_params: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, param in params.items():
        grad = grads[name] * scale
        first[name] = beta1 * state.exp_avg[name] + (1 - beta1) * grad
        second[name] = beta2 * state.exp_avg_sq[name] + (1 - beta2) * grad.square()
        unbiased1 = first[name] / (1 - beta1**step)
        unbiased2 = second[name] / (1 - beta2**step)
        decay = lr * config.weight_decay if config.decays(name, param) else 0.0
        new_params[name] = param * (1 - decay) - lr * unbiased1 / (unbiased2.sqrt() + config.eps)
    return new_params, AdamWState(step=step, exp_avg=first, exp_avg_sq=second)
