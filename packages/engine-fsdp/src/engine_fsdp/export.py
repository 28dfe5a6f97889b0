"""Weight export under Hugging Face names, as whole tensors in buckets or as this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine_api.config import LoraConfig
from engine_api.contract import Adapter
from engine_api.hf_names import views
from engine_api.process_groups import all_gather
from engine_api.weights import ShardExport, WeightExport, buckets
from engine_fsdp import lora as adapters
from engine_fsdp.parallel import Layout
from engine_fsdp.weights import ShardedParam


def export_shards(
    table: list[ShardedParam],
    layout: Layout,
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
) -> ShardExport:
    """Yield (name, shard, spec) in the model's order, with one shard in memory at a time."""
    rows_of = _row_reader(table, layout, lora, dtype, adapter)
    for entry in _exported(table, adapter):
        parts = views(entry.pieces, rows_of(entry), entry.first)
        for piece, part, spec in zip(entry.pieces, parts, entry.specs(layout.replica), strict=True):
            yield piece.name, part, spec


def export_whole(
    table: list[ShardedParam],
    layout: Layout,
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
    bucket_bytes: int,
    device: torch.device,
) -> WeightExport:
    """Yield (name, whole tensor) in the model's order, gathered in buckets.

    A bucket has at most ``bucket_bytes``, unless a single parameter has more.
    """
    rows_of = _row_reader(table, layout, lora, dtype, adapter)

    def dtype_of(entry: ShardedParam) -> torch.dtype:
        return dtype or entry.param.dtype

    for bucket in buckets(
        _exported(table, adapter),
        bucket_bytes,
        size_of=lambda entry: entry.param.numel() * dtype_of(entry).itemsize,
        kind_of=dtype_of,
    ):
        yield from _gather([(entry, rows_of(entry)) for entry in bucket], layout, device)


def _exported(table: list[ShardedParam], adapter: Adapter) -> list[ShardedParam]:
    """Return the parameters of an export, in the model's order."""
    return [entry for entry in table if entry.adapter == (adapter == "only")]


def _row_reader(
    table: list[ShardedParam],
    layout: Layout,
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
) -> Callable[[ShardedParam], Tensor]:
    """Return a function of this rank's rows of a parameter, cast, and merged where requested.

    Adapters are gathered here, so that no collective runs between two tensors of an export.
    """
    deltas = adapters.deltas(table, lora) if adapter == "merged" else {}
    whole = _gather_by_name([a for a, _, _ in deltas.values()], layout)

    def rows_of(entry: ShardedParam) -> Tensor:
        rows = entry.local.detach()
        if entry.name in deltas:
            a, b, scale = deltas[entry.name]
            rows = adapters.merged_rows(rows, whole[a.name], b.local.detach(), scale)
        return rows if dtype is None else rows.to(dtype)

    return rows_of


def _gather_by_name(entries: list[ShardedParam], layout: Layout) -> dict[str, Tensor]:
    """Return whole parameters of one piece each, by parameter name."""
    if not entries:
        return {}
    rows = [(entry, entry.local.detach()) for entry in entries]
    gathered = _gather(rows, layout, rows[0][1].device)
    return {entry.name: tensor for entry, (_, tensor) in zip(entries, gathered, strict=True)}


def _gather(
    bucket: list[tuple[ShardedParam, Tensor]], layout: Layout, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the bucket's (name, whole tensor) pairs after one all-gather.

    Every rank's part is padded to the size of the first rank's.
    """
    if layout.shard_size == 1:
        for entry, rows in bucket:
            yield from _split(entry, rows.to(device))
        return
    pads = [_padded_rows(entry, layout) for entry, _ in bucket]
    sizes = [pad * _row_size(entry) for pad, (entry, _) in zip(pads, bucket, strict=True)]
    send = torch.zeros(sum(sizes), dtype=bucket[0][1].dtype, device=device)
    for part, (_, rows) in zip(send.split(sizes), bucket, strict=True):
        part[: rows.numel()].copy_(rows.reshape(-1))
    receive = send.new_empty(layout.shard_size, send.numel())
    all_gather(receive.view(-1), send, layout.shard_group)
    for part, (entry, _) in zip(receive.split(sizes, dim=1), bucket, strict=True):
        whole = part.reshape(-1)[: entry.param.numel()].view(entry.param.shape)
        yield from _split(entry, whole)


def _padded_rows(entry: ShardedParam, layout: Layout) -> int:
    """Return the number of rows of the first rank's part, which is the largest."""
    rows = entry.param.shape[0]
    return -(-rows // layout.shard_size)


def _row_size(entry: ShardedParam) -> int:
    """Return the number of elements of one row."""
    return entry.param.numel() // entry.param.shape[0]


def _split(entry: ShardedParam, whole: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of each piece of a whole parameter."""
    for piece in entry.pieces:
        yield piece.name, piece.view(whole)
