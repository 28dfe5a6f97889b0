"""Runs that continue from a checkpoint in another layout or engine, or from a made-up state.

The suite itself writes that state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from engine_api.config import OptimizerConfig, Parallelism, ScheduleConfig
from engine_api.results import TrainOutput
from engine_conformance.cases._case import must
from engine_conformance.cases._expect import (
    oracle_of,
    oracle_training,
    same_on_all_ranks,
    trained_on,
)
from engine_conformance.cases._ranks import (
    Trained,
    digest,
    opened,
    save,
    step,
    summary,
    whole_weights,
)
from engine_conformance.cases._state import read_state
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import (
    ConformanceFailure,
    assert_bitwise,
    assert_names,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import (
    AdamWConfig,
    AdamWState,
    Errors,
    Schedule,
    StepResult,
    TrainResult,
)
from engine_conformance.tolerances import moment_tolerance, weight_tolerance

__all__ = [
    "ADAMW",
    "OPTIMIZER",
    "RATES",
    "SCHEDULE",
    "Leg",
    "Stage",
    "journey",
    "leg",
    "leg_matches",
    "moments_match",
    "start_of",
    "state_matches",
]

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, eps=EPS)
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=2, total_steps=12)
# The same for the oracle.
ADAMW = AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
RATES = Schedule(kind="cosine", lr=1e-3, warmup_steps=2, total_steps=12)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """Results of one rank's part of a run: weights and version after the load, then its steps."""

    version: int
    digest: str
    start: dict[str, Tensor] = field(repr=False)  # of rank 0 only
    trained: Trained = field(repr=False)


def leg(
    setup: Setup,
    batches: Sequence[PackedDocuments],
    *,
    load: Path | None = None,
    save_to: Path | None = None,
) -> Leg:
    """Load, take one step per batch, and save."""
    with opened(setup) as engine:
        if load is not None:
            engine.load_checkpoint(load)
        version = engine.weight_version
        start = whole_weights(engine)
        outputs = [step(engine, setup, batch) for batch in batches]
        if save_to is not None:
            save(engine, save_to)
        return Leg(
            version=version,
            digest=digest(start),
            start=start if engine.topology.rank == 0 else {},
            trained=summary(engine, outputs),
        )


def leg_matches(target: Target, legs: Sequence[Leg], want: TrainResult, *, before: int) -> float:
    """Require that this leg's steps and final weights are the last ones of ``want``.

    Compared are loss, norm, rate and version of each step, then every weight.
    """
    ranks = [one.trained for one in legs]
    same_on_all_ranks(ranks)
    must(len({one.digest for one in legs}) == 1, "loaded weights", "differ between ranks")
    must(
        all(one.version == before for one in legs),
        "weight_version",
        f"{legs[0].version} after the load, not {before}",
    )
    outputs = ranks[0].outputs
    layers = want.oracle.config.num_layers
    margins = [
        _step_matches(target, got, exact, version=before + index + 1, layers=layers)
        for index, (got, exact) in enumerate(zip(outputs, want.steps[-len(outputs) :], strict=True))
    ]
    bounds = weight_tolerance(want, target.torch_dtype, layers=layers)
    return max(*margins, assert_weights_close(ranks[0].weights, want.params, bounds))


def _step_matches(
    target: Target, got: TrainOutput, exact: StepResult, *, version: int, layers: int
) -> float:
    where = f"step {version - 1}"
    must(got.skipped is None, "train output", f"skipped: {got.skipped}", where=where)
    must(
        got.weight_version == version,
        "weight_version",
        f"{got.weight_version}, not {version}",
        where=where,
    )
    must(
        abs(got.lr - exact.lr) <= 1e-12,
        "lr",
        f"{got.lr}, the schedule says {exact.lr}",
        where=where,
    )
    loss = target.tolerance("loss", layers=layers)
    norm = target.tolerance("grad_norm", layers=layers)
    return max(
        assert_scalar_close(f"loss of {where}", got.loss, exact.loss, loss),
        assert_scalar_close(f"grad_norm of {where}", got.grad_norm, exact.grad_norm, norm),
    )


