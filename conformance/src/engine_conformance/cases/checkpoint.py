"""Checkpoints of the whole state, resumed bit for bit, also at other world sizes and layouts."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from engine_api.capabilities import Capability
from engine_api.config import (
    CheckpointConfig,
    EngineConfig,
    OptimizerConfig,
    Parallelism,
    Precision,
    ScheduleConfig,
)
from engine_api.errors import CheckpointWriteError, EngineError, EngineStateError
from engine_api.results import CheckpointHandle, CheckpointInfo, TrainOutput
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    raised_everywhere,
    same_on_all_ranks,
    same_step,
    training_matches,
)
from engine_conformance.cases._journeys import moments_match
from engine_conformance.cases._losses import default_loss
from engine_conformance.cases._ranks import (
    Trained,
    caught,
    digest,
    local_batch,
    opened,
    save,
    step,
    summary,
    train,
    whole_weights,
)
from engine_conformance.cases._state import assert_same_state, read_manifest, read_state
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import assert_bitwise, assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import AdamWConfig, Schedule, TrainResult
from engine_conformance.tolerances import weight_tolerance

PORTABLE = (Capability.PORTABLE_CHECKPOINT,)
TYPES = (LM, VALUE)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, eps=EPS)
# Far longer than a few steps of a tiny model take.
_HELD_SECONDS = 60.0
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=2, total_steps=12)


def _batches() -> tuple[PackedDocuments, ...]:
    return tuple(
        documents(50 + i, name) for i, name in enumerate(("uneven", "equal", "skewed") * 3)
    )


def _expected(folder: Path, count: int) -> TrainResult:
    return oracle_training(
        str(folder),
        _batches()[:count],
        optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS),
        schedule=Schedule(kind="cosine", lr=1e-3, warmup_steps=2, total_steps=12),
    )


def _draws(device: str) -> list[float]:
    """Return one number of each generator that user code draws from."""
    draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
    return draws if device == "cpu" else [*draws, float(torch.rand((), device=device))]


# Each kind of value that JSON has, and a number that a float does not hold.
_EXTRA: dict[str, Any] = {
    "data_position": 2**60 + 1,
    "note": "of the caller's",
    "shards": {"seen": [[1, 2.5], None, True], "tokens": 2**60 + 3, "é": {}},
}

CheckpointRun = tuple[list[TrainOutput], list[float], str]


def save_and_go_on(
    setup: Setup, batches: Sequence[PackedDocuments], at: int, folder: Path
) -> CheckpointRun:
    """Run all steps with a save after ``at`` of them.

    Return outputs and draws since the save, and the weights' digest.
    """
    with opened(setup) as engine:
        random.seed(engine.topology.rank)
        np.random.seed(engine.topology.rank)  # noqa: NPY002
        torch.manual_seed(100 + engine.topology.rank)
        outputs = []
        for index, batch in enumerate(batches):
            if index == 1:
                # Nothing of an earlier save may be in a later one.
                save(engine, folder / "earlier", data_position=1)
                _draws(setup.device)
            if index == at:
                save(engine, folder / "middle", **_EXTRA)
                draws = _draws(setup.device)
            outputs.append(step(engine, setup, batch))
        save(engine, folder / "end")
        return outputs[at:], draws, digest(whole_weights(engine))


def resume(
    setup: Setup, batches: Sequence[PackedDocuments], folder: Path
) -> tuple[CheckpointRun, CheckpointInfo, int]:
    """Load into an engine that holds a gradient and go on from the middle.

    Return its run, the loaded values, and the version after the load.
    """
    with opened(setup) as engine:
        engine.forward_backward(
            local_batch(engine, batches[0], setup.device), default_loss(setup.model_type)
        )
        info = engine.load_checkpoint(folder / "middle")
        version = engine.weight_version
        draws = _draws(setup.device)
        refused = caught(engine.optimizer_step)
        problem = (
            f"after a load gave {refused!r}, not EngineStateError: "
            "a gradient of before the load was kept"
        )
        must(
            isinstance(refused, EngineStateError),
            "optimizer_step",
            problem,
            where=f"rank {engine.topology.rank}",
        )
        outputs = [step(engine, setup, batch) for batch in batches]
        save(engine, folder / "resumed")
        return (outputs, draws, digest(whole_weights(engine))), info, version


def _resumes(target: Target, model: Path, **sections: Any) -> Path:
    """Require a resumed run to equal the one that went on, and return the checkpoints' folder."""
    folder = target.scratch()
    batches = _batches()[:6]
    config = target.config(model, **{"optimizer": OPTIMIZER, "schedule": SCHEDULE, **sections})
    went_on = target.run(save_and_go_on, config, batches=batches, at=3, folder=folder)
    # Another seed: nothing of the old run but the checkpoint may be needed.
    resumed = target.run(resume, replace(config, seed=5), batches=batches[3:], folder=folder)
    for rank, (first, (again, info, version)) in enumerate(zip(went_on, resumed, strict=True)):
        where = f"rank {rank}"
        finite = all(math.isfinite(output.loss) and output.skipped is None for output in again[0])
        must(
            finite,
            "train outputs",
            f"not finite, or skipped, after the load: {again[0]}",
            where=where,
        )
        must(
            again[0] == first[0],
            "train outputs",
            f"{again[0]} after the load, {first[0]} without",
            where=where,
        )
        must(
            again[1] == first[1],
            "generators",
            f"{again[1]} after the load, {first[1]} without",
            where=where,
        )
        must(
            again[2] == first[2],
            "weights",
            "differ at the end from those of the run that went on",
            where=where,
        )
        must(
            isinstance(info, CheckpointInfo),
            "load_checkpoint",
            f"returned a {type(info).__name__}",
            where=where,
        )
        must(
            info.step == 3 and version == 3,
            "step",
            f"{info.step}, version {version}, not 3",
            where=where,
        )
        must(
            dict(info.extra) == _EXTRA,
            "extra",
            f"{info.extra}",
            where=where,
        )
    if Capability.PORTABLE_CHECKPOINT in target.capabilities:
        assert_same_state(folder / "resumed", folder / "end", name="state after resuming")
    return folder


