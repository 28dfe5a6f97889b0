"""Checkpoints: the whole state, resumed bit for bit, at another world size, or in another layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine_api.capabilities import Capability
from engine_api.config import CheckpointConfig, OptimizerConfig, Parallelism, ScheduleConfig
from engine_api.losses import sft_loss
from engine_api.results import CheckpointInfo, TrainOutput
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents, oracle_training, same_on_all_ranks
from engine_conformance.cases._ranks import Trained, local_batch, opened, save, summary, train
from engine_conformance.cases._state import read_manifest, read_state
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise, assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import AdamWConfig, Schedule, TrainResult
from engine_conformance.tolerances import weight_tolerance

PORTABLE = (Capability.PORTABLE_CHECKPOINT,)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0)
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=2, total_steps=12)


def _batches() -> tuple[PackedDocuments, ...]:
    return tuple(documents(50 + i, name) for i, name in enumerate(("uneven", "equal", "skewed") * 3))


def _expected(folder: Path, count: int) -> TrainResult:
    return oracle_training(
        str(folder), _batches()[:count], optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0),
        schedule=Schedule(kind="cosine", lr=1e-3, warmup_steps=2, total_steps=12),
    )  # fmt: skip


def _draws() -> list[float]:
    """One number of each generator that user code draws from."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


Run = tuple[list[TrainOutput], list[float]]


def save_and_go_on(setup: Setup, batches: Sequence[PackedDocuments], at: int, folder: Path) -> Run:
    """All steps with a save after ``at`` of them; outputs and draws since the save."""
    with opened(setup) as engine:
        random.seed(engine.topology.rank)
        np.random.seed(engine.topology.rank)  # noqa: NPY002
        torch.manual_seed(100 + engine.topology.rank)
        outputs = []
        for index, batch in enumerate(batches):
            if index == at:
                save(engine, folder / "middle", data_position=7, note="of the caller's")
                draws = _draws()
            outputs.append(engine.train_batch(local_batch(engine, batch, setup.device), sft_loss))
        save(engine, folder / "end")
        return outputs[at:], draws


def resume(setup: Setup, batches: Sequence[PackedDocuments], folder: Path) -> tuple[Run, CheckpointInfo, int]:
    """A fresh engine from the middle; outputs and draws, what was loaded, and the version after the load."""
    with opened(setup) as engine:
        info = engine.load_checkpoint(folder / "middle")
        version, draws = engine.weight_version, _draws()
        outputs = [engine.train_batch(local_batch(engine, batch, setup.device), sft_loss) for batch in batches]
        save(engine, folder / "resumed")
        return (outputs, draws), info, version


def _resumes(target: Target, model: Path) -> None:
    folder, batches = target.scratch(), _batches()[:6]
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    went_on = target.run(save_and_go_on, config, batches=batches, at=3, folder=folder)
    # Another seed: nothing of the old run but the checkpoint may be needed.
    resumed = target.run(resume, replace(config, seed=5), batches=batches[3:], folder=folder)
    for rank, ((outputs, draws), (again, info, version)) in enumerate(zip(went_on, resumed, strict=True)):
        where = f"rank {rank}"
        must(again[0] == outputs, "train outputs", f"{again[0]} after the load, {outputs} without", where=where)
        must(again[1] == draws, "generators", f"{again[1]} after the load, {draws} without", where=where)
        must(info.step == 3 and version == 3, "step", f"{info.step}, version {version}, not 3", where=where)
        must(dict(info.extra) == {"data_position": 7, "note": "of the caller's"}, "extra", f"{info.extra}", where=where)
    assert_bitwise(read_state(folder / "resumed"), read_state(folder / "end"), name="state after resuming")


@case(id="checkpoint.resume_bitwise", requires=PORTABLE)
def resume_bitwise(target: Target) -> float:
    """Saved, loaded into a fresh engine and trained on, a run MUST equal the one that went on, bit for bit.

    Weights, moments, losses, schedule, ``weight_version``, every rank's generators and the caller's ``extra``.

    If this fails: the optimizer is not restored, or steps once with zero gradients when it is (NeMo-RL #3171, #3345,
    Megatron-Bridge #5680, Automodel #3191); the schedule starts anew; moments become NaN (NeMo-RL #3544).
    """
    _resumes(target, target.model())
    return 0.0


@case(id="checkpoint.resume_moe", requires=(*PORTABLE, Capability.MOE), world=(1, 2))
def resume_moe(target: Target) -> float:
    """A mixture of experts MUST resume bit for bit as well.

    If this fails: moments of fused experts are saved in another order than they are read.
    """
    _resumes(target, target.model(family="qwen3_moe", tied=False))
    return 0.0


