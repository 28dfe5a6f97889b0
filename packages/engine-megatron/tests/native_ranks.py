"""Functions that test_native runs inside ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from layout_ranks import ROWS, create
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from engine_api import Batch, OptimizerConfig, sft_loss
from engine_api.config import ScheduleConfig
from engine_api.errors import EngineError
from engine_api.weights import ShardSpec

State = dict[str, tuple[Tensor, ShardSpec]]
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=1.0, eps=1e-5)


def start(
    path: str, parallelism: dict[str, int], checkpoint: str, *, options: Any = None, **config: Any
) -> Any:
    """Return an initialized engine, whose schedule gives each step another rate."""
    schedule = ScheduleConfig(name="linear", total_steps=10)
    arguments = {"optimizer": OPTIMIZER, "schedule": schedule} | config
    engine = create(path, parallelism, {"checkpoint": checkpoint} | (options or {}), **arguments)
    engine.initialize()
    return engine


def step(engine: Any) -> list[float]:
    """Train one step, and return loss, gradient norm, learning rate and version."""
    place = engine.topology
    output = engine.train_batch(Batch.pack(ROWS[place.dp_rank :: place.dp_size]), sft_loss)
    return [output.loss, output.grad_norm, output.lr, output.weight_version]


def state_of(engine: Any) -> State:
    """Return this rank's boxes of masters, moments and step counts."""
    return {
        key: (tensor.detach().clone(), spec)
        for key, (tensor, spec) in engine.state_shards().items()
    }


def parameters_of(engine: Any) -> list[Tensor]:
    """Return the parameters that the model computes with."""
    return [param.detach().clone() for param in engine.forward.chunks.parameters()]


def run_uninterrupted(
    path: str, parallelism: dict[str, int], folder: str, **config: Any
) -> tuple[State, State, list[float]]:
    """Return the states of a run after two and after three steps, and the third step's figures.

    The run is saved after two steps.
    """
    engine = start(path, parallelism, "megatron", **config)
    step(engine)
    step(engine)
    info = engine.save_checkpoint(folder, extra={"epoch": 2}).result()
    assert (info.step, info.extra) == (2, {"epoch": 2})
    saved = state_of(engine)
    figures = step(engine)
    result = saved, state_of(engine), figures
    engine.close()
    return result


