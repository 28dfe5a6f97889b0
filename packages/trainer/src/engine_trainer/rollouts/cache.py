"""A key-value cache that is written in place.

transformers' ``DynamicLayer`` concatenates: each new token copies all keys and values. Here a
buffer of the final size is allocated once, and attention reads a view of its filled part.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from engine_api.errors import RolloutError


class BufferedLayer(DynamicLayer):
    """Keys and values of one layer, ``[rows, heads, capacity, head_dim]``.

    ``keys`` and ``values`` are views of the filled part.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._filled = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[rows, heads, new, head_dim]`` and return the whole filled part."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._allocate(key_states, value_states)
        start = self._filled
        self._filled = start + key_states.shape[-2]
        self._keys[:, :, start : self._filled] = key_states
        self._values[:, :, start : self._filled] = value_states
        return self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        rows = torch.arange(self._keys.shape[0], device=self._keys.device).repeat_interleave(
            repeats
        )
        self.batch_select_indices(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        keys = self._keys[indices, :, : self._filled]
        values = self._values[indices, :, : self._filled]
        self._allocate(keys, values)
        self._keys[:, :, : self._filled] = keys
        self._values[:, :, : self._filled] = values
        self._show()

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys = keys.new_empty((*keys.shape[:2], self._capacity, keys.shape[3]))
        self._values = values.new_empty((*values.shape[:2], self._capacity, values.shape[3]))

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = self._keys[:, :, : self._filled]
        self.values = self._values[:, :, : self._filled]
        return self.keys, self.values


def make_cache(config: PreTrainedConfig, capacity: int) -> Cache:
    """Return a cache for ``capacity`` tokens a row.

    Models with other than full attention get transformers' own cache.

    Raises ``RolloutError`` for a family whose state cannot be repeated row by row.
    """
    cache = DynamicCache(config=config)
    fixed = [layer for layer in cache.layers if not hasattr(layer, "batch_repeat_interleave")]
    if fixed:
        other = sorted({type(layer).__name__ for layer in fixed})
        raise RolloutError(
            f"a cache with {', '.join(other)} cannot be repeated for the completions of a prompt",
            where="rollout 'local'",
            why=f"{config.model_type} keeps a state in addition to keys and values",
            remedy="use another rollout for this model family",
        )
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        return Cache(layers=[BufferedLayer(capacity) for _ in cache.layers])
    return cache
