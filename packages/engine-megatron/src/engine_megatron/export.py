"""Weight export under Hugging Face names: whole tensors in buckets, or this rank's boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.process_groups import all_gather
from engine_api.weights import ShardExport, ShardSpec, WeightExport, buckets
from engine_megatron.parallel import (
    Layout,
    Place,
    add_bits,
    experts_group,
    pipeline_group,
    tensor_group,
)
from engine_megatron.weights import Reader, Weight


def export_shards(table: Sequence[Weight], reader: Reader) -> ShardExport:
    """Yield (name, values of this rank's box, box) in the model's order.

    Masters that are spread over ranks are gathered before the first tensor, and each rank keeps its
    own part of them: ranks with copies then yield empty boxes. In the dtype of the computation
    nothing is gathered.
    """
    gathered = reader.read_together(table)
    for weight in table:
        if not weight.params or not reader.gathers(weight):
            yield weight.name, reader.read(weight), weight.box
        elif weight.name in gathered:
            yield weight.name, gathered.pop(weight.name), weight.box
        else:
            nothing = ShardSpec.nothing(weight.shape)
            empty = torch.empty(nothing.shape, dtype=reader.dtype_of(weight))
            yield weight.name, empty, nothing


def export_whole(
    table: Sequence[Weight], layout: Layout, reader: Reader, bucket_bytes: int, device: torch.device
) -> WeightExport:
    """Yield (name, whole tensor) in the model's order.

    One bucket of at most ``bucket_bytes``, or one larger tensor, exists at a time.
    """
    for bucket in buckets(
        table,
        bucket_bytes,
        size_of=lambda weight: math.prod(weight.shape) * reader.dtype_of(weight).itemsize,
        kind_of=lambda weight: (_stage(weight), reader.dtype_of(weight)),
    ):
        if layout.tensor == layout.stages == layout.experts == 1:
            yield from ((weight.name, reader.read(weight)) for weight in bucket)
        else:
            yield from _gather(bucket, layout, reader, device)


def _stage(weight: Weight) -> int:
    """Return the pipeline stage that an export takes a weight from."""
    return min(weight.parameters)


def _gather(
    bucket: list[Weight], layout: Layout, reader: Reader, device: torch.device
) -> WeightExport:
    """Gather a bucket over the ranks that divide its stage, and broadcast it to other stages."""
    stage = _stage(bucket[0])
    here = layout.here
    sizes = [math.prod(weight.shape) for weight in bucket]
    flat = torch.empty(sum(sizes), dtype=reader.dtype_of(bucket[0]), device=device)
    wholes = [
        part.view(weight.shape) for weight, part in zip(bucket, flat.split(sizes), strict=True)
    ]
    if here.stage == stage:
        # Within a bucket, all weights that are not of experts come first.
        reader.forget()
        _gather_stage(bucket, wholes, layout, reader)
    if layout.stages > 1:
        source = layout.rank_of(replace(here, stage=stage))
        dist.broadcast(flat, src=source, group=pipeline_group())
    yield from zip((weight.name for weight in bucket), wholes, strict=True)


def _gather_stage(
    bucket: list[Weight], wholes: list[Tensor], layout: Layout, reader: Reader
) -> None:
    """Fill ``wholes``, the whole tensors of a bucket, on the ranks of its stage."""
    split: list[tuple[Weight, Tensor]] = []
    experts: list[tuple[Weight, Tensor]] = []
    for weight, whole in zip(bucket, wholes, strict=True):
        if weight.is_of_experts and layout.experts * layout.expert_tensor > 1:
            experts.append((weight, whole))
        elif not weight.is_of_experts and weight.dim is not None and layout.tensor > 1:
            split.append((weight, whole))
        else:
            whole.copy_(reader.read(weight))
    if split:
        _gather_split(split, layout, reader)
    if experts:
        _gather_experts(experts, reader)


def _gather_experts(experts: list[tuple[Weight, Tensor]], reader: Reader) -> None:
    """Gather experts' weights by a sum over the ranks.

    Successive experts are on one rank, and an all-gather would need memory for as many per rank.
    """
    sizes = [whole.numel() for _, whole in experts]
    flat = experts[0][1].new_zeros(sum(sizes))
    for part, (weight, whole) in zip(flat.split(sizes), experts, strict=True):
        if weight.params:
            part.view(whole.shape)[weight.box.slices] = reader.read(weight)
    add_bits(flat, experts_group())
    for part, (_, whole) in zip(flat.split(sizes), experts, strict=True):
        whole.copy_(part.view(whole.shape))


def _gather_split(split: list[tuple[Weight, Tensor]], layout: Layout, reader: Reader) -> None:
    """Gather weights that are split over the tensor-parallel ranks, in one all-gather."""
    wholes = [whole for _, whole in split]
    # The last ranks' boxes may be shorter: the vocabulary's padding is not sent.
    sizes = [math.prod(weight.box_of(_at(layout, 0)).shape) for weight, _ in split]
    send = torch.zeros(sum(sizes), dtype=wholes[0].dtype, device=wholes[0].device)
    for part, (weight, _) in zip(send.split(sizes), split, strict=True):
        part[: math.prod(weight.box.shape)] = reader.read(weight).reshape(-1)
    received = send.new_empty(layout.tensor, len(send))
    all_gather(received.view(-1), send, tensor_group())
    for parts, (weight, whole) in zip(received.split(sizes, dim=1), split, strict=True):
        for rank, part in enumerate(parts):
            box = weight.box_of(_at(layout, rank))
            whole[box.slices] = part[: math.prod(box.shape)].view(box.shape)


def _at(layout: Layout, tensor: int) -> Place:
    """Return this rank's coordinates with the tensor-parallel rank ``tensor``."""
    return replace(layout.here, tensor=tensor)