@case(id="checkpoint.resume_bitwise", model_types=TYPES, quick=True)
def resume_bitwise(target: Target) -> None:
    """A run that is saved, loaded and continued MUST equal the one that went on, bit for bit.

    A fresh engine loads it, with AdamW and with SGD's momentum. Compared are weights,
    moments, losses, schedule, ``weight_version``, every rank's generators and the caller's
    ``extra``. A gradient that was there before the load is dropped.

    If this fails: the optimizer is not restored, or steps once with zero gradients when
    it is (NeMo-RL #3171, #3345, Megatron-Bridge #5680, Automodel #3191); the schedule
    starts again.
    """
    _resumes(target, target.model())
    if target.model_type == LM:
        sgd = OptimizerConfig(name="torch.optim.SGD", lr=1e-3, kwargs={"momentum": 0.9})
        _resumes(target, target.model(), optimizer=sgd)


Stepped = tuple[list[TrainOutput], str]


def save_twice(setup: Setup, batches: Sequence[PackedDocuments], folder: Path) -> list[Stepped]:
    """Save after the first step and after the second, and go on.

    Return the outputs since each save, and the last weights' digest.
    """
    with opened(setup) as engine:
        outputs = []
        for index, batch in enumerate(batches):
            outputs.append(step(engine, setup, batch))
            if index < 2:
                save(engine, folder / f"step-{index + 9}", steps=index + 1)
        last = digest(whole_weights(engine))
        return [(outputs[done:], last) for done in (1, 2)]


