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
from engine_fsdp.optimizer import BoxLayout, State, install_state, optimizer_state, state_layout
from engine_fsdp.parallel import Layout
from engine_fsdp.weights import ShardedParam


def model_key(entry: ShardedParam, name: str) -> str:
    """Return the canonical key of one saved tensor."""
    kind = "adapter" if entry.adapter else "model"
    return f"{kind}.{name}"


def state_of(
    table: list[ShardedParam], optimizer: torch.optim.Optimizer | None, layout: Layout
) -> State:
    """Return this rank's weights and optimizer state as boxes of live memory, by canonical key."""
    boxes: State = {}
    for entry in table:
        local = entry.local.detach()
        for piece in entry.pieces:
            rows = local.shape[0] if piece.shape else 0
            spec = piece.spec(entry.first, rows, layout.replica)
            boxes[model_key(entry, piece.name)] = (piece.view(local, entry.first), spec)
    if optimizer is None:
        return boxes
    return boxes | optimizer_state(optimizer, table, layout)


def layout_of(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    entries: Mapping[str, Entry],
    layout: Layout,
) -> BoxLayout:
    """Return the boxes and dtypes that this rank needs from a checkpoint, by canonical key.

    An engine without an optimizer leaves the checkpoint's optimizer state unread.
    """
    weights = state_of(table, None, layout)
    wanted = {key: (spec, tensor.dtype) for key, (tensor, spec) in weights.items()}
    if optimizer is None:
        return wanted
    return wanted | state_layout(optimizer, table, entries, layout)


def install(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy loaded boxes into the live weights, and replace the optimizer's state."""
    for entry in table:
        for piece in entry.pieces:
            live = piece.view(entry.local.detach(), entry.first)
            live.copy_(tensors[model_key(entry, piece.name)])
    if optimizer is not None:
        install_state(optimizer, table, tensors)
