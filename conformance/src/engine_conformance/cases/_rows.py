"""The rows of logits that an engine makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_conformance.cases._case import must
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.seeds import cached_by_seed

__all__ = ["Rows", "require_bounded_rows", "two_chunks"]


class Rows(TorchDispatchMode):
    """Rows of logits that operations have made.

    Attributes:
        most: the most that one operation has made.
        live: the most that existed at a time, those that autograd keeps for the backward included.
    """

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self._vocab, self._hidden = vocab, hidden
        self.most = 0
        self.live = 0
        self._kept: dict[int, tuple[ref[UntypedStorage], int]] = {}

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
                    # By memory: views share it, and autograd keeps it in tensors of its own. torch
                    # keeps a storage's Python object for as long as its memory.
                    storage = one.untyped_storage()
                    self._kept[storage.data_ptr()] = (ref(storage), rows)
                    kept = self._kept.items()
                    self._kept = {at: held for at, held in kept if held[0]() is not None}
                    self.live = max(self.live, sum(count for _, count in self._kept.values()))
        return made


@cached_by_seed
def two_chunks(seed: int, world: int, chunk: int) -> PackedDocuments:
    """Return a document of two chunks for each rank."""
    return packed_documents(seed, (2 * chunk,) * world)


def require_bounded_rows(
    many: Sequence[tuple[int, int]], few: Sequence[tuple[int, int]], chunk: int
) -> None:
    """Require that logits exist a chunk at a time.

    Args:
        many: `Rows.most` and `Rows.live` of each rank, for a batch of many chunks.
        few: the same, for `two_chunks`.
        chunk: ``memory.logit_chunk``.
    """
    for rank, ((most, live), (_, base)) in enumerate(zip(many, few, strict=True)):
        where = f"rank {rank}"
        must(most <= chunk, "logits", f"of {most} tokens for a chunk of {chunk}", where=where)
        # Several tensors of a chunk's size may exist at a time: logits, probabilities, gradients.
        problem = f"{live} rows live at a time, {base} with two chunks alone: chunks are kept"
        must(live <= base + chunk, "logits", problem, where=where)
