"""Documents inside a packed batch: which token is of which, and sums over each."""

from __future__ import annotations

import torch


def document_of(cu_seqlens: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """``[T]`` int64: the document that each token is of, from the boundaries ``[D+1]``; empty documents have no token."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(device or cu_seqlens.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sum_by_document(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``[D]``, in the dtype of ``values`` ``[T]``: the sum over each document; differentiable."""
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, document_of(cu_seqlens, values.device), values)