def pass_base(
    path: str, other: str, folder: str, **config: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return base weights under an adapter, and those of another model's checkpoint after its load.

    The latter are exported in float32 and in bfloat16, in which the model computes.
    """
    engine = start(other, {"dp_shard": 2}, "megatron", **config)
    step(engine)
    engine.save_checkpoint(folder).result()
    engine.close()
    engine = start(path, {"dp_shard": 2}, "megatron", **config)

    def export(dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in engine.get_per_tensor_param(dtype=dtype, adapter="base")}

    before = export()
    engine.load_checkpoint(folder)
    result = before, export(), export(torch.bfloat16)
    engine.close()
    return result


def resume(
    path: str, parallelism: dict[str, int], folder: str, **config: Any
) -> tuple[State, State, list[float]]:
    """Return the state after a load into a trained engine, after one more step, and its figures."""
    engine = start(path, parallelism, "portable", **config)
    if engine.config.optimizer is not None:
        step(engine)
    info = engine.load_checkpoint(folder)
    assert (info.step, info.extra, engine.weight_version) == (2, {"epoch": 2}, 2)
    loaded = state_of(engine)
    parameters = parameters_of(engine)
    figures = [] if engine.config.optimizer is None else step(engine)
    result = loaded, state_of(engine), figures
    # The portable format sets each rank's parameters to the rounded masters.
    engine.load_checkpoint(folder)
    engine._install_state(_whole(engine, loaded))
    assert all(torch.equal(a, b) for a, b in zip(parameters, parameters_of(engine), strict=True))
    engine.close()
    return result


def _whole(engine: Any, state: State) -> dict[str, Tensor]:
    """Return this rank's boxes, read from all ranks' as the portable format does."""
    whole: dict[str, Tensor] = {}
    for row in engine.comm.all_gather(state):
        for key, (tensor, spec) in row.items():
            target = whole.setdefault(key, torch.empty(spec.global_shape, dtype=tensor.dtype))
            if spec.replica == 0:
                target[spec.slices] = tensor
    boxes = {weight.key: weight.box for weight in engine.table}
    of_names = {weight.name: weight.box for weight in engine.table}
    fields = {
        key: of_names[key.removeprefix("optim.").rpartition(".")[0]]
        for key in whole
        if key not in boxes
    }
    return {
        key: whole[key][(boxes | fields)[key].slices] if whole[key].dim() else whole[key]
        for key in whole
    }


def load_refused(
    path: str, parallelism: dict[str, int], folder: str, **config: Any
) -> tuple[str, str, bool]:
    """Return the type and the text of a load's error, and whether the state stayed as it was."""
    engine = start(path, parallelism, "megatron", **config)
    step(engine)
    before = state_of(engine)
    kind = ""
    text = ""
    try:
        engine.load_checkpoint(folder)
    except EngineError as error:
        kind, text = type(error).__name__, str(error)
    after = state_of(engine)
    engine.close()
    return kind, text, all(torch.equal(before[key][0], after[key][0]) for key in before)


def save_on_a_full_disk(
    path: str, parallelism: dict[str, int], folder: str
) -> tuple[str, list[str], int]:
    """Return the error of a save in which the last rank cannot write, and what follows it.

    The error's text ends with whether it has a remedy. The second value lists the files that it
    leaves, and the third is the step of the next save.
    """
    engine = start(path, parallelism, "megatron")
    step(engine)
    original = FileSystemWriter.write_data
    kind = ""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if engine.topology.rank == engine.topology.world_size - 1:
        FileSystemWriter.write_data = full
    try:
        engine.save_checkpoint(folder)
    except EngineError as error:
        kind = f"{type(error).__name__}, {'free disk space' in str(error)}"
    finally:
        FileSystemWriter.write_data = original
    left = engine.comm.all_gather(sorted(file.name for file in Path(folder).parent.iterdir()))[0]
    after = engine.save_checkpoint(folder).result().step
    engine.close()
    return kind, left, after


def die_while_saving(path: str, parallelism: dict[str, int], folder: str) -> None:
    """Save, and end the last rank's process between its files and the index."""
    engine = start(path, parallelism, "megatron")
    step(engine)
    original = FileSystemWriter.write_data

    def die(*arguments: Any) -> Any:
        original(*arguments).wait()
        os._exit(9)

    if engine.topology.rank == engine.topology.world_size - 1:
        FileSystemWriter.write_data = die
    engine.save_checkpoint(folder)


def begin_again(
    path: str, parallelism: dict[str, int], folder: str
) -> tuple[list[float], list[float]]:
    """Return the figures of a run's first step, and of the same step after a load.

    The load goes into an engine that has moments already.
    """
    engine = start(path, parallelism, "megatron")
    engine.save_checkpoint(folder)
    first = step(engine)
    engine.load_checkpoint(folder)
    again = step(engine)
    engine.close()
    return first, again


def carry_over(
    path: str,
    parallelism: dict[str, int],
    folder: str,
    wrote: dict[str, Any],
    reads: dict[str, Any],
) -> tuple[State, State, list[set[torch.dtype]], int]:
    """Load a checkpoint into an engine with different dtypes.

    Returns the saved state and the loaded one, the dtypes of the reader's moments before the load,
    after it and after another step, and the reader's version at the end.
    """
    first = start(path, parallelism, **wrote)
    step(first)
    step(first)
    first.save_checkpoint(folder)
    saved = state_of(first)
    first.close()
    engine = start(path, parallelism, **reads)
    step(engine)
    dtypes = [_dtypes_of_moments(engine)]
    engine.load_checkpoint(folder)
    loaded = state_of(engine)
    dtypes.append(_dtypes_of_moments(engine))
    step(engine)
    result = saved, loaded, [*dtypes, _dtypes_of_moments(engine)], engine.weight_version
    engine.close()
    return result


def _dtypes_of_moments(engine: Any) -> set[torch.dtype]:
    states = [state for group in engine.optimizer.groups for state in group.inner.state.values()]
    return {value.dtype for state in states for value in state.values() if value.dim()}
