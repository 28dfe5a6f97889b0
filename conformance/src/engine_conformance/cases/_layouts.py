"""Comparison of a layout with one rank: outputs per token, updates per weight, and shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, Parallelism
from engine_api.errors import ConfigError, EngineError
from engine_conformance.cases._case import LM, VALUE
from engine_conformance.cases._expect import (
    asking,
    documents,
    oracle_of,
    oracle_training,
    outputs_match,
    raised_everywhere,
    trained_on,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    Trained,
    caught,
    infer_on_rank,
    opened,
    step,
    summary,
)
from engine_conformance.cases._shards import Shards, shards_make_the_whole
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.fixtures import LENGTHS, PackedDocuments
from engine_conformance.oracle import AdamWConfig

__all__ = ["ADAMW", "MODEL_PARALLEL", "OPTIMIZER", "initialize", "layout_holds", "right_or_refused"]

# Capability -> the field of `Parallelism` that asks for it, where ranks share documents.
MODEL_PARALLEL = {
    Capability.TP: "tp",
    Capability.PP: "pp",
    Capability.CP: "cp",
    Capability.ULYSSES: "ulysses",
}
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_norm=2.0, eps=EPS)
ADAMW = AdamWConfig(weight_decay=0.0, max_grad_norm=2.0, eps=EPS)
_TEMPERATURE = {LM: 0.8, VALUE: 1.0}
_MEMORY = Memory(max_tokens=32, logit_chunk=7)  # several micro-batches, chunks that do not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRun:
    """One rank's outputs, its steps, and its shards after them.

    There are no shards where they are not declared.
    """

    inferred: list[RankOutputs]
    trained: Trained = field(repr=False)
    shards: Shards = field(repr=False)


def run(setup: Setup, calls: Sequence[InferCall], batches: Sequence[PackedDocuments]) -> LayoutRun:
    """Run inference, training and the export of shards in one engine."""
    with opened(setup) as engine:
        inferred = [infer_on_rank(engine, call, setup.device) for call in calls]
        outputs = [step(engine, setup, batch) for batch in batches]
        shards: Shards = []
        if Capability.EXPORT_SHARDS in engine.capabilities:
            for name, shard, spec in engine.get_per_tensor_param_shard():
                shards.append((name, shard.detach().to("cpu", copy=True), spec))
        return LayoutRun(inferred=inferred, trained=summary(engine, outputs), shards=shards)


def layout_holds(
    target: Target,
    model: Path,
    layout: Parallelism,
    *,
    lengths: Sequence[str] = ("uneven", "skewed"),
) -> float:
    """Compare inference on all sets of lengths and steps of clipped AdamW with the oracle.

    The shards are checked last. Ranks that share documents must return bit for bit the
    same (`merged`), and all must export the same bits.
    """
    oracle = oracle_of(str(model))
    calls = [
        asking(target, documents(70, one), temperature=_TEMPERATURE[target.model_type])
        for one in LENGTHS
    ]
    batches = tuple(trained_on(target, oracle, 71 + i, one) for i, one in enumerate(lengths))
    config = target.config(model, parallelism=layout, memory=_MEMORY, optimizer=OPTIMIZER)
    rows: list[LayoutRun] = target.run(run, config, calls=calls, batches=batches)
    margins = [
        outputs_match(target, oracle, call, [row.inferred[i] for row in rows])
        for i, call in enumerate(calls)
    ]
    want = oracle_training(str(model), batches, optimizer=ADAMW)
    margins.append(training_matches(target, [row.trained for row in rows], want, oracle))
    if any(row.shards for row in rows):
        whole = rows[0].trained.weights
        shards_make_the_whole([(row.shards, list(row.trained.order), whole) for row in rows])
    return max(margins)


def initialize(setup: Setup) -> EngineError | None:
    """Return the error of building this configuration, if any."""
    engine = setup.create()
    try:
        return caught(engine.initialize)
    finally:
        engine.close()


def right_or_refused(target: Target, model: Path, layout: Parallelism) -> float:
    """Require that a layout that does not divide the model is either right or refused.

    A refusal is a `ConfigError` on every rank, after which the ranks stay usable.
    """
    errors = target.run(initialize, target.config(model, parallelism=layout), deadline=60.0)
    if all(error is None for error in errors):
        return layout_holds(target, model, layout, lengths=("uneven",))
    raised_everywhere(f"{layout}", errors, ConfigError)
    return 0.0
