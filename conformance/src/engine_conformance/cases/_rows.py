"""The rows of logits that an engine makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Rows"]


class Rows(TorchDispatchMode):
    """The most rows of logits that an operation has made."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self._vocab, self._hidden = vocab, hidden
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and self._vocab in one.shape:
                rows = one.numel() // self._vocab
                # The head's own weight and its gradient have as many rows as a token has numbers.
                if rows != self._hidden:
                    self.most = max(self.most, rows)
        return made
