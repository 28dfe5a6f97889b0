"""Documents inside a packed batch, with the document of each token and sums by document."""

from __future__ import annotations

import torch


def document_of(cu_seqlens: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return the document of each token, ``[T]`` int64, from the boundaries ``[D+1]``.

    Empty documents have no token.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(device or cu_seqlens.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sum_by_document(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` ``[T]`` over each document: ``[D]`` in their dtype.

    It is differentiable.
    """
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, document_of(cu_seqlens, values.device), values)
