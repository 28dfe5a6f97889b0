"""The balance loss of mixtures of experts (``engine_api.balance``) in Megatron's routers.

Megatron's own losses are means over a micro-batch, which change with the packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from engine_api.balance import Balance
from engine_api.errors import ConfigError
from engine_megatron.shape import Shape


def check_experts(shape: Shape) -> None:
    """Raise ``ConfigError`` for a balance loss of a model without experts."""
    if shape.mixture is None:
        raise ConfigError(
            "options.balance_loss",
            f"expected 0 for engine-megatron with {shape.family}",
            why="the model has no experts",
            remedy="set options.balance_loss: 0, or give a mixture of experts",
        )


@dataclass(kw_only=True, eq=False)
class StepBalance:
    """The balance loss of a training call, in its micro-batches.

    Attributes:
        coefficient: factor of the loss.
        total: number of tokens of the call, over all data-parallel ranks.
        micro_batches: the loss of each micro-batch that was packed on this rank.
    """

    coefficient: float
    total: int = 0
    micro_batches: list[Balance] = field(default_factory=list[Balance])

    def begin(self, total: int) -> None:
        """Forget the micro-batches before a call over ``total`` tokens."""
        self.total = total
        self.micro_batches.clear()

    def add(self, documents: Tensor, count: int, groups: list[Any]) -> Balance:
        """Return the loss of a micro-batch, whose arguments are those of ``Balance``."""
        part = Balance(
            coefficient=self.coefficient,
            documents=documents,
            count=count,
            total=self.total,
            groups=groups,
        )
        self.micro_batches.append(part)
        return part


def add_balance(layers: Mapping[int, Any], *, sigmoid: bool) -> None:
    """Let the layers with experts add the balance loss that their packing brings along.

    ``layers`` are given by their number in the model. A layer that is recomputed is called again
    with its packing, and so adds the same.
    """
    for number, layer in layers.items():
        if (router := getattr(layer.mlp, "router", None)) is not None:
            routed = _Router(number, router.routing, sigmoid)
            router.routing = routed.route
            layer.register_forward_pre_hook(_choose(routed), with_kwargs=True)


class _Router:
    """The routing of a layer, and the balance loss of the micro-batch that it computes."""

    def __init__(self, number: int, routing: Callable[..., Any], sigmoid: bool) -> None:
        self.number = number
        self.routing = routing
        self.sigmoid = sigmoid
        self.balance: Balance | None = None

    def route(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the weights ``[n, E]`` of a token's experts, and a mask of them."""
        weights, served = self.routing(logits, *args, **options)
        if self.balance is None:
            return weights, served
        flat = logits.reshape(served.shape)
        (added,) = self.balance.add(self.number, flat, served, [weights], sigmoid=self.sigmoid)
        return added, served


def _choose(router: _Router) -> Callable[..., None]:
    """Return a hook that gives a layer's router the loss of the packing that it is called with."""

    def choose(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        router.balance = arguments["packed_seq_params"].balance

    return choose