def load_when_stepped(
    setup: Setup,
    batches: Sequence[PackedDocuments],
    others: Sequence[PackedDocuments],
    folder: Path,
) -> list[tuple[CheckpointInfo, int, Stepped]]:
    """Step on other documents, then load and continue from the latest checkpoint and the first."""
    found = []
    with opened(setup) as engine:
        for batch in others:
            step(engine, setup, batch)
        for place, done in ((folder, 2), (folder / "step-9", 1)):
            info = engine.load_checkpoint(place)
            version = engine.weight_version
            outputs = [step(engine, setup, batch) for batch in batches[done:]]
            found.append((info, version, (outputs, digest(whole_weights(engine)))))
    return found


def save_over(
    setup: Setup, batches: Sequence[PackedDocuments], folder: Path
) -> tuple[list[tuple[int, str]], EngineError | None, tuple[CheckpointInfo, str]]:
    """Save twice under one name with a step in between, and load it.

    Return step and digest at each save, the error of the second one, and what is loaded.
    """
    with opened(setup) as engine:
        states = list[tuple[int, str]]()
        error = None
        for index, batch in enumerate(batches):
            step(engine, setup, batch)
            states.append((engine.weight_version, digest(whole_weights(engine))))
            try:
                number = engine.save_checkpoint(folder, extra={"save": index}).result().step
                must(number == index + 1, "save", f"says step {number}, not {index + 1}")
            except EngineError as raised:
                error = raised.with_traceback(None)
                must(index == 1, "save", f"fails under a new name: {raised}")
        info = engine.load_checkpoint(folder)
        return states, error, (info, digest(whole_weights(engine)))


def _replaces_or_refuses(target: Target, config: EngineConfig) -> None:
    """Require a save under the name of an earlier one to replace it whole, or to be refused."""
    folder = target.scratch() / "same"
    ranks = target.run(save_over, config, batches=_batches()[:2], folder=folder)
    refused = any(error is not None for _, error, _ in ranks)
    if refused:
        errors = [error for _, error, _ in ranks]
        raised_everywhere("a save under an earlier one's name", errors, EngineError)
    kept = 0 if refused else 1
    for rank, (states, _, (info, loaded)) in enumerate(ranks):
        got = (info.step, dict(info.extra), loaded)
        want = (states[kept][0], {"save": kept}, states[kept][1])
        problem = "is not the second one, which was not refused"
        must(got == want, "save under an earlier one's name", problem, where=f"rank {rank}")


@case(id="checkpoint.into_stepped", model_types=TYPES, quick=True)
def into_stepped(target: Target) -> None:
    """A load into an engine that has stepped MUST replace all of its state, bit for bit.

    Weights, moments, their step count, schedule and version are the checkpoint's: the run
    goes on as the one that saved it. The folder's latest checkpoint is ``step-10``, though
    ``latest`` names ``step-9``, as after a kill between rename and replacement. A save under
    the name of an earlier one replaces it whole, or is refused.

    If this fails: a second save under a name is not written; the step count or moments of
    before are kept, which no fresh engine shows, or names are compared as text.
    """
    folder = target.scratch()
    batches = _batches()[:4]
    config = target.config(target.model(), optimizer=OPTIMIZER, schedule=SCHEDULE)
    went_on = target.run(save_twice, config, batches=batches, folder=folder)
    (folder / "latest").write_text("step-9")
    others = [documents(46 + index, "equal") for index in range(5)]
    ranks = target.run(load_when_stepped, config, batches=batches, others=others, folder=folder)
    for rank, loads in enumerate(ranks):
        where = f"rank {rank}"
        names = ("the latest checkpoint", "an earlier checkpoint")
        for name, done, (info, version, (outputs, last)) in zip(names, (2, 1), loads, strict=True):
            saved = dict(info.extra)
            must(saved == {"steps": done}, name, f"extra {saved}, not {done} steps", where=where)
            steps = (info.step, version)
            must(
                info.path.name == f"step-{done + 8}",
                name,
                f"is said to be {info.path}",
                where=where,
            )
            must(steps == (done, done), name, f"step and version {steps}, not {done}", where=where)
            want, end = went_on[rank][done - 1]
            problem = f"{outputs} after the load, {want} without"
            must(outputs == want, f"train outputs after {name}", problem, where=where)
            must(last == end, f"weights after {name}", "differ from the other run's", where=where)
    if target.is_asked_since("1.3"):
        _replaces_or_refuses(target, config)


