"""The table of parameters, and the reading of this rank's shards from a Hugging Face folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_api.hf_folder import WeightFiles
from engine_api.hf_names import Piece, Views, float32_buffers
from engine_api.optimizers import TrainedWeight
from engine_api.weights import ShardSpec, random_weight
from engine_torch.boxes import Box, find_box, find_replica, find_row_group, local_of

__all__ = ["ShardedParam", "draw", "fill", "name_adapted", "parameter_table", "strip", "trainable"]

log = logging.getLogger("engine_torch")

# The module that torch puts around a block whose activations are recomputed.
_RECOMPUTED = "_checkpoint_wrapped_module."


@dataclass(kw_only=True)
class ShardedParam:
    """One parameter of the model, of which this rank holds a box."""

    name: str
    """Name in the model, with adapters' prefixes and without the wrapper of recomputed blocks."""

    pieces: list[Piece]
    """Saved tensors that the parameter consists of."""

    param: Tensor
    """The parameter itself, or a saved buffer's value in the dtype of the masters."""

    box: Box
    """The part of the parameter that this rank holds."""

    replica: int = 0
    """Number of this rank's copy of the box."""

    adapter: bool = False
    """True for a parameter of a low-rank adapter."""

    trainable: bool = True
    """True for a parameter that the optimizer updates."""

    part: str = ""
    """Part of the model, by its name in ``model.freeze`` and ``optimizer.part_lr``, or empty."""

    owner: nn.Module | None = None
    """Module that computes with a saved buffer, or None for a parameter."""

    copy: nn.Parameter | None = None
    """Parameter that the module computes with in place of ``param``, its master, or None.

    See ``engine_torch.copies``.
    """

    _specs: list[ShardSpec] | None = None
    _views: Views | None = None

    @property
    def local(self) -> Tensor:
        """The elements of this rank, in live memory."""
        return local_of(self.param)

    @property
    def row_group(self) -> Any:
        """The process group that shares the parameter's rows, or None (see ``find_row_group``)."""
        return find_row_group(self.param)

    def specs(self) -> list[ShardSpec]:
        """Return the box of this rank's part of each piece, computed once."""
        if self._specs is None:
            offset, shape = self.box.offset, self.box.shape
            self._specs = [piece.spec(offset, shape, self.replica) for piece in self.pieces]
        return self._specs

    def as_trained(self) -> TrainedWeight:
        """Return the parameter as the optimizer groups it.

        Pieces of one parameter are alike: all matrices, all biases or all norms.
        """
        piece = self.pieces[0]
        return TrainedWeight(
            tensor=self.param, name=piece.name, dims=len(piece.shape), part=self.part
        )

    @property
    def live(self) -> Tensor:
        """The parameter that the module computes with."""
        return self.param if self.copy is None else self.copy

    def publish(self) -> None:
        """Give the module that computes with a saved buffer or a copy its current value.

        Every other parameter is its own live memory.
        """
        # A copy without memory is made when the weights come back to the device.
        if self.copy is not None and self.copy.numel():
            self.copy.detach().copy_(self.param)
        if self.owner is not None:
            live = self.owner.get_buffer(self.name.rpartition(".")[2])
            live.copy_(self.param)

    def views(self, local: Tensor) -> list[Tensor]:
        """Return each piece's part of ``local``, a tensor of this rank's elements."""
        if self._views is None:
            self._views = Views(self.pieces, self.box.offset, self.box.shape)
        return self._views.of(local)


