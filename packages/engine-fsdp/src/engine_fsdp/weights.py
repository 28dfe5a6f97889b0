"""The table of parameters, and the reading of this rank's shards from a Hugging Face folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine_api.hf_folder import WeightFiles
from engine_api.hf_names import Piece
from engine_api.weights import ShardSpec
from engine_fsdp.parallel import Layout

log = logging.getLogger("engine_fsdp")


@dataclass(kw_only=True)
class ShardedParam:
    """One parameter of the model, sharded by rows over the layout's shard group."""

    name: str
    """Name under the wrapped model, with adapters' prefixes."""

    pieces: list[Piece]
    """Saved tensors that the parameter consists of."""

    param: nn.Parameter
    """The parameter itself."""

    first: int
    """Index of this rank's first row."""

    adapter: bool = False
    """True for a parameter of a low-rank adapter."""

    trainable: bool = True
    """True for a parameter that the optimizer updates."""

    _specs: list[ShardSpec] | None = None

    @property
    def local(self) -> Tensor:
        """The rows of this rank, in live memory."""
        return local_of(self.param)

    def specs(self, replica: int) -> list[ShardSpec]:
        """Return the box of this rank's part of each piece, computed once."""
        if self._specs is None:
            count = self.local.shape[0] if self.param.dim() else 0
            self._specs = [piece.spec(self.first, count, replica) for piece in self.pieces]
        return self._specs


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor (live memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(rows: int, layout: Layout) -> int:
    """Return this rank's first row, for chunks of ``ceil(rows / ranks)`` as in ``torch.chunk``."""
    return min(layout.shard_rank * math.ceil(rows / layout.shard_size), rows)


def parameter_table(
    root: nn.Module, pieces: dict[str, list[Piece]], layout: Layout
) -> list[ShardedParam]:
    """Return every parameter under ``root.lm`` in the model's order, with tied parameters once."""
    table: list[ShardedParam] = []
    for full_name, param in root.named_parameters():
        name = full_name.removeprefix("lm.")
        plain = name.replace(".base_layer.", ".").replace(".default.", ".")
        adapter = ".lora_" in name
        shape = tuple(param.shape)
        peft_name = f"base_model.model.{plain}"
        own = [Piece(name=peft_name, shape=shape)] if adapter else pieces[plain]
        first = first_row(shape[0], layout) if shape else 0
        table.append(
            ShardedParam(
                name=name,
                pieces=own,
                param=param,
                first=first,
                adapter=adapter,
                trainable=param.requires_grad,
            )
        )
    return table


def fill(table: list[ShardedParam], files: WeightFiles, seed: int) -> None:
    """Fill the shards from files that ``WeightFiles.check`` has accepted.

    A value head that is in no file is drawn from the seed.
    """
    for entry in (e for e in table if not e.adapter):
        rows = entry.local.shape[0] if entry.param.dim() else 0
        for piece in entry.pieces:
            if piece.name not in files:
                _draw_head(entry, seed)
                continue
            target = piece.view(entry.local.detach(), entry.first)
            if target.numel():
                target.copy_(files.read(piece.name, piece.spec(entry.first, rows, 0).slices))


def _draw_head(entry: ShardedParam, seed: int) -> None:
    """Draw a new value head, with its weight from normal(0, 0.02) and a zero bias.

    The values are the same in every layout.
    """
    log.warning("%s is not in the folder: a new one is made from seed %d", entry.name, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(entry.param.shape)
    if entry.name.endswith("bias"):
        whole = torch.zeros(shape)
    else:
        whole = torch.randn(shape, generator=generator) * 0.02
    rows = entry.local.shape[0]
    entry.local.detach().copy_(whole[entry.first : entry.first + rows])


def trainable(table: list[ShardedParam]) -> Iterator[ShardedParam]:
    """Yield the entries that the optimizer updates."""
    return (entry for entry in table if entry.trainable)