@case(id="checkpoint.resume_bfloat16", requires=(Capability.BF16,), model_types=TYPES)
def resume_bfloat16(target: Target) -> None:
    """A run in bfloat16 MUST resume bit for bit as well, with moments in the masters' dtype.

    With bfloat16 masters, whose moments must stay finite, and with float32 masters, whose
    moments must not be rounded. bfloat16 masters load a checkpoint of float32 ones.

    If this fails: moments become NaN when they are restored (NeMo-RL #3544), as by a
    read in another dtype, or they have the computation's dtype, not the masters'.
    """
    for master in ("bfloat16", "float32"):
        precision = Precision(master=master, compute="bfloat16")
        folder = _resumes(target, target.model(), precision=precision)
        if Capability.PORTABLE_CHECKPOINT in target.capabilities:
            _moments_have_dtype(folder / "resumed", getattr(torch, master))
    if Capability.PORTABLE_CHECKPOINT in target.capabilities:
        _takes_other_masters(target, folder / "end")


def _takes_other_masters(target: Target, source: Path) -> None:
    """Require bfloat16 masters to take the moments of float32 ones in their own dtype."""
    precision = Precision(master="bfloat16", compute="bfloat16")
    config = target.config(
        target.model(), optimizer=OPTIMIZER, schedule=SCHEDULE, precision=precision
    )
    folder = target.scratch() / "other"
    target.run(train, config, batches=_batches()[6:7], load=source, save_to=folder)
    _moments_have_dtype(folder, torch.bfloat16)