def parameter_table(
    lm: nn.Module,
    pieces: dict[str, list[Piece]],
    compute: torch.dtype | None = None,
    parts: Mapping[str, Iterable[nn.Module]] = MappingProxyType({}),
) -> list[ShardedParam]:
    """Return every parameter and saved buffer in the model's order, with tied parameters once.

    A saved buffer is whole on every rank. Its value is kept apart from the module that computes
    with it, which has it in ``compute`` unless transformers keeps it in float32.

    Args:
        lm: the model after sharding, with adapters if it has any.
        pieces: saved tensors by parameter or buffer name, without an adapter's or wrapper's prefix.
        compute: dtype of the computation, or None for that of the masters.
        parts: modules of each part of the model that has a name in ``optimizer.part_lr``.
    """
    part_of = {
        param: part
        for part, modules in parts.items()
        for module in modules
        for param in module.parameters()
    }
    table: list[ShardedParam] = []
    seen: set[Tensor] = set()
    kept = float32_buffers(lm)
    for path, module in lm.named_modules():
        prefix = strip(path)
        for name, param in module.named_parameters(prefix, recurse=False):
            if param not in seen:
                seen.add(param)
                part = part_of.get(param, "")
                table.append(_parameter_entry(name, param, pieces, part))
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if (own := pieces.get(_plain(name))) is not None:
                dtype = None if name in kept else compute
                table.append(_buffer_entry(name, buffer, own, module, dtype))
    return table


def strip(name: str) -> str:
    """Return the name of a module or parameter without the wrapper of recomputed blocks."""
    return name.replace(_RECOMPUTED, "").removesuffix(f".{_RECOMPUTED[:-1]}")


def name_adapted(name: str) -> str:
    """Return the saved model's name of a parameter, for one of an adapter of that which it adapts.

    Args:
        name: name in the model (``ShardedParam.name``).
    """
    return re.sub(r"\.lora_[AB]\.default\.", ".", name).replace(".base_layer.", ".")


def _plain(name: str) -> str:
    """Return the name of a parameter without an adapter's prefixes."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def _parameter_entry(
    name: str, param: nn.Parameter, pieces: dict[str, list[Piece]], part: str
) -> ShardedParam:
    plain = _plain(name)
    adapter = ".lora_" in name
    peft_name = f"base_model.model.{plain}"
    own = [Piece(name=peft_name, shape=tuple(param.shape))] if adapter else pieces[plain]
    return ShardedParam(
        name=name,
        pieces=own,
        param=param,
        box=find_box(param),
        replica=find_replica(param),
        adapter=adapter,
        trainable=param.requires_grad,
        part=part,
    )


def _buffer_entry(
    name: str, buffer: Tensor, pieces: list[Piece], owner: nn.Module, compute: torch.dtype | None
) -> ShardedParam:
    value = buffer.detach().clone()
    if compute is not None and value.dtype != compute:
        owner.register_buffer(name.rpartition(".")[2], value.to(compute))
    return ShardedParam(
        name=name,
        pieces=pieces,
        param=value,
        box=find_box(value),
        # Every rank holds all of it.
        replica=dist.get_rank() if dist.is_initialized() else 0,
        trainable=False,
        owner=owner,
    )


def fill(table: list[ShardedParam], files: WeightFiles, seed: int, std: float) -> None:
    """Fill the shards from files that ``WeightFiles.check`` has accepted.

    A value head that is in no file is drawn from the seed, with the standard deviation ``std``.
    """
    for entry in (e for e in table if not e.adapter):
        targets = entry.views(entry.local.detach())
        for piece, target, spec in zip(entry.pieces, targets, entry.specs(), strict=True):
            if piece.name not in files:
                log.warning("%s is not in the folder: it is drawn from seed %d", piece.name, seed)
                target.copy_(random_weight(piece.name, spec, seed=seed, std=std))
            elif target.numel():
                target.copy_(files.read(piece.name, spec.slices))
        entry.publish()


def draw(table: list[ShardedParam], seed: int, std: float) -> None:
    """Draw random weights, whose values are the same in every layout."""
    for entry in (e for e in table if not e.adapter):
        parts = entry.views(entry.local.detach())
        for piece, part, spec in zip(entry.pieces, parts, entry.specs(), strict=True):
            part.copy_(random_weight(piece.name, spec, seed=seed, std=std))
        entry.publish()


def trainable(table: list[ShardedParam]) -> Iterator[ShardedParam]:
    """Yield the entries that the optimizer updates."""
    return (entry for entry in table if entry.trainable)
