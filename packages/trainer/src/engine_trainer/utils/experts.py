"""The experts that served the tokens of a completion, from several generations or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def join_experts(earlier: torch.Tensor | None, later: torch.Tensor | None) -> torch.Tensor | None:
    """Return the experts of a conversation that a later generation has continued.

    Each token keeps the experts that served it first, which its log-prob depends on. The last token
    of a generation was no input yet, so that its experts come from the next one.

    Args:
        earlier: ``[t, L, k]`` integers, of the conversation so far, or None.
        later: ``[T, L, k]`` integers, of all of it with the tokens that were added, or None where
            the generation recorded nothing. T is larger than t.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    # Imported here, so that a wrong key is answered without loading torch.
    import torch

    known = len(earlier) - 1
    return torch.cat([earlier[:known], later[known:]])


def pad_experts(given: torch.Tensor | None, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return the experts ``[tokens, L, k]`` of a whole document, -1 where they are not known.

    Args:
        given: ``[t, L, k]`` integers of its first tokens, or None.
        tokens: number of tokens of the document.
        like: experts of any document, for layers, experts per token and dtype.
    """
    known = like[:0] if given is None else given[:tokens]
    import torch

    unknown = like.new_full((tokens - len(known), *like.shape[1:]), -1)
    return torch.cat([known, unknown])
