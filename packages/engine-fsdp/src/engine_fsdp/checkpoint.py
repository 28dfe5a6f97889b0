"""The training state as boxes under canonical keys.

Keys: ``model.<Hugging Face name>``; ``adapter.<peft name>`` for low-rank adapters;
``optim.<name>.<field>`` (AdamW: exp_avg, exp_avg_sq, step) for what is trained.
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
    """The canonical key of one saved tensor."""
    return f"{'adapter' if entry.adapter else 'model'}.{name}"


def state_of(
    table: list[ShardedParam], optimizer: torch.optim.Optimizer | None, layout: Layout
) -> State:
    """Weights and optimizer state as live boxes."""
    boxes: State = {}
    for entry in table:
        local = entry.local.detach()
        for piece in entry.pieces:
            spec = piece.spec(entry.first, local.shape[0] if piece.shape else 0, layout.replica)
            boxes[model_key(entry, piece.name)] = (piece.view(local, entry.first), spec)
    return boxes if optimizer is None else boxes | optimizer_state(optimizer, table, layout)


def layout_of(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    entries: Mapping[str, Entry],
    layout: Layout,
) -> BoxLayout:
    """Which boxes this rank needs from a checkpoint. An engine without optimizer leaves its state unread."""
    wanted = {
        key: (spec, tensor.dtype) for key, (tensor, spec) in state_of(table, None, layout).items()
    }
    return wanted if optimizer is None else wanted | state_layout(optimizer, table, entries, layout)


def install(
    table: list[ShardedParam],
    optimizer: torch.optim.Optimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy loaded boxes into the live weights, and replace the optimizer's state."""
    for entry in table:
        for piece in entry.pieces:
            piece.view(entry.local.detach(), entry.first).copy_(
                tensors[model_key(entry, piece.name)]
            )
    if optimizer is not None:
        install_state(optimizer, table, tensors)
