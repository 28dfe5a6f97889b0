"""Gradient clipping, and the optimizer's state as boxes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api.errors import ConfigError
from engine_api.hf_names import Piece
from engine_api.manifest import Entry
from engine_api.optimizers import has_scalars_on_device, loaded_dtypes
from engine_api.weights import ShardSpec
from engine_fsdp.parallel import Layout
from engine_fsdp.weights import ShardedParam, local_of, trainable

State = dict[str, tuple[Tensor, ShardSpec]]
BoxLayout = dict[str, tuple[ShardSpec, torch.dtype]]


def clip(table: list[ShardedParam], max_norm: float | None) -> float:
    """Scale the gradients to a global 2-norm of at most ``max_norm``, and return the norm before.

    Nothing is scaled where ``max_norm`` is None or the norm is not finite.
    """
    params = [entry.param for entry in trainable(table) if entry.param.grad is not None]
    grads = [p.grad for p in params if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, norm_type=2.0)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if max_norm is not None and norm > max_norm and norm < float("inf"):
        on_device = torch.tensor(norm, device=local_of(grads[0]).device)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, on_device)
    return norm


def optimizer_state(
    optimizer: torch.optim.Optimizer, table: list[ShardedParam], layout: Layout
) -> State:
    """Return the optimizer's state as boxes of live memory, by key ``optim.<name>.<field>``.

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
            for piece in entry.pieces:
                boxes[f"optim.{piece.name}.{field}"] = _box(value, entry, piece, layout)
    return boxes


def _box(
    value: Tensor, entry: ShardedParam, piece: Piece, layout: Layout
) -> tuple[Tensor, ShardSpec]:
    """Return a piece's part of an optimizer state tensor, with its box."""
    if value.dim() == 0:
        return local_of(value), ShardSpec.whole((), replica=layout.topology.rank)
    local = local_of(value)
    return piece.view(local, entry.first), piece.spec(entry.first, local.shape[0], layout.replica)


def state_layout(
    optimizer: torch.optim.Optimizer,
    table: list[ShardedParam],
    entries: Mapping[str, Entry],
    layout: Layout,
) -> BoxLayout:
    """Return the boxes and dtypes of a checkpoint's optimizer state that this rank needs, by key.

    The dtype is the one that this optimizer keeps, since the writer's weights may have had another
    dtype. Unknown keys are left to the caller's check.

    Raises:
        CheckpointMismatch: the state is that of another optimizer.
    """
    pieces = {piece.name: (entry, piece) for entry in trainable(table) for piece in entry.pieces}
    kinds = {entry.param.dtype for entry in trainable(table)}
    own = {dtype: loaded_dtypes(optimizer, dtype, entries) for dtype in kinds}
    wanted: BoxLayout = {}
    for key, saved in entries.items():
        name, _, field = key.removeprefix("optim.").rpartition(".")
        if key.startswith("optim.") and name in pieces:
            entry, piece = pieces[name]
            rows = entry.local.shape[0] if piece.shape else 0
            spec = piece.spec(entry.first, rows, layout.replica)
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
            piece.view(local_of(state[field]), entry.first).copy_(value)


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
