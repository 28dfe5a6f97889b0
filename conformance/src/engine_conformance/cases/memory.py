"""Options that trade time for memory and must change no answer.

Recompute, offload, compile, chunks and half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory, OptimizerConfig, Precision
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    asking,
    documents,
    oracle_of,
    oracle_training,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferCall,
    Trained,
    answer,
    opened,
    save,
    step,
    summary,
    train,
)
from engine_conformance.cases._state import read_state
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.oracle import AdamWConfig
from engine_conformance.seeds import cached_by_seed

TYPES = (LM, VALUE)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, eps=EPS)


def _batches() -> tuple[PackedDocuments, ...]:
    return tuple(
        documents(85 + i, lengths) for i, lengths in enumerate(("uneven", "equal", "skewed"))
    )


def _trains(target: Target, config: EngineConfig, model: Path) -> float:
    """Compare three clipped, decayed steps with the oracle's."""
    ranks = target.run(train, config, batches=_batches())
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return training_matches(target, ranks, want, oracle_of(str(model)))


def _with(target: Target, memory: Memory, **model: object) -> float:
    folder = target.model(**model)
    return _trains(target, target.config(folder, optimizer=OPTIMIZER, memory=memory), folder)


@case(id="memory.chunks", model_types=TYPES)
def chunks(target: Target) -> float:
    """Chunked logits, padding and kept weights MUST NOT change loss, gradient or update.

    If this fails: the last chunk, which is shorter, is dropped, or padding carries
    loss.
    """
    memory = Memory(logit_chunk=3, pad_to_multiple=16, reshard_after_forward=False, max_tokens=32)
    return _with(target, memory, tied=False)


@case(id="memory.recompute", requires=(Capability.RECOMPUTE,), model_types=TYPES, quick=True)
def recompute(target: Target) -> float:
    """Recomputing activations MUST NOT change loss, gradient or update.

    If this fails: the second forward runs with other positions, or without its packing.
    """
    return _with(target, Memory(recompute="full", max_tokens=24))


@case(id="memory.offload", requires=(Capability.OFFLOAD,), model_types=TYPES, quick=True)
def offload(target: Target) -> float:
    """Weights or optimizer state on the host MUST NOT change loss, gradient norm or update.

    If this fails: a gradient norm of the host's part alone, moments that do not come
    back.
    """
    kinds = (Memory(offload_params=True), Memory(offload_optimizer=True))
    return max(
        _with(target, memory) for memory in kinds[: 1 if target.model_type == VALUE else None]
    )


@cached_by_seed
def _other_lengths() -> PackedDocuments:
    """Return documents of other lengths with as many tokens as the equal ones.

    That holds on each of two ranks, too.
    """
    return packed_documents(84, (12, 5, 4, 11))


@case(id="memory.compile", requires=(Capability.COMPILE,), world=(1, 2), slow=True)
def compiled(target: Target) -> float:
    """Compiled blocks MUST NOT change loss, gradient or update.

    The second batch has as many tokens in documents of other lengths.

    If this fails: a graph break or a new shape falls back to another attention; the
    first batch's mask is a constant of the graph.
    """
    folder = target.model(num_layers=1)
    batches = (documents(83, "equal"), _other_lengths())
    config = target.config(folder, memory=Memory(compile=True))
    ranks = target.run(train, config, batches=batches, deadline=400.0)
    return training_matches(
        target, ranks, oracle_training(str(folder), batches), oracle_of(str(folder))
    )


@case(id="memory.half_precision", requires=(Capability.BF16,), model_types=TYPES, quick=True)
def half_precision(target: Target) -> float:
    """bfloat16 on float32 masters MUST stay within its tolerance and move the float32 weights.

    If this fails: masters are rounded to bfloat16 after the step, so that small updates
    are lost.
    """
    model = target.model()
    half = replace(target, dtype="bfloat16")
    config = half.config(model, optimizer=OPTIMIZER, precision=Precision(compute="bfloat16"))
    ranks = target.run(train, config, batches=_batches())
    rounded = [n for n, w in ranks[0].weights.items() if bool((w == w.bfloat16().float()).all())]
    must(not rounded, "masters", f"{rounded[:3]} hold bfloat16 values only")
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return training_matches(half, ranks, want, oracle_of(str(model)))


def move_about(
    setup: Setup, batches: Sequence[PackedDocuments], call: InferCall, folder: Path
) -> Trained:
    """Run steps with model and optimizer moved away and back between them.

    Saves are made while they are away and at home.
    """
    with opened(setup) as engine:
        outputs = []
        for batch in batches:
            engine.to("cpu")
            engine.to(setup.device)
            engine.to("cpu", model=False, grad=False)
            engine.to(setup.device, model=False, grad=False)
            outputs.append(step(engine, setup, batch))
        before = answer(engine, call, setup.device).fields
        save(engine, folder / "home")
        engine.to("cpu")
        save(engine, folder / "away")
        engine.to(setup.device)
        assert_bitwise(
            answer(engine, call, setup.device).fields, before, name="outputs after moving"
        )
        return summary(engine, outputs)


@case(
    id="memory.to", requires=(Capability.OFFLOAD, Capability.PORTABLE_CHECKPOINT), model_types=TYPES
)
def to(target: Target) -> float:
    """Moving model and optimizer away and back MUST change nothing, and saves MUST stay whole.

    That includes a save while they are away.

    If this fails: a copy stays behind and the optimizer goes on with the other one.
    """
    model = target.model()
    folder = target.scratch()
    config = target.config(model, optimizer=OPTIMIZER)
    ranks = target.run(
        move_about, config, batches=_batches(), call=asking(target, _batches()[0]), folder=folder
    )
    assert_bitwise(
        read_state(folder / "away"), read_state(folder / "home"), name="state saved while away"
    )
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return training_matches(target, ranks, want, oracle_of(str(model)))
