"""Norms and attention over packed documents for Megatron's local layer spec.

Both layer specs read the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from engine_api.balance import Balance
from engine_api.devices import move_tensor
from engine_megatron.context import (
    ContextShard,
    Scores,
    attend,
    attend_chunks,
    gather_documents,
)


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of packed documents, with their lengths on the CPU."""

    lengths: tuple[int, ...] = ()
    """Lengths of the whole documents, also where context-parallel ranks divide them."""

    shard: ContextShard | None = None
    """This rank's tokens under context parallelism. None means that all tokens are on this rank."""

    experts: Tensor | None = None
    """``[n, L, k]`` int64: the experts to replay for the tokens that this rank's routers see."""

    balance: Balance | None = None
    """The balance loss that the routers add. None means that there is none."""


def build_packing(
    lengths: Sequence[int],
    device: torch.device,
    shard: ContextShard | None = None,
    *,
    longest: int = 0,
    experts: Tensor | None = None,
    balance: Balance | None = None,
) -> Packing:
    """Build the packing of successive documents of these lengths, which Megatron's RoPE reads too.

    ``longest`` is the length to state for the longest document; a smaller one has no effect.
    """
    ends = move_tensor(torch.tensor([0, *lengths]).cumsum(0).int(), device)
    longest = max(longest, *lengths)
    padded: dict[str, Any] = {}
    if shard is not None:
        # Transformer Engine wants padded ends under context parallelism. The same tensor says that
        # there is no padding between documents.
        padded = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        shard=shard,
        experts=experts,
        balance=balance,
        **padded,
    )


def steady_longest(lengths: Sequence[int], step: int) -> int:
    """Round the longest length up to ``step`` times a power of two.

    Kernels that are built for one longest length are then built a few times only.
    """
    need = -(-max(64, *lengths) // step)
    return step * (1 << (need - 1).bit_length())


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) that may run on this rank's tokens alone.

    Megatron's own wrapper of torch's norm refuses sequence parallelism, although a mark on the
    weight is enough: its gradient is then summed over the tensor-parallel ranks.
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
        """Normalize ``x``, ``[…, hidden_size]``, over its last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class WholeLinear(nn.Module):
    """A linear layer that is whole on every tensor-parallel rank, as are its outputs.

    Under sequence parallelism a rank computes its own tokens.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.accelerator.current_device_index()
        weight = torch.empty(width, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        # The gradient is then summed over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return ``[…, width]`` and no bias, as Megatron's layers do."""
        return F.linear(x, self.weight), None


class GatedSharedExperts(SharedExpertMLP):
    """Megatron's shared expert with its gate as a layer, which an adapter may be on."""

    def __init__(self, config: Any, submodules: Any, gate: bool, pg_collection: Any = None) -> None:
        assert gate, "a shared expert without a gate is Megatron's own"
        super().__init__(config, submodules, gate=False, pg_collection=pg_collection)
        self.gate = WholeLinear(config, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return ``[…, d]``, the expert's outputs times the sigmoid of the gate."""
        gate, _ = self.gate(hidden_states)
        out: Tensor = super().forward(hidden_states)
        return out * torch.sigmoid(gate)


class BiasedRows(RowParallelLinear):
    """Megatron's linear layer that splits inputs over ranks, with a bias in any configuration.

    Megatron's setting is about all linear layers of a model.
    """

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        del bias
        super().__init__(*args, bias=True, **kwargs)


class BiasedColumns(ColumnParallelLinear):
    """Megatron's linear layer that splits outputs over ranks, with a bias in any configuration."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        del bias
        super().__init__(*args, bias=True, **kwargs)


class ExpertRows(RowParallelLinear):
    """Megatron's linear layer for the outputs of experts with biases, which no ranks split.

    Megatron adds the biases in place, which autograd refuses for the result of a sum over ranks,
    even over a single one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The sum is then the token dispatcher's.
        self.explicit_expert_comm = True


class PackedAttention(nn.Module):
    """PyTorch's scaled-dot-product attention, document by document.

    It costs one call per document and layer (two under context parallelism, over gathered keys and
    values). No token attends to tokens of other documents, and nothing is padded. A sliding window
    in a longer document, and sinks, take a mask of the document.
    """

    softmax_offset: nn.Parameter | None
    """The sinks, ``[heads]``: scores of each head that take probability and give no value."""

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            # Megatron's window is the number of earlier tokens.
            self.window = config.window_size[0] + 1
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = (
                None if config.use_cpu_initialization else torch.accelerator.current_device_index()
            )
            sinks = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(sinks)

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
        """Attend with ``[T, heads, d]`` queries over ``[T, groups, d]`` keys, ``d'`` wide values.

        The result is ``[T, heads · d']``.
        """
        assert attention_mask is None, "the packing says which tokens attend to which"
        lengths = packed_seq_params.lengths
        shard = packed_seq_params.shard
        local_lengths = [n // shard.ranks for n in lengths] if shard else lengths
        queries = query.transpose(0, 1).split(local_lengths, dim=1)
        if shard:
            # One gather fetches the keys and values of all ranks.
            widths = [key.shape[-1], value.shape[-1]]
            both = gather_documents(torch.cat((key, value), dim=-1), shard)
            key, value = both.split(widths, dim=-1)
        keys, values = (x.transpose(0, 1).split(lengths, dim=1) for x in (key, value))
        out = [self._attend(*parts, shard) for parts in zip(queries, keys, values, strict=True)]
        return torch.cat(out, dim=1).transpose(0, 1).reshape(query.shape[0], -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, shard: ContextShard | None
    ) -> Tensor:
        """Attend within one document and return ``[heads, n, d']``."""
        score = Scores(scale=self.scale, window=self.window, sinks=self.softmax_offset)
        if shard:
            return attend_chunks(query, key, value, shard, score)
        return attend(query, key, value, score)