def _moments_have_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Require every moment in a dtype, and float32 ones that are more than rounded values."""
    moments = {k: v for k, v in read_state(folder).items() if k.startswith("optim.") and v.dim()}
    for key, moment in moments.items():
        must(
            moment.dtype == dtype, "moments", f"{moment.dtype}, the masters are {dtype}", where=key
        )
        rounded = dtype == torch.float32 and torch.equal(moment, moment.bfloat16().float())
        must(not rounded, "moments", "hold bfloat16 values only", where=key)


@case(id="checkpoint.resume_moe", requires=(Capability.MOE,), world=(1, 2))
def resume_moe(target: Target) -> None:
    """A mixture of experts MUST resume bit for bit as well.

    If this fails: moments of fused experts are saved in another order than they are
    read.
    """
    _resumes(target, target.model(family="qwen3_moe", tied=False))


@case(id="checkpoint.keys", requires=PORTABLE, model_types=TYPES, quick=True)
def keys(target: Target) -> float:
    """A checkpoint MUST hold the oracle's weights and moments, once, under Hugging Face names.

    Tied weights are stored once, too.

    If this fails: local layer numbers or a wrapper's prefix in the names (Megatron-LM
    #7452); moments of a padded shard; a step count that pre-initialization has moved
    (Automodel #3191, Megatron-LM #5974).
    """
    model = target.model()
    folder = target.scratch()
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    ranks = target.run(train, config, batches=_batches()[:3], save_to=folder / "c")
    state = read_state(folder / "c")
    want = _expected(model, 3)
    names = set(want.params)
    fields = ("exp_avg", "exp_avg_sq", "step")
    expected = {f"model.{n}" for n in names} | {
        f"optim.{n}.{field}" for n in names for field in fields
    }
    must(set(state) == expected, "keys", f"{sorted(set(state) ^ expected)[:6]} on one side only")
    manifest = read_manifest(folder / "c")
    must(
        manifest["step"] == 3 and manifest["world_size"] == target.world,
        "manifest",
        "step or world size is wrong",
    )
    assert_bitwise(
        {n: state[f"model.{n}"] for n in names},
        {n: ranks[0].weights[n] for n in names},
        name="saved weights",
    )
    others = {key: t.dtype for key, t in state.items() if t.dtype != torch.float32}
    must(not others, "dtypes", f"not float32: {sorted(others.items())[:3]}")
    must(
        all(float(state[f"optim.{n}.step"]) == 3 for n in names),
        "optim step",
        "is not 3 everywhere",
    )
    return moments_match(target, state, want)


@case(id="checkpoint.across_worlds", requires=PORTABLE, world=(2, 4), model_types=TYPES)
def across_worlds(target: Target) -> float:
    """A checkpoint MUST load bit for bit in other worlds and layouts, and train on as the oracle.

    From one rank to several, through every declared layout, and back to one.

    If this fails: shards are stored by rank, not by place (verl, miles and AReaL state
    it as a limit); names are those of a rank's own layers (Megatron-LM #7452, NeMo-RL
    #671).
    """
    model = target.model()
    folder = target.scratch()
    base = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    stages = [
        (1, Parallelism()),
        *((target.world, layout) for layout in _layouts(target)),
        (1, Parallelism()),
    ]
    margins = []
    source = None
    batches = _batches()
    for index, (world, layout) in enumerate(stages):
        place = folder / f"step-{index}"
        at = target.with_world(world)
        config = replace(base, parallelism=layout)
        if source is not None:
            loaded = at.run(train, config, batches=[], load=source)
            state = read_state(source)
            assert_bitwise(
                loaded[0].weights,
                {n: state[f"model.{n}"] for n in loaded[0].weights},
                name="loaded weights",
            )
        ranks = at.run(train, config, batches=[batches[index]], load=source, save_to=place)
        margins.append(_stage_matches(at, ranks, _expected(model, index + 1), index))
        source = place
    return max(margins)


def _layouts(target: Target) -> list[Parallelism]:
    layouts = [Parallelism()]
    if target.model_type == VALUE:
        return layouts
    if Capability.ULYSSES in target.capabilities:
        layouts.append(Parallelism(ulysses=target.world))
    if Capability.HSDP in target.capabilities:
        layouts.append(Parallelism(dp_replicate=2))
    return layouts


def _stage_matches(
    target: Target, ranks: Sequence[Trained], want: TrainResult, index: int
) -> float:
    same_on_all_ranks(ranks)
    got = ranks[0].outputs[0]
    exact = want.steps[index]
    must(
        got.lr == exact.lr or abs(got.lr - exact.lr) < 1e-12,
        "lr",
        f"{got.lr}, the schedule says {exact.lr}",
    )
    must(
        ranks[0].version == index + 1,
        "weight_version",
        f"{ranks[0].version} after {index + 1} steps",
    )
    return max(
        assert_scalar_close("loss", got.loss, exact.loss, target.tolerance("loss")),
        assert_scalar_close(
            "grad_norm", got.grad_norm, exact.grad_norm, target.tolerance("grad_norm")
        ),
        assert_weights_close(
            ranks[0].weights, want.params, weight_tolerance(want, target.torch_dtype)
        ),
    )


# Further runs in which a save may still be pending when its call returns.
_LOOKS = 2


def _remains(folder: Path) -> None:
    """Leave the remains of a killed save.

    The writer removes them first, which takes longer than a step.
    """
    folder.mkdir()
    for index in range(20_000):
        (folder / str(index)).touch()


def save_while_training(
    setup: Setup, batches: Sequence[PackedDocuments], folder: Path
) -> tuple[Trained, bool]:
    """Save without waiting, step meanwhile, save again, and close, which must wait for the save.

    Return the results, and whether the first save was still to be written behind its call.
    """
    with opened(setup) as engine:
        outputs = [step(engine, setup, batches[0])]
        if engine.topology.rank == 0:
            _remains(folder / "first.partial")
        position = {"epoch": 1, "seen": [3]}
        first = engine.save_checkpoint(folder / "first", extra={"data": position})
        pending = not first.done()
        # The caller goes on with its own objects.
        position["epoch"] = 2
        position["seen"].append(4)
        _done_when_written(first, folder / "first")
        outputs += [step(engine, setup, batch) for batch in batches[1:]]
        number = first.result().step
        must(number == 1 and first.done(), "handle", f"step {number}, done: {first.done()}")
        _done_when_written(first, folder / "first")
        result = summary(engine, outputs)
        engine.save_checkpoint(folder / "last")
        return result, pending


def _returns_first(
    target: Target,
    config: EngineConfig,
    batches: Sequence[PackedDocuments],
    pending: Sequence[bool],
) -> None:
    """Require a save that is still to be written when its call returns, in one of several runs.

    On a busy machine a thread may have written everything before the caller looks; a call that
    writes the files itself never returns earlier.
    """
    for _ in range(_LOOKS):
        if all(pending):
            return
        runs = target.run(save_while_training, config, batches=batches, folder=target.scratch())
        pending = [now for _, now in runs]
    must(all(pending), "save", "returns when its files are written, with checkpoint.async_save")


def _done_when_written(handle: CheckpointHandle, folder: Path) -> None:
    # Asked in this order: a save may end between the two.
    early = handle.done() and not (folder / "manifest.json").is_file()
    must(
        not early,
        "handle",
        "says that the save is done, and there is no manifest.json",
        where=str(folder),
    )


@case(
    id="checkpoint.asynchronous",
    requires=(Capability.ASYNC_CHECKPOINT, *PORTABLE),
    model_types=TYPES,
)
def asynchronous(target: Target) -> float:
    """An asynchronous save MUST hold the state at its call, and ``close`` MUST wait for it.

    The state includes the caller's ``extra``, in all its parts. Its handle is done when
    the checkpoint stands under its final name, not before. The call returns before that.

    If this fails: the call itself writes the files; the writer reads live tensors that the next
    step changes, or the caller's own lists.
    """
    model = target.model()
    folder = target.scratch()
    batches = _batches()[:3]
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    later = replace(config, checkpoint=CheckpointConfig(async_save=True))
    runs = target.run(save_while_training, later, batches=batches, folder=folder)
    ranks = [trained for trained, _ in runs]
    if target.is_asked_since("1.3"):
        _returns_first(target, later, batches, [pending for _, pending in runs])
    plain = target.run(train, config, batches=batches[:1], save_to=folder / "plain")
    all_steps = target.run(train, config, batches=batches, save_to=folder / "end")
    must(
        plain[0].outputs[0] == ranks[0].outputs[0],
        "train output",
        "an asynchronous engine trains differently",
    )
    assert_bitwise(
        read_state(folder / "first"), read_state(folder / "plain"), name="state at the call"
    )
    kept = read_manifest(folder / "first")["extra"]
    must(
        kept == {"data": {"epoch": 1, "seen": [3]}},
        "extra",
        f"{kept}: changed by the caller after the call",
    )
    must(
        all_steps[0].digest == ranks[0].digest,
        "weights",
        "training during a save differs from training without",
    )
    return assert_bitwise(
        read_state(folder / "last"), read_state(folder / "end"), name="state at close"
    )


class _HeldDisk:
    """A disk on which background threads of this process wait at each fsync until ``let_go``.

    An engine whose step waits for the files would wait for ever: the disk goes on by itself after
    a while.
    """

    def __init__(self) -> None:
        self._gone = threading.Event()
        self._caller = threading.get_ident()
        self._fsync = os.fsync

    def __enter__(self) -> Self:
        os.fsync = self._wait_and_sync
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        os.fsync = self._fsync

    def _wait_and_sync(self, handle: int) -> None:
        if threading.get_ident() != self._caller:
            self._gone.wait(_HELD_SECONDS)
        self._fsync(handle)

    def let_go(self) -> None:
        """Let the waiting threads go on."""
        self._gone.set()


def step_during_save(setup: Setup, batches: Sequence[PackedDocuments], folder: Path) -> Trained:
    """Take steps while rank 0 still writes its files, and the other ranks wait for it."""
    with opened(setup) as engine, ExitStack() as stack:
        outputs = [step(engine, setup, batches[0])]
        held = _HeldDisk() if engine.topology.rank == 0 else None
        if held:
            stack.enter_context(held)
        handle = engine.save_checkpoint(folder / "during")
        outputs += [step(engine, setup, batch) for batch in batches[1:]]
        if held:
            held.let_go()
        handle.result()
        return summary(engine, outputs)


@case(
    id="checkpoint.asynchronous_steps",
    since="1.4",
    requires=(Capability.ASYNC_CHECKPOINT, *PORTABLE),
    world=(2, 4),
)
def asynchronous_steps(target: Target) -> float:
    """Steps while the ranks of an asynchronous save wait for each other MUST be as without it.

    So is the checkpoint, which rank 0 is slow to write.

    If this fails: the save's ranks exchange messages in the process group of the training, where
    each takes the other's.
    """
    model = target.model()
    folder = target.scratch()
    batches = _batches()[:3]
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    later = replace(config, checkpoint=CheckpointConfig(async_save=True))
    ranks: list[Trained] = target.run(step_during_save, later, batches=batches, folder=folder)
    plain: list[Trained] = target.run(train, config, batches=batches)
    target.run(train, config, batches=batches[:1], save_to=folder / "plain")
    for rank, (got, want) in enumerate(zip(ranks, plain, strict=True)):
        same_step(got, want, rank, after="an asynchronous save")
    return assert_bitwise(
        read_state(folder / "during"), read_state(folder / "plain"), name="state at the call"
    )


def fail_behind(
    setup: Setup, batch: PackedDocuments, folder: Path
) -> tuple[list[EngineError | None], int, Trained]:
    """Let saves fail unnoticed and return the errors of handle, next call and ``close``.

    A step and a good save come before the last failure.
    """
    with opened(setup) as engine:
        if engine.topology.rank == 0:
            (folder / "file").write_text("no folder")
        errors = [caught(lambda: engine.save_checkpoint(folder / "file" / "one").result())]
        errors.append(caught(lambda: engine.save_checkpoint(folder / "good")))
        engine.save_checkpoint(folder / "file" / "two")
        errors.append(caught(lambda: engine.save_checkpoint(folder / "good")))
        output = step(engine, setup, batch)
        saved = engine.save_checkpoint(folder / "good").result()
        result = summary(engine, [output])
        engine.save_checkpoint(folder / "file" / "three")
        errors.append(caught(engine.close))
        return errors, saved.step, result


@case(
    id="checkpoint.asynchronous_failure",
    requires=(Capability.ASYNC_CHECKPOINT,),
    model_types=TYPES,
    quick=True,
)
def asynchronous_failure(target: Target) -> float:
    """A save that fails in the background MUST be raised by its handle and by the next call.

    Then the engine goes on. ``close`` is such a call, too.

    If this fails: training runs for days without a checkpoint, or ends without the last
    one and says nothing; the failed save is raised for ever, or hangs the ranks that
    wrote their own part.
    """
    model = target.model()
    batch = documents(59, "uneven")
    config = target.config(model, checkpoint=CheckpointConfig(async_save=True))
    ranks = target.run(fail_behind, config, batch=batch, folder=target.scratch())
    calls = ("the handle", "the next call after the handle", "the next call", "close")
    for index, name in enumerate(calls):
        raised_everywhere(
            name, [errors[index] for errors, _, _ in ranks], CheckpointWriteError, faulty=[0]
        )
    must(
        all(number == 1 for _, number, _ in ranks), "step", f"{ranks[0][1]} in the good save, not 1"
    )
    want = oracle_training(str(model), (batch,))
    return training_matches(
        target, [trained for _, _, trained in ranks], want, oracle_of(str(model))
    )
