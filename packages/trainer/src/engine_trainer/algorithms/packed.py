"""Documents inside a packed batch, with the document of each token and sums by document."""

from __future__ import annotations

import torch


def document_of(cu_seqlens: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return the document of each token, ``[T]`` int64, from the boundaries ``[D+1]``.

    Empty documents have no token. With ``values`` ``[T]`` it is on their device, which is not
    waited for: their number says how many tokens there are.
    """
    device = cu_seqlens.device if values is None else values.device
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(device)
    return torch.repeat_interleave(
        torch.arange(len(lengths), device=device),
        lengths,
        output_size=None if values is None else len(values),
    )


def sum_by_document(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` ``[T]`` over each document: ``[D]`` in their dtype.

    It is differentiable.
    """
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, document_of(cu_seqlens, values), values)
