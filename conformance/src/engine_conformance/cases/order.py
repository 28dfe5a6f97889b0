"""The order of calls as one case: seeded sequences on two engines, compared after each call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_api import errors
from engine_api.config import OptimizerConfig, ScheduleConfig
from engine_api.errors import EngineError
from engine_api.results import ForwardBackwardOutput, StepOutput, TrainOutput
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import looks_like, oracle_of, raised_everywhere
from engine_conformance.cases._orders import (
    ExpectedResult,
    Operation,
    OperationResult,
    call_of,
    expectations,
    operate,
    sequence,
)
from engine_conformance.cases._target import EPS, Target
from engine_conformance.compare import ConformanceFailure, assert_scalar_close, assert_weights_close
from engine_conformance.tolerances import Tolerance, weight_tolerance

TYPES = (LM, VALUE)
_SEEDS = (2, 3, 4)


@case(id="steps.call_order", since="1.3", model_types=TYPES, quick=True)
def call_order(target: Target) -> float:
    """A gradient that waits for its step MUST be that of the calls since the last one, no other.

    One seeded sequence of about fifty calls on two engines of one process: calls with
    denominators and temperatures of their own, without loss tokens, with a loss that is
    NaN or raises, bad batches, inference, saves and loads, ``train_batch`` and steps.
    Loss, gradient norm, rate, metrics, weights and version are compared with the oracle
    after each.

    If this fails: the last call's denominator divides what calls before it left; only
    the last call's loss is looked at; a call without loss tokens, a skipped step or
    another engine leaves something behind.
    """
    return _follows(target, 1)


@case(id="steps.call_orders", since="1.3", model_types=TYPES)
def call_orders(target: Target) -> float:
    """Further sequences of calls MUST each end as the oracle says, in whatever order they come.

    Three more seeds of ``steps.call_order``.

    If this fails: see ``steps.call_order``; the failure lists the calls that led to it.
    """
    return max(_follows(target, seed) for seed in _SEEDS)


def _follows(target: Target, seed: int) -> float:
    operations = sequence(seed, target.model_type)
    model = target.model()
    config = target.config(
        model,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, eps=EPS),
        schedule=ScheduleConfig(name="linear", warmup_steps=2, total_steps=12, min_ratio=0.1),
    )
    ranks = target.run(operate, config, operations=operations, folder=target.scratch())
    wanted = expectations(str(model), operations)
    digests: dict[object, str] = {}
    margins = [0.0]
    for index, (one, want) in enumerate(zip(operations, wanted, strict=True)):
        rows = [seen[index] for seen in ranks]
        try:
            _same_on_all_ranks(rows)
            _raised(target, one, want, rows)
            _moves(one, want, rows[0], digests)
            margins.append(_matches(target, one, want, rows))
        except ConformanceFailure as failure:
            raise _located(failure, operations[: index + 1], seed) from failure
    return max(margins)


def _located(
    failure: ConformanceFailure, done: Sequence[Operation], seed: int
) -> ConformanceFailure:
    """Return the failure with the calls on the same engine that led to it."""
    last = done[-1]
    led = [one.kind for one in done if one.engine == last.engine][-8:]
    where = f"call {len(done)} of sequence {seed}, {last}"
    return ConformanceFailure(
        failure.quantity,
        str(failure).partition(": ")[2],
        margin=failure.margin,
        where=f"{where}, {failure.where}" if failure.where else where,
        hints=[f"the engine's last calls were {', '.join(led)}"],
    )


def _same_on_all_ranks(rows: Sequence[OperationResult]) -> None:
    for rank, row in enumerate(rows):
        # As text, since NaN is not equal to itself.
        same = repr(row.output) == repr(rows[0].output)
        must(same, "output", f"{row.output}, rank 0 has {rows[0].output}", where=f"rank {rank}")
        same = (row.version, row.digest) == (rows[0].version, rows[0].digest)
        must(same, "export", "differs from rank 0's", where=f"rank {rank}")


def _raised(
    target: Target, one: Operation, want: ExpectedResult, rows: Sequence[OperationResult]
) -> None:
    if want.error == "KeyError":
        for rank, row in enumerate(rows):
            right = isinstance(row.error, KeyError)
            must(right, "error", f"{row.error!r}, the loss raised", where=f"rank {rank}")
        return
    if want.error:
        kind: type[EngineError] = getattr(errors, want.error)
        raised = [row.error if isinstance(row.error, EngineError) else None for row in rows]
        # Only the last rank sees its bad batch.
        faulty = [target.world - 1] if one.kind == "bad_batch" else None
        raised_everywhere(one.kind, raised, kind, faulty=faulty)
        return
    for rank, row in enumerate(rows):
        must(row.error is None, one.kind, f"raised {row.error!r}", where=f"rank {rank}")


def _moves(
    one: Operation, want: ExpectedResult, seen: OperationResult, digests: dict[object, str]
) -> None:
    """Require the weights to move by steps and loads alone, and the version to count the steps."""
    must(
        seen.version == want.version,
        "weight_version",
        f"{seen.version}, not {want.version}",
    )
    before = digests.get(one.engine)
    if one.kind == "load":
        same = seen.digest == digests[one.name]
        must(same, "weights", "are not those that were saved")
    elif want.step is None and before is not None:
        must(seen.digest == before, "weights", "were changed by a call that must not change them")
    elif want.step is not None:
        must(seen.digest != before, "weights", "were not changed by an applied step")
    digests[one.engine] = seen.digest
    if one.kind == "save":
        digests[one.name] = seen.digest


def _matches(
    target: Target, one: Operation, want: ExpectedResult, rows: Sequence[OperationResult]
) -> float:
    """Compare what the call returned, and the weights after a step, with the oracle."""
    seen = rows[0]
    margins = [0.0]
    if one.kind == "infer":
        outputs = [row.inferred for row in rows if row.inferred is not None]
        start = oracle_of(str(target.model()))
        call = call_of(one, target.model_type)
        margins.append(looks_like(target, want.oracle, start, call, outputs))
    if isinstance(seen.output, ForwardBackwardOutput | TrainOutput):
        margins.append(_loss_matches(target, one, want, seen.output))
    if isinstance(seen.output, StepOutput | TrainOutput):
        margins.append(_step_matches(target, want, seen))
    return max(margins)


def _loss_matches(
    target: Target,
    one: Operation,
    want: ExpectedResult,
    output: ForwardBackwardOutput | TrainOutput,
) -> float:
    if one.kind == "corrupted":
        must(not math.isfinite(output.loss), "loss", f"{output.loss} for a loss that is NaN")
        return 0.0
    assert want.loss is not None
    if one.kind == "masked":
        must(output.loss == 0.0, "loss", f"{output.loss}, and no token carries loss")
        return 0.0
    weight = output.metrics.get("weight")
    must(
        weight == one.documents.denominator,
        "metrics",
        f"weight {weight}, not {one.documents.denominator}",
    )
    if one.denominator is not None:
        given = output.denominator
        must(given == one.denominator, "denominator", f"{given}, the caller's is {one.denominator}")
    # The tolerance is that of a mean over the loss's tokens, of one term each.
    plain = target.tolerance("loss")
    terms = 2.0 if one.loss == "entropy" else 1.0
    tol = Tolerance(atol=plain.atol * terms / (one.denominator_factor or 1.0), rtol=plain.rtol)
    return assert_scalar_close("loss", output.loss, want.loss, tol)


def _step_matches(target: Target, want: ExpectedResult, seen: OperationResult) -> float:
    output = seen.output
    assert isinstance(output, StepOutput | TrainOutput)
    if want.skipped:
        must(bool(output.skipped), "skipped", "the step was applied, or says nothing")
        return 0.0
    must(output.skipped is None, "skipped", f"the step was not applied: {output.skipped}")
    assert want.step is not None
    assert want.result is not None
    assert seen.weights is not None, "rank 0 sends them"
    rate = abs(output.lr - want.step.lr) <= 1e-12
    must(rate, "lr", f"{output.lr}, the schedule says {want.step.lr}")
    norm = assert_scalar_close(
        "grad_norm", output.grad_norm, want.step.grad_norm, target.tolerance("grad_norm")
    )
    bounds = weight_tolerance(want.result, target.torch_dtype)
    start = oracle_of(str(target.model())).params
    return max(norm, assert_weights_close(seen.weights, want.result.params, bounds, start=start))
