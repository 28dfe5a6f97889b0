"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): which weights get one, under which names, and how it begins."""

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

PREFIX = "base_model.model."  # what PEFT puts before a module's name


def adapter_shapes(
    lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """PEFT's name → shape of the A ``[rank, in]`` and B ``[out, rank]`` of every adapted weight.

    Raises:
        ConfigError: when the targets fit no layer, or one that is no projection inside a block.
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
    """As PEFT decides: ``all-linear``, a pattern for the whole name, or a list of endings."""
    if isinstance(targets, str):
        return (
            module.endswith("_proj")
            if targets == "all-linear"
            else re.fullmatch(targets, module) is not None
        )
    return any(module == target or module.endswith(f".{target}") for target in targets)


def first_value(weight: Weight, seed: int) -> Tensor:
    """A from uniform(±1/sqrt(inputs)), as PEFT; B zero. A part of the same whole in every layout."""
    if weight.name.endswith(".lora_B.weight"):
        return torch.zeros(weight.box.shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.name.encode()))
    whole = (torch.rand(weight.shape, generator=generator) * 2 - 1) / math.sqrt(weight.shape[1])
    return whole[weight.box.slices]


def pair_of(name: str, weights: Mapping[str, Weight]) -> tuple[Weight, Weight] | None:
    """The A and B of a base weight, if it has an adapter."""
    stem = f"{PREFIX}{name.removesuffix('.weight')}"
    a, b = weights.get(f"{stem}.lora_A.weight"), weights.get(f"{stem}.lora_B.weight")
    return (a, b) if a is not None and b is not None else None
