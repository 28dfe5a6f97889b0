"""What stands in Megatron's layer spec where Transformer Engine is absent: norms, and attention over packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of packed documents, with their lengths on the CPU."""

    lengths: tuple[int, ...] = ()


def build_packing(lengths: list[int], device: torch.device) -> Packing:
    """The packing of documents of these lengths, one after the other; Megatron's RoPE reads it as well."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return Packing(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest,
                   lengths=tuple(lengths))  # fmt: skip


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) that may run on this rank's tokens alone.

    Megatron's own wrapper of torch's norm refuses sequence parallelism, though all that it takes is to say so on the
    weight: its gradient is then summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden_size]``."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(nn.Module):
    """PyTorch's scaled-dot-product attention, document by document: no token meets another document's.

    It costs one call a document and layer; nothing is computed across documents, and nothing is padded.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.width = config.kv_channels

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, /, *,
        packed_seq_params: Packing, **_: Any,
    ) -> Tensor:  # fmt: skip
        """``[T, heads, d]`` queries and ``[T, groups, d]`` keys and values → ``[T, heads · d]``."""
        assert attention_mask is None, "the packing says who sees whom"
        heads = [x.transpose(0, 1) for x in (query, key, value)]
        parts = zip(*(x.split(packed_seq_params.lengths, dim=1) for x in heads), strict=True)
        out = [F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=self.scale, enable_gqa=True)
               for q, k, v in parts]  # fmt: skip
        return torch.cat(out, dim=2)[0].transpose(0, 1).reshape(query.shape[0], -1)
