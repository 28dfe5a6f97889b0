"""Scales of an FP8 cache of keys and values, computed from one forward pass on fixed tokens.

A scale is one number for all queries, keys or values of a layer. It is a power of two, so that it
shifts exponents and rounds nothing: e4m3 keeps 3 bits of any number between 2⁻⁶ and 448, and all
that a scale has to do is put the layer's numbers into that range. ``HEADROOM`` leaves room for
numbers that are larger than those of the fixed tokens; larger ones still are cut off at 448.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class _Seen:
    """Largest magnitudes of one layer so far, and the number of its tokens."""

    largest: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tokens: int = 0

    def add(self, kind: str, numbers: Tensor) -> None:
        found = numbers.detach().float().abs().amax()
        before = self.largest.get(kind)
        self.largest[kind] = found if before is None else torch.maximum(before, found)


class CacheScales:
    """Scales of a model's attention layers, which have vLLM's attributes.

    A layer has the buffers ``_q_scale``, ``_k_scale`` and ``_v_scale``, the same numbers on the
    host (``_k_scale_float``, and ``_k_scale_cpu`` where the version has it), and an ``impl`` that
    computes it.

    Args:
        layers: the layers with a cache, by name.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = dict(layers)
        self._seen: dict[str, _Seen] = {}

    def observe(self) -> None:
        """Note the numbers of the next forward passes, with scales that suit any weights."""
        self.forget()
        for name, layer in self._layers.items():
            for kind in KINDS:
                _set(layer, kind, NEUTRAL)
            self._seen[name] = _Seen()
            _watch(layer, self._seen[name])

    def compute(self, tokens: int) -> dict[str, float]:
        """Set the scales from the passes since ``observe``, which had ``tokens`` tokens.

        Returns:
            The scales by layer and kind, such as ``model.layers.0.self_attn.attn.k``.

        Raises:
            RolloutError: a layer was computed for other tokens, or its numbers are not finite.
        """
        seen = self._seen
        self.forget()
        scales: dict[str, float] = {}
        for name in self._layers:
            found = seen.get(name, _Seen())
            if found.tokens != tokens:
                raise RolloutError(
                    f"expected {tokens} tokens in {name}, got {found.tokens}",
                    where=WHERE,
                    why="scales are computed from a pass on fixed tokens, which the layer was not "
                    "or only partly seen in",
                    remedy="rollout.options.enforce_eager=true, or "
                    "rollout.options.kv_cache_dtype=auto",
                )
            for kind, value in found.largest.items():
                largest = float(value)
                if not math.isfinite(largest):
                    raise RolloutError(
                        f"expected finite numbers in {name}, got {largest} in {kind}",
                        where=WHERE,
                        why="the served model computes numbers that are not finite",
                        remedy="check the run's losses and gradient norms before this sync",
                    )
                scales[f"{name}.{kind}"] = scale_of(largest)
        for name, layer in self._layers.items():
            for kind in KINDS:
                _set(layer, kind, scales[f"{name}.{kind}"])
        return scales

    def forget(self) -> None:
        """Stop noting numbers (idempotent)."""
        for layer in self._layers.values():
            # The method of its class again.
            vars(layer.impl).pop("forward", None)
        self._seen = {}

    def served(self) -> Iterator[tuple[str, float]]:
        """Yield the scales in use by layer and kind, as the kernels read them."""
        for name, layer in self._layers.items():
            for kind in KINDS:
                yield f"{name}.{kind}", float(getattr(layer, f"_{kind}_scale"))


def _watch(layer: Any, seen: _Seen) -> None:
    forward = layer.impl.forward

    def watched(
        owner: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        # None: vLLM measures its memory. Rows behind the tokens are padding.
        if attn_metadata is not None:
            number = int(attn_metadata.num_actual_tokens)
            quantized = query.dtype == torch.float8_e4m3fn
            queries = query[:number].float()
            seen.add("q", queries * owner._q_scale if quantized else queries)  # noqa: SLF001
            seen.add("k", key[:number])
            seen.add("v", value[:number])
            seen.tokens += number
        return forward(owner, query, key, value, kv_cache, attn_metadata, *rest, **named)

    layer.impl.forward = watched


def _set(layer: Any, kind: str, scale: float) -> None:
    # In place: CUDA graphs read the buffers, and other kernels numbers on the host.
    getattr(layer, f"_{kind}_scale").fill_(scale)
    setattr(layer, f"_{kind}_scale_float", scale)
    on_host = getattr(layer, f"_{kind}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(scale)
