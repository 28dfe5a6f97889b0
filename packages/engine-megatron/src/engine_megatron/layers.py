"""What stands in Megatron's local layer spec: norms, and attention over packed documents. Both specs read the packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from engine_megatron.context import Share, attend, gather_documents


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of packed documents, with their lengths on the CPU, whole also where ranks share them."""

    lengths: tuple[int, ...] = ()
    share: Share | None = None  # None: all tokens are on this rank


def build_packing(
    lengths: Sequence[int], device: torch.device, share: Share | None = None, *, longest: int = 0
) -> Packing:
    """The packing of documents of these lengths, one after the other; Megatron's RoPE reads it as well.

    ``longest``: what to state as the longest document's length, at least it.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(longest, *lengths)
    # Transformer Engine wants padded ends under context parallelism; the same tensor says that nothing lies between.
    padded: dict[str, Any] = (
        {} if share is None else {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    )
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        share=share,
        **padded,
    )


def steady_longest(lengths: Sequence[int], step: int) -> int:
    """``step`` times a power of two: kernels that are built for a longest length are then built a few times only."""
    need = -(-max(64, *lengths) // step)
    return step * (1 << (need - 1).bit_length())


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) that may run on this rank's tokens alone.

    Megatron's own wrapper of torch's norm refuses sequence parallelism, though all that it takes is to say so on the
    weight: its gradient is then summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.accelerator.current_device_index()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden_size]``."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(nn.Module):
    """PyTorch's scaled-dot-product attention, document by document: no token meets another document's.

    It costs one call a document and layer (two under context parallelism, over gathered keys and values); nothing is
    computed across documents, and nothing is padded.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.width = config.kv_channels

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        /,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """``[T, heads, d]`` queries and ``[T, groups, d]`` keys and values → ``[T, heads · d]``."""
        assert attention_mask is None, "the packing says who sees whom"
        lengths, share = packed_seq_params.lengths, packed_seq_params.share
        queries = query.transpose(0, 1).split(
            [n // share.ranks for n in lengths] if share else lengths, dim=1
        )
        if share:  # keys and values of all ranks, in one gather
            key, value = gather_documents(torch.cat((key, value), dim=-1), share).chunk(2, dim=-1)
        keys, values = (x.transpose(0, 1).split(lengths, dim=1) for x in (key, value))
        out = [self._attend(*parts, share) for parts in zip(queries, keys, values, strict=True)]
        return torch.cat(out, dim=1).transpose(0, 1).reshape(query.shape[0], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, share: Share | None) -> Tensor:
        """One document: ``[heads, n, d]``."""
        if share:
            return attend(query, key, value, share, self.scale)
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=self.scale, enable_gqa=True
        )[0]
