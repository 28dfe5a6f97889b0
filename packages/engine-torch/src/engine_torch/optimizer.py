"""Gradient clipping, and the optimizer's state as boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api.errors import ConfigError
from engine_api.manifest import Entry
from engine_api.optimizers import has_scalars_on_device, loaded_dtypes
from engine_api.weights import ShardSpec
from engine_torch.boxes import local_of
from engine_torch.weights import ShardedParam, trainable

State = dict[str, tuple[Tensor, ShardSpec]]
BoxLayout = dict[str, tuple[ShardSpec, torch.dtype]]


def clip(table: list[ShardedParam], max_norm: float | None) -> float:
    """Scale the gradients to a global 2-norm of at most ``max_norm``, and return the norm before.

    Nothing is scaled where ``max_norm`` is None or the norm is not finite.
    """
    norm = measure_gradients(table)
    scale_gradients(table, norm, max_norm)
    return norm


def measure_gradients(table: list[ShardedParam]) -> float:
    """Return the 2-norm of the gradients, over all ranks that share a parameter."""
    groups = _group_by_mesh(table)
    norms = [_norm_of([p.grad for p in params if p.grad is not None]) for params in groups]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)


def scale_gradients(table: list[ShardedParam], norm: float, max_norm: float | None) -> None:
    """Scale gradients whose 2-norm is ``norm`` to at most ``max_norm`` (see ``clip``)."""
    if max_norm is None or not max_norm < norm < float("inf"):
        return
    for params in _group_by_mesh(table):
        on_device = torch.tensor(norm, device=local_of(params[0]).device)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, on_device)


def _group_by_mesh(table: list[ShardedParam]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, with those of each mesh together.

    torch has no operation on DTensors of several meshes.
    """
    groups: dict[Any, list[Tensor]] = {}
    for entry in trainable(table):
        if entry.param.grad is not None:
            param: Any = entry.param
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            groups.setdefault(mesh, []).append(entry.param)
    return list(groups.values())


def _norm_of(grads: list[Tensor]) -> float:
    """Return the 2-norm of gradients of one mesh, over all of its ranks."""
    total = torch.nn.utils.get_total_norm(grads, norm_type=2.0)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def optimizer_state(
    optimizer: torch.optim.Optimizer, table: list[ShardedParam], rank: int
) -> State:
    """Return the optimizer's state as boxes of live memory, by key ``optim.<name>.<field>``.

    ``rank`` is this process's among all that write the checkpoint, each of which has a copy of a
    step count.

    Raises:
        ConfigError: a part of the state is neither a scalar tensor nor a tensor of its parameter's
            shape.
    """
    boxes: State = {}
    for entry in trainable(table):
        for field, value in optimizer.state.get(entry.param, {}).items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    "optimizer.name",
                    f"state {field!r} is a {type(value).__name__}, not a tensor",
                    remedy="this optimizer cannot be saved; use adamw",
                )
            if value.dim() and value.shape != entry.param.shape:
                raise ConfigError(
                    "optimizer.name",
                    f"state {field!r} of {entry.name} has shape {tuple(value.shape)}, "
                    f"its weight has {tuple(entry.param.shape)}",
                    remedy="this optimizer cannot be saved; use adamw",
                )
            if value.dim() == 0:
                copy = (local_of(value), ShardSpec.whole((), replica=rank))
                boxes |= {f"optim.{piece.name}.{field}": copy for piece in entry.pieces}
                continue
            parts = entry.views(local_of(value))
            for piece, part, spec in zip(entry.pieces, parts, entry.specs(), strict=True):
                boxes[f"optim.{piece.name}.{field}"] = (part, spec)
    return boxes


def state_layout(
    optimizer: torch.optim.Optimizer,
    table: list[ShardedParam],
    entries: Mapping[str, Entry],
) -> BoxLayout:
    """Return the boxes and dtypes of a checkpoint's optimizer state that this rank needs, by key.

    The dtype is the one that this optimizer keeps, since the writer's weights may have had another
    dtype. Unknown keys are left to the caller's check.

    Raises:
        CheckpointMismatch: the state is that of another optimizer.
    """
    specs = {
        piece.name: (entry, spec)
        for entry in trainable(table)
        for piece, spec in zip(entry.pieces, entry.specs(), strict=True)
    }
    kinds = {entry.param.dtype for entry in trainable(table)}
    own = {dtype: loaded_dtypes(optimizer, dtype, entries) for dtype in kinds}
    wanted: BoxLayout = {}
    for key, saved in entries.items():
        name, _, field = key.removeprefix("optim.").rpartition(".")
        if key.startswith("optim.") and name in specs:
            entry, spec = specs[name]
            if not saved.shape:
                spec = ShardSpec.whole(())
            wanted[key] = (spec, own[entry.param.dtype][field])
    return wanted


def install_state(
    optimizer: torch.optim.Optimizer, table: list[ShardedParam], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the optimizer's whole state by loaded boxes."""
    pieces = {piece.name: (entry, piece) for entry in trainable(table) for piece in entry.pieces}
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, field = key.removeprefix("optim.").rpartition(".")
        if key.startswith("optim."):
            entry, piece = pieces[name]
            state = optimizer.state[entry.param]
            if value.dim() == 0:
                state[field] = value.to(_scalar_device(optimizer, entry.param))
                continue
            if field not in state:
                state[field] = torch.zeros_like(entry.param, dtype=value.dtype, requires_grad=False)
            piece.view(local_of(state[field]), entry.box.offset).copy_(value)


def _scalar_device(optimizer: torch.optim.Optimizer, param: Tensor) -> torch.device:
    """Return the device on which the optimizer keeps a parameter's step count."""
    return local_of(param).device if has_scalars_on_device(optimizer) else torch.device("cpu")


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the state to ``device``, or (None) each tensor back to its parameter's device."""
    for param, state in optimizer.state.items():
        target = device or local_of(param).device
        for field, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim():
                state[field] = value.to(target)
            elif device is None:
                # A step count that was loaded while its weight was offloaded is still on the host.
                state[field] = value.to(_scalar_device(optimizer, param))
