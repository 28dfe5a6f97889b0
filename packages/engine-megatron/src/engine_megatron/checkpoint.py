"""The training state as boxes under canonical keys.

The keys are ``model.<Hugging Face name>`` and ``optim.<name>.<field>``.
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
from engine_megatron.weights import Reader, Weight, by_parameter, put

State = dict[str, tuple[Tensor, ShardSpec]]
BoxLayout = dict[str, tuple[ShardSpec, torch.dtype]]


def state_of(table: Sequence[Weight], masters: Masters, optimizer: StageOptimizer | None) -> State:
    """Return this rank's boxes of weights and optimizer state.

    All ranks call it together. Tensors that are stored in flat ranges are gathered, and one rank
    keeps each of their boxes.
    """
    reader = Reader(masters, masters.dtype)
    gathered = reader.read_together(table)
    state: State = {}
    for weight in table:
        if weight.name in gathered:
            state[f"model.{weight.name}"] = (gathered[weight.name], weight.box)
        elif weight.param is None or not reader.gathers(weight.param):
            state[f"model.{weight.name}"] = (reader.read(weight), weight.box)
    if optimizer is not None:
        state |= _moments(table, optimizer)
    return state


def _moments(table: Sequence[Weight], optimizer: StageOptimizer) -> State:
    """Return the boxes of the optimizer's state that this rank writes."""
    state: State = {}
    weights = by_parameter(table)
    for param, field, value in optimizer.whole_state():
        for weight in weights[param]:
            if value.dim():
                spec = weight.box
            else:
                spec = ShardSpec.whole((), replica=_scalar_replica(weight))
            if spec.replica == 0 and not spec.is_empty:
                part = weight.part_of(value) if value.dim() else value
                state[f"optim.{weight.name}.{field}"] = (part, spec)
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
    wanted: BoxLayout = {f"model.{weight.name}": (weight.box, weight.dtype) for weight in table}
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
    put(table, masters, lambda weight: tensors[f"model.{weight.name}"])
    if optimizer is not None:
        optimizer.install(_whole_states(table, tensors))


def _whole_states(
    table: Sequence[Weight], tensors: Mapping[str, Tensor]
) -> dict[Any, dict[str, Tensor]]:
    """Return the loaded optimizer state by parameter and field, in the parameters' shapes."""
    weights = {weight.name: weight for weight in table if weight.param is not None}
    result: dict[Any, dict[str, Tensor]] = {}
    for key in (key for key in tensors if key.startswith("optim.")):
        name, _, field = key.removeprefix("optim.").rpartition(".")
        if (weight := weights.get(name)) is None:
            continue
        fields = result.setdefault(weight.held, {})
        value = tensors[key]
        if value.dim():
            whole = fields.setdefault(field, torch.zeros(weight.held.shape, dtype=value.dtype))
            weight.cut.write(whole, value)
        else:
            fields[field] = value
    return result
