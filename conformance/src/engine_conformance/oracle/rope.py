"""Rotary positions in float64: the frequencies of each kind that ``config.json`` may name.

A kind changes the frequencies of the default (Su et al. 2021, arXiv:2104.09864), and some
multiply queries and keys by one factor too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROPE_KINDS", "Rope", "rotate", "scores_scale"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotary positions of a model.

    ``parameters`` holds the further keys of the kind under the names of ``config.json``, and
    ``original`` is the context of pre-training in tokens, which several kinds start from.
    """

    kind: str
    theta: float
    head_dim: int
    max_position: int
    original: int
    parameters: Mapping[str, Any]

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return angles per position ``[H/2]`` and the factor of cosine and sine.

        ``length`` is that of the document in tokens, on which some kinds depend.
        """
        return ROPE_KINDS[self.kind](self, length)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary positions from 0 on to ``[heads, L, H]``.

    Hugging Face pairs dimension i with i + H/2, not with i + 1 as the paper does.
    """
    length = x.shape[-2]
    frequency, factor = rope.frequencies(length)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # [L, H/2]
    cos = factor * angle.cos()
    sin = factor * angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _exponents(rope: Rope) -> Tensor:
    half = rope.head_dim // 2
    return torch.arange(half, dtype=torch.float64) / half


def _default(rope: Rope, length: int) -> tuple[Tensor, float]:
    del length
    return rope.theta ** -_exponents(rope), 1.0


def _linear(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Position interpolation, Chen et al. 2023, arXiv:2306.15595, eq. 4."""
    frequency, factor = _default(rope, length)
    return frequency / rope.parameters["factor"], factor


def _dynamic(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Raise the base for documents beyond the context, as transformers' ``dynamic`` does."""
    longest = max(length, rope.max_position)
    factor = rope.parameters["factor"]
    stretch = factor * longest / rope.max_position - (factor - 1)
    theta = rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2))
    return theta ** -_exponents(rope), 1.0


def _yarn(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Interpolate by parts, Peng et al. 2023, arXiv:2309.00071, eqs. 17 to 22.

    The bounds of the ramp are rounded outwards unless ``truncate`` is false.
    """
    frequency, _ = _default(rope, length)
    given = rope.parameters
    factor = given["factor"]

    def dimension(rotations: float) -> float:
        """Return the dimension that turns this often over the original context."""
        turns = math.log(rope.original / (rotations * 2 * math.pi))
        return rope.head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    dimensions = torch.arange(len(frequency), dtype=torch.float64)
    ramp = ((dimensions - low) / (high - low or 0.001)).clamp(0, 1)
    mixed = ramp * frequency / factor + (1 - ramp) * frequency
    return mixed, _yarn_scale(given, factor)


def _yarn_scale(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if over and under:
        return _magnitude(factor, over) / _magnitude(factor, under)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def scores_scale(given: Mapping[str, Any]) -> float:
    """Return the factor by which DeepSeek's models multiply scores of attention under YaRN.

    ``given`` holds the keys of RoPE in ``config.json``. Without ``mscale_all_dim`` it is 1.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    weight = given.get("mscale_all_dim")
    if kind == "default" or not weight:
        return 1.0
    return _magnitude(given["factor"], weight) ** 2


def _longrope(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Scale each dimension by a factor that was searched for, Ding et al. 2024, arXiv:2402.13753.

    A document beyond the original context has other factors.
    """
    frequency, _ = _default(rope, length)
    given = rope.parameters
    factors = given["long_factor" if length > rope.original else "short_factor"]
    ratio = given.get("factor") or rope.max_position / rope.original
    scale = given.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(ratio) / math.log(rope.original)) if ratio > 1 else 1.0
    return frequency / torch.tensor(factors, dtype=torch.float64), float(scale)


def _llama3(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Divide low frequencies by ``factor``, with a linear passage, as Llama 3.1 does."""
    frequency, _ = _default(rope, length)
    given = rope.parameters
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = rope.original * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / given["factor"] + kept * frequency, 1.0


ROPE_KINDS: Mapping[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
