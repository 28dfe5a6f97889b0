"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): targets, names and first values."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_loopback.weights import Weight

# Prefix that PEFT puts before a module's name.
PREFIX = "base_model.model."


def adapter_shapes(
    lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A ``[rank, in]`` and B ``[out, rank]`` by PEFT's names.

    Raises:
        ConfigError: if the targets fit no layer, or one that is no projection inside a block.
    """
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    stems = [module for module in modules if is_target(module, lora.target_modules)]
    odd = [stem for stem in stems if not stem.endswith("_proj")]
    if odd or not stems:
        raise ConfigError(
            "lora.target_modules",
            f"{lora.target_modules!r} fits {odd[0] if odd else 'nothing'}",
            remedy="name projections inside the blocks, or all-linear",
        )
    result: dict[str, tuple[int, ...]] = {}
    for stem in stems:
        outputs, inputs = shapes[f"{stem}.weight"]
        result[f"{PREFIX}{stem}.lora_A.weight"] = (lora.rank, inputs)
        result[f"{PREFIX}{stem}.lora_B.weight"] = (outputs, lora.rank)
    return result


def is_target(module: str, targets: Iterable[str] | str) -> bool:
    """Return whether a module is adapted, by PEFT's rules.

    The targets are ``all-linear``, a pattern for the whole name, or a list of endings.
    """
    if targets == "all-linear":
        return module.endswith("_proj")
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def first_value(weight: Weight, seed: int) -> Tensor:
    """Return an adapter's first value, the same whole in every layout.

    A is uniform(±1/sqrt(inputs)), as in PEFT; B is zero.
    """
    if weight.name.endswith(".lora_B.weight"):
        return torch.zeros(weight.box.shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.name.encode()))
    whole = (torch.rand(weight.shape, generator=generator) * 2 - 1) / math.sqrt(weight.shape[1])
    return whole[weight.box.slices]


def pair_of(name: str, weights: Mapping[str, Weight]) -> tuple[Weight, Weight] | None:
    """Return the A and B of a base weight, or None if it has no adapter."""
    stem = f"{PREFIX}{name.removesuffix('.weight')}"
    a = weights.get(f"{stem}.lora_A.weight")
    b = weights.get(f"{stem}.lora_B.weight")
    return (a, b) if a is not None and b is not None else None
