"""The experts that a server reports for each token, in the form of ``Completion``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_api.config import ModelSource
from engine_api.errors import RolloutError, UnsupportedCapability
from engine_api.hf_layers import count_experts
from engine_api.hf_routers import smallest_dtype
from rollout_fp8.model import config_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedLayers:
    """The table of layers and experts that a server reports for a model."""

    layers: int
    """Number of decoder layers."""

    top_k: int
    """Number of experts that serve a token in a layer."""

    experts: int
    """Number of experts in a layer."""

    def read(self, reported: Any, tokens: int, where: str) -> torch.Tensor:
        """Return the experts ``[tokens, L, k]``, the last token's -1 because it was no input.

        Args:
            reported: NumPy array ``[n, L, k]`` of the first n tokens, or None.
            tokens: number of tokens of prompt and completion.
            where: name of the rollout in errors.

        Raises:
            RolloutError: the server reports none, too few, or a table of another shape.
        """
        shape: tuple[int, ...] = () if reported is None else tuple(reported.shape)
        known = tokens - 1
        fits = shape[:1] >= (known,) and shape[1:] == (self.layers, self.top_k)
        if reported is None or not fits:
            raise RolloutError(
                f"expected experts of the shape ({known}, {self.layers}, {self.top_k}), "
                f"got {shape or 'none'}",
                where=where,
                why="the server did not record the experts of every token",
                remedy="rollout.routed_experts=off, or a version of the server that records them",
            )
        whole = torch.full(
            (tokens, self.layers, self.top_k), -1, dtype=smallest_dtype(self.experts)
        )
        whole[:known] = torch.from_numpy(reported[:known].astype("int16")).to(whole.dtype)
        return whole


def routed_layers(source: ModelSource) -> RoutedLayers:
    """Return the layers and experts of a model.

    Raises:
        UnsupportedCapability: the model has no experts.
    """
    text = config_of(source).get_text_config()
    experts = count_experts(text)
    top_k = getattr(text, "num_experts_per_tok", None)
    if not experts or not top_k:
        raise UnsupportedCapability(
            "router_replay",
            where=f"a rollout of {source.path}",
            why="its config.json names no experts",
            remedy="rollout.routed_experts=off",
        )
    return RoutedLayers(layers=int(text.num_hidden_layers), top_k=int(top_k), experts=experts)
