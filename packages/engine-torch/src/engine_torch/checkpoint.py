"""The training state as boxes under canonical keys.

The keys are ``model.<Hugging Face name>`` for weights, ``adapter.<peft name>`` for low-rank
adapters, and ``optim.<name>.<field>`` (AdamW: exp_avg, exp_avg_sq, step) for the optimizer state of
trained tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine_api.manifest import Entry
from engine_torch.optimizer import BoxLayout, State, install_state, optimizer_state, state_layout
from engine_torch.weights import ShardedParam


def model_key(entry: ShardedParam, name: str) -> str:
    """Return the canonical key of one saved tensor."""
    kind = "adapter" if entry.adapter else "model"
    return f"{kind}.{name}"


def state_of(
    table: list[ShardedParam], optimizer: torch.optim.Optimizer | None, rank: int
) -> State:
    """Return this rank's weights and optimizer state as boxes of live memory, by canonical key.

    ``rank`` is this process's among all that write the checkpoint.
    """
    boxes: State = {}
    for entry in table:
        parts = entry.views(entry.local.detach())
        for piece, part, spec in zip(entry.pieces, parts, entry.specs(), strict=True):
            boxes[model_key(entry, piece.name)] = (part, spec)
    if optimizer is None:
        return boxes
    return boxes | optimizer_state(optimizer, table, rank)


def layout_of(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    entries: Mapping[str, Entry],
) -> BoxLayout:
    """Return the boxes and dtypes that this rank needs from a checkpoint, by canonical key.

    An engine without an optimizer leaves the checkpoint's optimizer state unread.
    """
    wanted = {
        model_key(entry, piece.name): (spec, entry.param.dtype)
        for entry in table
        for piece, spec in zip(entry.pieces, entry.specs(), strict=True)
    }
    if optimizer is None:
        return wanted
    return wanted | state_layout(optimizer, table, entries)


def install(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy loaded boxes into the live weights, and replace the optimizer's state."""
    for entry in table:
        parts = entry.views(entry.local.detach())
        for piece, live in zip(entry.pieces, parts, strict=True):
            live.copy_(tensors[model_key(entry, piece.name)])
        entry.publish()
    if optimizer is not None:
        install_state(optimizer, table, tensors)
