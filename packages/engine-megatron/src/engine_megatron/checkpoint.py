"""The training state as boxes under canonical keys.

The keys are ``model.<Hugging Face name>``, for adapters ``adapter.<PEFT's name>``, and
``optim.<name>.<field>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_api.manifest import Entry
from engine_api.optimizers import loaded_dtypes
from engine_api.weights import ShardSpec
from engine_megatron.masters import Masters
from engine_megatron.optimizer import StageOptimizer
from engine_megatron.weights import Reader, Use, Weight, by_parameter, put

State = dict[str, tuple[Tensor, ShardSpec]]
BoxLayout = dict[str, tuple[ShardSpec, torch.dtype]]


def state_of(table: Sequence[Weight], masters: Masters, optimizer: StageOptimizer | None) -> State:
    """Return this rank's boxes of weights and optimizer state.

    All ranks call it together. Tensors that are stored in flat ranges are gathered, and one rank
    keeps each of their boxes.
    """
    reader = Reader(masters)
    gathered = reader.read_together(table)
    state: State = {}
    for weight in table:
        if weight.name in gathered:
            state[weight.key] = (gathered[weight.name], weight.box)
        elif not weight.params or not reader.gathers(weight):
            state[weight.key] = (reader.read(weight), weight.box)
    if optimizer is not None:
        state |= _moments(table, optimizer)
    return state


def _moments(table: Sequence[Weight], optimizer: StageOptimizer) -> State:
    """Return the boxes of the optimizer's state that this rank writes."""
    state: State = {}
    # The experts of a stack that have come so far.
    stacks: dict[str, list[Tensor]] = {}
    uses = by_parameter(table)
    for param, field, value in optimizer.whole_state():
        for use in uses[param]:
            weight = use.weight
            key = f"optim.{weight.name}.{field}"
            spec = weight.box
            if not value.dim():
                spec = ShardSpec.whole((), replica=_scalar_replica(weight))
            if spec.replica != 0 or spec.is_empty:
                continue
            part = use.read(value) if value.dim() else value
            if use.expert is None or not value.dim():
                state[key] = (part, spec)
                continue
            parts = stacks.setdefault(key, [])
            parts.append(part)
            if len(parts) == len(weight.params):
                state[key] = (torch.stack(stacks.pop(key)), spec)
    return state


def _scalar_replica(weight: Weight) -> int:
    """Return the replica number of a weight's scalar state, such as a step count.

    It is 0, and the scalar therefore written, only on the first writer of the weight's first box.
    """
    return weight.box.replica if not any(weight.box.offset) else 1


def layout_of(
    table: Sequence[Weight], optimizer: StageOptimizer | None, entries: Mapping[str, Entry]
) -> BoxLayout:
    """Return the boxes that this rank needs of a checkpoint, in the dtypes that this engine keeps.

    Raises ``CheckpointMismatch`` if the state is of a different optimizer.
    """
    wanted: BoxLayout = {weight.key: (weight.box, weight.dtype) for weight in table}
    if optimizer is None:
        return wanted
    weights = {weight.name: weight for weight in table}
    own = loaded_dtypes(optimizer.groups[0].inner, optimizer.masters.dtype, entries)
    for key, saved in entries.items():
        name, _, field = key.removeprefix("optim.").rpartition(".")
        if key.startswith("optim.") and name in weights:
            wanted[key] = (weights[name].box if saved.shape else ShardSpec.whole(()), own[field])
    return wanted


def install(
    table: Sequence[Weight],
    masters: Masters,
    optimizer: StageOptimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy loaded boxes into the weights and masters, and replace the optimizer's state."""
    put(table, masters, lambda use: use.of(tensors[use.weight.key]))
    if optimizer is not None:
        optimizer.install(_whole_states(table, tensors))


def _whole_states(
    table: Sequence[Weight], tensors: Mapping[str, Tensor]
) -> dict[Any, dict[str, Tensor]]:
    """Return the loaded optimizer state by parameter and field, in the parameters' shapes."""
    uses: dict[str, list[tuple[Any, Use]]] = {}
    for param, own in by_parameter(table).items():
        for use in own:
            uses.setdefault(use.weight.name, []).append((param, use))
    result: dict[Any, dict[str, Tensor]] = {}
    for key in (key for key in tensors if key.startswith("optim.")):
        name, _, field = key.removeprefix("optim.").rpartition(".")
        value = tensors[key]
        for param, use in uses.get(name, ()):
            fields = result.setdefault(param, {})
            if value.dim():
                whole = fields.setdefault(field, torch.zeros(param.shape, dtype=value.dtype))
                use.weight.cut.write(whole, use.of(value))
            else:
                fields[field] = value
    return result
