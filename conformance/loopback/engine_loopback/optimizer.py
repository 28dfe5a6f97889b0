"""AdamW from the paper, any torch optimizer by path, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.config import OptimizerConfig
from engine_api.optimizers import TrainedWeight, construct, group_weights, optimizer_class

Group = dict[str, Any]


class AdamW(torch.optim.Optimizer):
    """Algorithm 2 of Loshchilov and Hutter 2019, arXiv:1711.05101.

    The decay is scaled by the learning rate, as in torch.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "losses are computed by the engine"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.adam_update(param, param.grad, self.state[param], group)

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        """Update one parameter: count, moments, decay, and the step along the corrected moments."""
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        state["step"] += 1
        self.moments(grad, state, group)
        param.copy_(self.decayed(param, group))
        first, second = self.corrected(state, group)
        param.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))

    def moments(self, grad: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """Update the running means of the gradient and of its square."""
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def corrected(self, state: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
        """Return the means without their bias towards zero."""
        beta1, beta2 = group["betas"]
        step = float(state["step"])
        return state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)

    def decayed(self, param: Tensor, group: Group) -> Tensor:
        """Return the parameter after decoupled weight decay."""
        return param * (1 - group["lr"] * group["weight_decay"])


def build_optimizer(
    config: OptimizerConfig, weights: Sequence[TrainedWeight], adamw: type[AdamW]
) -> torch.optim.Optimizer:
    """Build the configured optimizer over ``weights``, in its parameter groups.

    Raises:
        ConfigError: if the optimizer cannot be imported, or refuses its arguments.
    """
    # A rank may hold no weight that is trained, and torch refuses an empty list.
    groups = group_weights(config, weights) or [{"params": []}]
    if config.name != "adamw":
        return construct(optimizer_class(config.name), groups, config)
    return construct(adamw, groups, config, {"betas": config.betas, "eps": config.eps})


def state_fields(config: OptimizerConfig, adamw: type[AdamW]) -> set[str]:
    """Return the names of the optimizer's state per weight, seen on a step of a throwaway one."""
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.zeros_like(param)
    weight = TrainedWeight(tensor=param, name="weight", dims=2)
    optimizer = build_optimizer(config, [weight], adamw)
    optimizer.step()
    return set(optimizer.state[param])


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move moments to ``device``, or each to its parameter's device (None).

    Step counts stay where they are.
    """
    for param, state in optimizer.state.items():
        for field, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[field] = value.to(device or param.device)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients (Pascanu et al. 2013, arXiv:1211.5063).

    1e-6 is torch's guard against zero.
    """
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