@case(id="checkpoint.keys", requires=PORTABLE)
def keys(target: Target) -> float:
    """A checkpoint MUST hold weights and moments under Hugging Face names, tied ones once, equal to the oracle's.

    If this fails: local layer numbers or a wrapper's prefix in the names (Megatron-LM #7452); moments of a padded shard.
    """
    model, folder = target.model(tied=True), target.scratch()
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    ranks = target.run(train, config, batches=_batches()[:3], save_to=folder / "c")
    state, want = read_state(folder / "c"), _expected(model, 3)
    names = set(want.params)
    fields = ("exp_avg", "exp_avg_sq", "step")
    expected = {f"model.{n}" for n in names} | {f"optim.{n}.{field}" for n in names for field in fields}
    must(set(state) == expected, "keys", f"{sorted(set(state) ^ expected)[:6]} on one side only")
    manifest = read_manifest(folder / "c")
    must(manifest["step"] == 3 and manifest["world_size"] == target.world, "manifest", "step or world size is wrong")
    assert_bitwise(
        {n: state[f"model.{n}"] for n in names}, {n: ranks[0].weights[n] for n in names}, name="saved weights"
    )
    must(all(float(state[f"optim.{n}.step"]) == 3 for n in names), "optim step", "is not 3 everywhere")
    margins = []
    for field, exact in (("exp_avg", want.optimizer.exp_avg), ("exp_avg_sq", want.optimizer.exp_avg_sq)):
        bounds = {n: torch.full_like(e, 1e-4 * float(e.abs().max())) for n, e in exact.items()}
        got = {n: state[f"optim.{n}.{field}"] for n in names}
        margins.append(assert_weights_close(got, exact, bounds, name=field))
    return max(margins)


@case(id="checkpoint.across_worlds", requires=PORTABLE, world=(2, 4))
def across_worlds(target: Target) -> float:
    """A checkpoint MUST load at other world sizes and layouts, bit for bit, and train on as the oracle does.

    From one rank to several, through every declared layout, and back to one.

    If this fails: shards are stored by rank, not by place (verl, miles and AReaL state it as a limit); names are
    those of a rank's own layers (Megatron-LM #7452, NeMo-RL #671).
    """
    model, folder = target.model(), target.scratch()
    base = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    stages = [(1, Parallelism()), *((target.world, layout) for layout in _layouts(target)), (1, Parallelism())]
    margins, source, batches = [], None, _batches()
    for index, (world, layout) in enumerate(stages):
        place = folder / f"step-{index}"
        at, config = target.at(world), replace(base, parallelism=layout)
        if source is not None:
            loaded = at.run(train, config, batches=[], load=source)
            state = read_state(source)
            assert_bitwise(
                loaded[0].weights, {n: state[f"model.{n}"] for n in loaded[0].weights}, name="loaded weights"
            )
        ranks = at.run(train, config, batches=[batches[index]], load=source, save_to=place)
        margins.append(_stage_matches(at, ranks, _expected(model, index + 1), index))
        source = place
    return max(margins)


def _layouts(target: Target) -> list[Parallelism]:
    layouts = [Parallelism()]
    if Capability.ULYSSES in target.capabilities:
        layouts.append(Parallelism(ulysses=target.world))
    if Capability.HSDP in target.capabilities:
        layouts.append(Parallelism(dp_replicate=2))
    return layouts


def _stage_matches(target: Target, ranks: Sequence[Trained], want: TrainResult, index: int) -> float:
    same_on_all_ranks(ranks)
    got, exact = ranks[0].outputs[0], want.steps[index]
    must(got.lr == exact.lr or abs(got.lr - exact.lr) < 1e-12, "lr", f"{got.lr}, the schedule says {exact.lr}")
    must(ranks[0].version == index + 1, "weight_version", f"{ranks[0].version} after {index + 1} steps")
    return max(
        assert_scalar_close("loss", got.loss, exact.loss, target.tolerance("loss")),
        assert_scalar_close("grad_norm", got.grad_norm, exact.grad_norm, target.tolerance("grad_norm")),
        assert_weights_close(ranks[0].weights, want.params, weight_tolerance(want)),
    )


def _remains(folder: Path) -> None:
    """What a killed save might have left: the writer removes it first, which takes longer than a step."""
    folder.mkdir()
    for index in range(20_000):
        (folder / str(index)).touch()


def save_while_training(setup: Setup, batches: Sequence[PackedDocuments], folder: Path) -> Trained:
    """A save that is not waited for, steps meanwhile, a second one, and a close that must wait for it."""
    with opened(setup) as engine:

        def step(batch: PackedDocuments) -> TrainOutput:
            return engine.train_batch(local_batch(engine, batch, setup.device), sft_loss)

        outputs = [step(batches[0])]
        if engine.topology.rank == 0:
            _remains(folder / "first.partial")
        first = engine.save_checkpoint(folder / "first")
        outputs += [step(batch) for batch in batches[1:]]
        assert first.result().step == 1
        assert first.done()
        result = summary(engine, outputs)
        engine.save_checkpoint(folder / "last")
        return result


@case(id="checkpoint.asynchronous", requires=(*PORTABLE, Capability.ASYNC_CHECKPOINT))
def asynchronous(target: Target) -> float:
    """An asynchronous save MUST hold the state at the time of the call, and ``close`` MUST wait for it.

    If this fails: the writer reads live tensors that the next step changes.
    """
    model, folder, batches = target.model(), target.scratch(), _batches()[:3]
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    later = replace(config, checkpoint=CheckpointConfig(async_save=True))
    ranks = target.run(save_while_training, later, batches=batches, folder=folder)
    plain = target.run(train, config, batches=batches[:1], save_to=folder / "plain")
    all_steps = target.run(train, config, batches=batches, save_to=folder / "end")
    must(plain[0].outputs[0] == ranks[0].outputs[0], "train output", "an asynchronous engine trains differently")
    assert_bitwise(read_state(folder / "first"), read_state(folder / "plain"), name="state at the call")
    must(all_steps[0].digest == ranks[0].digest, "weights", "training beside a save differs from training without")
    return assert_bitwise(read_state(folder / "last"), read_state(folder / "end"), name="state at close")
