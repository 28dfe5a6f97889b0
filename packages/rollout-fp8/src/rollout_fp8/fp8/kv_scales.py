"""Scales of an FP8 cache of keys and values, computed from one forward pass on fixed tokens.

A scale is one number for all queries, keys or values of a layer. It is a power of two, so that it
shifts exponents and rounds nothing: e4m3 keeps 3 bits of any number between 2⁻⁶ and 448, and all
that a scale has to do is put the layer's numbers into that range. ``HEADROOM`` leaves room for
numbers that are larger than those of the fixed tokens; larger ones still are cut off at 448.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine_api.errors import RolloutError

WHERE = "FP8 cache"
# Number of tokens of the pass.
TOKENS = 512
# The largest number of the fixed tokens, times this, is still represented.
HEADROOM = 2.0
LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Scale during the pass, in which queries may already come quantized: it covers numbers up to 7168.
NEUTRAL = 16.0
KINDS = ("q", "k", "v")


def fixed_tokens(vocabulary: int, positions: int) -> list[int]:
    """Return the tokens of the pass, the same in every process and at every sync.

    Args:
        vocabulary: number of token ids.
        positions: largest number of tokens of a sequence, one of which is generated.
    """
    generator = torch.Generator().manual_seed(0)
    number = min(TOKENS, positions - 1)
    return torch.randint(vocabulary, (number,), generator=generator).tolist()


def scale_of(largest: float) -> float:
    """Return the scale for numbers whose largest magnitude among the fixed tokens is ``largest``.

    The scale of a layer without any other number than 0 is 1.
    """
    if largest == 0:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * HEADROOM / LARGEST))


class CacheLayer(Protocol):
    """An attention layer of a server, with a scale for its queries, keys and values each."""

    def observe(self, note: Callable[[str, Tensor], None]) -> None:
        """Call ``note`` in each forward pass with the numbers of each of ``KINDS``, by token."""
        ...

    def forget(self) -> None:
        """Stop calling ``note`` (idempotent)."""
        ...

    def set_scale(self, kind: str, scale: float) -> None:
        """Change a scale in the memory that the kernels read."""
        ...


@dataclass
class _Seen:
    """Largest magnitudes of one layer so far, and its number of tokens, by kind."""

    largest: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tokens: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, kind: str, numbers: Tensor) -> None:
        found = numbers.detach().float().abs().amax()
        before = self.largest.get(kind)
        self.largest[kind] = found if before is None else torch.maximum(before, found)
        self.tokens[kind] = self.tokens.get(kind, 0) + len(numbers)


class CacheScales:
    """Scales of the attention layers of one worker's model.

    Args:
        layers: the layers with a cache, by name.
    """

    def __init__(self, layers: Mapping[str, CacheLayer]) -> None:
        self._layers = dict(layers)
        self._seen: dict[str, _Seen] = {}

    def observe(self) -> None:
        """Note the numbers of the next forward passes, with scales that suit any weights."""
        self.forget()
        for name, layer in self._layers.items():
            for kind in KINDS:
                layer.set_scale(kind, NEUTRAL)
            self._seen[name] = _Seen()
            layer.observe(self._seen[name].note)

    def compute(self, tokens: int) -> dict[str, float]:
        """Set the scales from the passes since ``observe``, which had ``tokens`` tokens.

        Returns:
            The scales by layer and kind, such as ``model.layers.0.self_attn.attn.k``.

        Raises:
            RolloutError: a layer was computed for other tokens, or its numbers are not finite.
        """
        seen = self._seen
        self.forget()
        scales = {
            (name, kind): _scale(name, kind, seen.get(name, _Seen()), tokens)
            for name in self._layers
            for kind in KINDS
        }
        for (name, kind), scale in scales.items():
            self._layers[name].set_scale(kind, scale)
        return {f"{name}.{kind}": scale for (name, kind), scale in scales.items()}

    def forget(self) -> None:
        """Stop noting numbers (idempotent)."""
        for layer in self._layers.values():
            layer.forget()
        self._seen = {}


def _scale(name: str, kind: str, seen: _Seen, tokens: int) -> float:
    found = seen.tokens.get(kind, 0)
    if found != tokens:
        raise RolloutError(
            f"expected {tokens} tokens in {name}, got {found}",
            where=WHERE,
            why="scales are computed from a pass on fixed tokens, in which the layer was not seen, "
            "or only partly",
            remedy="rollout.options.enforce_eager=true, or rollout.options.kv_cache_dtype=auto",
        )
    largest = float(seen.largest[kind])
    if not math.isfinite(largest):
        raise RolloutError(
            f"expected finite numbers in {name}, got {largest} in {kind}",
            where=WHERE,
            why="the served model computes numbers that are not finite",
            remedy="check the run's losses and gradient norms before this sync",
        )
    return scale_of(largest)
