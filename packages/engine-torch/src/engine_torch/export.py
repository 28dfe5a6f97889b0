"""Weight export under Hugging Face names, as whole tensors in buckets or as this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api.config import LoraConfig
from engine_api.contract import Adapter
from engine_api.process_groups import all_gather
from engine_api.weights import ShardExport, WeightExport, buckets
from engine_torch import lora as adapters
from engine_torch.weights import ShardedParam


def export_shards(
    table: list[ShardedParam],
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
) -> ShardExport:
    """Yield (name, shard, spec) in the model's order, with one shard in memory at a time."""
    local_values = _value_reader(table, lora, dtype, adapter)
    for entry in _exported(table, adapter):
        parts = entry.views(local_values(entry))
        for piece, part, spec in zip(entry.pieces, parts, entry.specs(), strict=True):
            yield piece.name, part, spec


def export_whole(
    table: list[ShardedParam],
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
    bucket_bytes: int,
    device: torch.device,
) -> WeightExport:
    """Yield (name, whole tensor) in the model's order, gathered in buckets.

    A bucket has at most ``bucket_bytes``, unless a single parameter has more. A parameter that is
    not sharded by rows is gathered alone, by torch.
    """
    local_values = _value_reader(table, lora, dtype, adapter)

    def dtype_of(entry: ShardedParam) -> torch.dtype:
        return dtype or entry.param.dtype

    for bucket in buckets(
        _exported(table, adapter),
        bucket_bytes,
        size_of=lambda entry: entry.param.numel() * dtype_of(entry).itemsize,
        kind_of=lambda entry: (dtype_of(entry), entry.row_group),
    ):
        yield from _gather([(entry, local_values(entry)) for entry in bucket], device)


def _exported(table: list[ShardedParam], adapter: Adapter) -> list[ShardedParam]:
    """Return the parameters of an export, in the model's order."""
    return [entry for entry in table if entry.adapter == (adapter == "only")]


def _value_reader(
    table: list[ShardedParam],
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    adapter: Adapter,
) -> Callable[[ShardedParam], Tensor]:
    """Return a function of this rank's part of a parameter, cast, and merged where requested.

    Adapters are gathered here, so that no collective runs between two tensors of an export.
    """
    deltas = adapters.deltas(table, lora) if adapter == "merged" else {}
    whole = _gather_by_name([part for a, b, _ in deltas.values() for part in (a, b)])

    def local_values(entry: ShardedParam) -> Tensor:
        local = entry.local.detach()
        if entry.name in deltas:
            a, b, scale = deltas[entry.name]
            rows, columns = entry.box.slices
            part = whole[a.name][:, columns], whole[b.name][rows]
            local = adapters.merged_rows(local, *part, scale)
        return local if dtype is None else local.to(dtype)

    return local_values


def _gather_by_name(entries: list[ShardedParam]) -> dict[str, Tensor]:
    """Return whole parameters of one piece each, by parameter name."""
    if not entries:
        return {}
    device = entries[0].local.device
    found: dict[str, Tensor] = {}
    for group in dict.fromkeys(entry.row_group for entry in entries):
        own = [entry for entry in entries if entry.row_group == group]
        gathered = _gather([(entry, entry.local.detach()) for entry in own], device)
        # A part that is gathered alone comes on the device of its mesh.
        pairs = zip(own, gathered, strict=True)
        found |= {entry.name: tensor.to(device) for entry, (_, tensor) in pairs}
    return found


def _gather(
    bucket: list[tuple[ShardedParam, Tensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the bucket's (name, whole tensor) pairs, gathered from ranks that share their rows.

    It is one all-gather, for which every rank's part is padded to the size of the first rank's.
    """
    group = bucket[0][0].row_group
    if group is None:
        for entry, local in bucket:
            yield from _split(entry, _gather_alone(entry, local.to(device)))
        return
    ranks = dist.get_world_size(group)
    if ranks == 1:
        for entry, rows in bucket:
            yield from _split(entry, rows.to(device))
        return
    pads = [-(-entry.param.shape[0] // ranks) for entry, _ in bucket]
    sizes = [pad * _row_size(entry) for pad, (entry, _) in zip(pads, bucket, strict=True)]
    send = torch.zeros(sum(sizes), dtype=bucket[0][1].dtype, device=device)
    for part, (_, rows) in zip(send.split(sizes), bucket, strict=True):
        part[: rows.numel()].copy_(rows.reshape(-1))
    receive = send.new_empty(ranks, send.numel())
    all_gather(receive.view(-1), send, group)
    for part, (entry, _) in zip(receive.split(sizes, dim=1), bucket, strict=True):
        whole = part.reshape(-1)[: entry.param.numel()].view(entry.param.shape)
        yield from _split(entry, whole)


def gather_parameter(entry: ShardedParam, device: torch.device) -> Tensor:
    """Return a whole parameter in its stored dtype, which all ranks that share it call together."""
    return _gather_alone(entry, entry.local.detach().to(device))


def _gather_alone(entry: ShardedParam, local: Tensor) -> Tensor:
    """Return the whole parameter, given this rank's part of it in any dtype."""
    param: Any = entry.param
    if not isinstance(param, DTensor):
        return local
    sharded = DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return sharded.full_tensor()


def _row_size(entry: ShardedParam) -> int:
    """Return the number of elements of one row."""
    return entry.param.numel() // entry.param.shape[0]


def _split(entry: ShardedParam, whole: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of each piece of a whole parameter."""
    for piece in entry.pieces:
        yield piece.name, piece.view(whole)
