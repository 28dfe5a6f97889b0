"""Names of the weights of CLIP-like vision towers, which vLLM and transformers nest differently.

Published models have a level ``vision_model`` between a SigLIP or CLIP tower and its parts, and so
has vLLM (0.26.0 and 0.32.0). transformers has none since 5.6 (huggingface/transformers#44431). It
writes the level for a model that it read with it, and not for one that was made from its
configuration (huggingface/transformers#45448). vLLM has no parameters for the shorter names.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

_LEVEL = "vision_model"


def find_towers(model: nn.Module) -> frozenset[str]:
    """Return the names of a served model's towers whose only part is ``vision_model``."""
    return frozenset(
        name
        for name, module in model.named_modules()
        if name and [child for child, _ in module.named_children()] == [_LEVEL]
    )


def add_level(name: str, towers: Collection[str]) -> str:
    """Return a weight's name in a checkpoint with the level that vLLM's towers have.

    A name that has the level, or is outside the towers, is returned as it is. A checkpoint may have
    ``model.`` before the name of a tower.
    """
    for tower in towers:
        for start in (f"{tower}.", f"model.{tower}."):
            if name.startswith(start) and not name.startswith(f"{start}{_LEVEL}."):
                return f"{start}{_LEVEL}.{name.removeprefix(start)}"
    return name
