"""Replayed selections of experts: a batch brings along the experts that served its tokens.

Only the selection is replaced. The experts' weights are what the router makes of its own scores, so
that it has a gradient as without replay (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.errors import UnsupportedCapability
from engine_api.hf_routers import Routing
from engine_megatron.shape import Shape


def routing_of(shape: Shape) -> Routing:
    """Return the layers and experts that a batch's field ``routed_experts`` is about.

    Raises ``UnsupportedCapability`` for a model without experts.
    """
    mixture = shape.mixture
    if mixture is None:
        raise UnsupportedCapability(
            "router_replay",
            where=f"engine-megatron with {shape.family}",
            why="the model has no experts",
            remedy="set rollout.routed_experts: off (router_replay: false for the engine)",
        )
    return Routing(
        layers=shape.layers,
        top_k=mixture.top_k,
        experts=mixture.experts,
        routed=frozenset(layer for layer, sparse in enumerate(mixture.sparse) if sparse),
    )


class Selection:
    """A router's selection, where Megatron's routers look for one to replay."""

    experts: Tensor | None = None
    """``[n, k]`` int64, by token of this rank the experts, or -1 for the router's own."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores ``[n, k]`` of the selected experts, and their numbers.

        ``scores`` are ``[n, experts]``, and ``compute`` selects by them.
        """
        own, indices = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return own, indices
        indices = torch.where(self.experts < 0, indices, self.experts)
        return scores.gather(1, indices), indices


def add_replay(layers: Mapping[int, Any]) -> None:
    """Let the layers with experts replay what their packing brings along.

    ``layers`` are given by their number in the model. A layer that is recomputed is called again
    with its packing, and so replays the same.
    """
    for number, layer in layers.items():
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router.router_replay = Selection()
            layer.register_forward_pre_hook(_choose(number, router.router_replay), with_kwargs=True)


def _choose(number: int, selection: Selection) -> Callable[..., None]:
    def choose(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        experts = arguments["packed_seq_params"].experts
        selection.experts = None if experts is None else experts[:, number]

    return choose
