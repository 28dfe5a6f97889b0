"""FP8 in the matrix products of torchtitan's blocks (``engine_torch.float8``)."""

from __future__ import annotations

from typing import Any

from engine_torch.float8 import check_sides, load_settings, refuse_experts
from engine_torchtitan.library import Decoder, Linear, load_float8_linear

__all__ = ["quantize_blocks"]


def quantize_blocks(tree: Decoder.Config, recipe: str, *, emulate: bool) -> None:
    """Let the linear layers of a tree's blocks compute in FP8.

    Raises ``ConfigError`` for a block with experts, whose products would stay in bfloat16, and for
    sizes that FP8 does not take.

    Args:
        tree: configuration of the model, which is changed.
        recipe: torchao's name of the scales.
        emulate: True rounds to FP8 and multiplies in another dtype, for devices without FP8.
    """
    linear_class, settings = _load(recipe, emulate)
    for index, block in enumerate(tree.layers):
        if block.moe is not None:
            refuse_experts()
        for name, found, parent, key in list(block.traverse(Linear.Config)):
            check_sides(f"layers.{index}.{name}", found.in_features, found.out_features)
            own = linear_class.Config(
                in_features=found.in_features,
                out_features=found.out_features,
                bias=found.bias,
                param_init=found.param_init,
                sharding_config=found.sharding_config,
                _torchao_config=settings,
            )
            if isinstance(parent, list):
                parent[key] = own
            else:
                setattr(parent, key, own)


def _load(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """Return torchtitan's linear layer in FP8, and torchao's settings of it."""
    settings = load_settings(recipe, emulate=emulate)
    return load_float8_linear(), settings