def state_matches(target: Target, folder: Path, want: TrainResult) -> float:
    """Require that a checkpoint holds exactly the oracle's names, its moments and its step.

    Return the margin.
    """
    state = read_state(folder)
    names = list(want.params)
    fields = (*_MOMENTS, "step")
    expected = [f"model.{n}" for n in names] + [f"optim.{n}.{one}" for n in names for one in fields]
    assert_names("checkpoint", state, dict.fromkeys(expected))
    steps = {float(state[f"optim.{n}.step"]) for n in names}
    must(
        steps == {float(want.optimizer.step)},
        "optim step",
        f"{sorted(steps)}, the oracle made {want.optimizer.step}",
    )
    return moments_match(target, state, want)


def moments_match(target: Target, state: Mapping[str, Tensor], want: TrainResult) -> float:
    """Compare a checkpoint's moments with the oracle's and return the margin."""
    bounds = moment_tolerance(want, target.torch_dtype, layers=want.oracle.config.num_layers)
    margins = []
    for one in _MOMENTS:
        exact: dict[str, Tensor] = getattr(want.optimizer, one)
        got = {n: state[f"optim.{n}.{one}"] for n in exact}
        margins.append(assert_weights_close(got, exact, bounds[one], name=one))
    return max(margins)


def start_of(state: Mapping[str, Tensor], model: Path) -> TrainResult:
    """Return the oracle in the state of a checkpoint: weights, moments and step as stored.

    Raises:
        ConformanceFailure: if a weight, moment or step is absent, or the steps are not the same for
            all weights.
    """
    plain = oracle_of(str(model))
    parts = {"params": _named(state, plain.params, "model.{}")}
    parts |= {one: _named(state, plain.params, f"optim.{{}}.{one}") for one in _MOMENTS}
    steps = {float(step) for step in _named(state, plain.params, "optim.{}.step").values()}
    must(len(steps) == 1, "optim step", f"{sorted(steps)}: not the same for all weights")
    moments = AdamWState(step=int(steps.pop()), **{one: parts[one] for one in _MOMENTS})
    oracle = replace(plain, params=parts["params"])
    still = {n: Errors.none(p) for n, p in oracle.params.items()}
    return TrainResult(
        steps=(),
        oracle=oracle,
        optimizer=moments,
        config=ADAMW,
        errors=still,
    )


def _named(state: Mapping[str, Tensor], names: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    absent = [name for name in names if key.format(name) not in state]
    if absent:
        raise ConformanceFailure("checkpoint", f"no {key.format(absent[0])}")
    return {name: state[key.format(name)].double() for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stretch of a run: the engine that trains, and the layout of its ranks."""

    target: Target
    layout: Parallelism = field(default_factory=Parallelism)

    def __str__(self) -> str:
        return f"{self.target.backend}, world {self.target.world}, {self.layout}"


def journey(model: Path, stages: Sequence[Stage], *, steps: int = 1) -> float:
    """Compare a run that changes engine or layout with the oracle's uninterrupted run.

    A checkpoint hands the run over after every ``steps`` steps. What is loaded must be
    what was saved, bit for bit; names, moments, step and schedule must be the oracle's.
    """
    first = stages[0].target
    oracle = oracle_of(str(model))
    names = ("uneven", "equal", "skewed")
    batches = tuple(
        trained_on(first, oracle, 60 + i, names[i % 3]) for i in range(steps * len(stages))
    )
    folder = first.scratch()
    source = None
    margins = list[float]()
    for index, stage in enumerate(stages):
        done = index * steps
        goal = (index + 1) * steps
        place = folder / f"stage-{index}"
        config = stage.target.config(
            model, optimizer=OPTIMIZER, schedule=SCHEDULE, parallelism=stage.layout
        )
        legs = stage.target.run(leg, config, batches=batches[done:goal], load=source, save_to=place)
        if source is not None:
            saved = read_state(source)
            kept = {
                name: saved[f"model.{name}"] for name in legs[0].start if f"model.{name}" in saved
            }
            assert_bitwise(legs[0].start, kept, name=f"weights loaded by {stage}")
        want = oracle_training(str(model), batches[:goal], optimizer=ADAMW, schedule=RATES)
        margins += [
            leg_matches(stage.target, legs, want, before=done),
            state_matches(stage.target, place, want),
        ]
        source = place
    return max(margins)
