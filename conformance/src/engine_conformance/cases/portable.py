"""Portable checkpoints: of an earlier release, of the suite's own writer, and of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.errors import PluginError
from engine_conformance.cases import _foreign
from engine_conformance.cases._case import LM, VALUE, SkipCase, case, must
from engine_conformance.cases._expect import oracle_training
from engine_conformance.cases._journeys import (
    ADAMW,
    OPTIMIZER,
    RATES,
    SCHEDULE,
    Leg,
    Stage,
    journey,
    leg,
    leg_matches,
    start_of,
    state_matches,
)
from engine_conformance.cases._losses import oracle_default
from engine_conformance.cases._state import read_state
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import PackedDocuments, TinyModel, packed_documents
from engine_conformance.oracle import TrainResult, train_steps

PORTABLE = (Capability.PORTABLE_CHECKPOINT,)
BOTH = (LM, VALUE)
GOLD = Path(__file__).parents[1] / "gold"


def gold_model(model_type: str) -> TinyModel:
    """Return the smallest model with grouped heads, norms of heads and a tied head.

    A value model has its own head.
    """
    value = model_type == VALUE
    return TinyModel(
        value_model=value,
        tied=not value,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        seed=7,
    )


def gold_batches(first: int, count: int) -> tuple[PackedDocuments, ...]:
    """Return steps ``first`` to ``first + count`` of the gold run and of its continuation."""
    return tuple(
        packed_documents(100 + i, (9, 1, 5, 7), vocab_size=64) for i in range(first, first + count)
    )


def _goes_on(target: Target, model: Path, source: Path, state: dict[str, Tensor]) -> float:
    """Load ``source``, export its weights, train two of the oracle's steps and save them.

    The export is bit for bit.
    """
    start = start_of(state, model)
    batches = gold_batches(3, 2)
    place = target.scratch() / "on"
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    legs: list[Leg] = target.run(leg, config, batches=batches, load=source, save_to=place)
    assert_bitwise(
        legs[0].start, {n: state[f"model.{n}"] for n in start.params}, name="loaded weights"
    )
    want = train_steps(
        start.oracle,
        batches,
        oracle_default(start.oracle),
        optimizer=ADAMW,
        schedule=RATES,
        start=start,
    )
    return max(
        leg_matches(target, legs, want, before=start.optimizer.step),
        state_matches(target, place, want),
    )


@case(id="checkpoint.gold", requires=PORTABLE, model_types=BOTH, families=("qwen3",))
def gold(target: Target) -> float:
    """An earlier release's checkpoint MUST load and export bit for bit, and train as the oracle.

    From its weights, both moments and its step; the files are part of the suite and
    never rewritten.

    If this fails: a key, a box or a field of the manifest changed its meaning without a
    new major version; the step is not restored, so that Adam's bias correction or the
    schedule begins again (Automodel #3191, Megatron-LM #5974).
    """
    folders = sorted(GOLD.glob(f"contract-*/{target.model_type}"))
    assert folders, f"no gold checkpoint of a {target.model_type}"
    margins = []
    for folder in folders:
        state = read_state(folder / "checkpoint")
        margins.append(_goes_on(target, folder / "model", folder / "checkpoint", state))
    return max(margins)


def _state_of(result: TrainResult) -> dict[str, Tensor]:
    """Return float32 tensors by canonical key."""
    state = {f"model.{name}": tensor.float() for name, tensor in result.params.items()}
    for name in result.params:
        moments = result.optimizer
        state[f"optim.{name}.exp_avg"] = moments.exp_avg[name].float()
        state[f"optim.{name}.exp_avg_sq"] = moments.exp_avg_sq[name].float()
        state[f"optim.{name}.step"] = moments.exp_avg[name].new_tensor(moments.step).float()
    return state


@case(id="checkpoint.foreign", requires=PORTABLE, model_types=BOTH)
def foreign(target: Target) -> float:
    """A checkpoint that no engine wrote MUST load and train on, whatever its boxes.

    So MUST the way back. The suite writes the oracle's weights, moments and step after
    three steps, by the format's description alone, for three ranks, in columns and
    corners; it reads the engine's own checkpoint two steps later.

    If this fails: a reader takes shards by rank or by row and not by their boxes,
    expects its own layout or its own files of ranks, or moments lose their names
    (NeMo-RL #671, Megatron-LM #7452, #5895).
    """
    model = target.model()
    done = oracle_training(str(model), gold_batches(0, 3), optimizer=ADAMW, schedule=RATES)
    state = _state_of(done)
    return _goes_on(
        target, model, _foreign.write_checkpoint(target.scratch(), state, step=3), state
    )


def _partner(target: Target, *needs: Capability) -> Target:
    """Return the second engine, data parallel over the target's ranks."""
    must(target.partner != target.backend, "partner", f"{target.partner!r} is the engine itself")
    other = target.partner_target()
    try:
        declared = other.capabilities
    except PluginError as error:
        raise SkipCase(f"{target.partner!r} cannot run here: {error}") from error
    wanted = [*PORTABLE, *needs, *((Capability.DP,) if target.world > 1 else ())]
    if missing := [str(one) for one in wanted if one not in declared]:
        raise SkipCase(f"{target.partner!r} does not declare {', '.join(missing)}")
    return other


@case(id="checkpoint.partner", requires=PORTABLE, model_types=BOTH, partner=True)
def partner(target: Target) -> float:
    """A run that passes to another engine and back MUST equal one without interruption.

    It passes by checkpoints. Weights, both moments, step and schedule, two steps in
    each engine, in the partner's own layout.

    If this fails: the optimizer stays behind (no peer offers it across backends:
    Megatron-LM #5895), names are an engine's own (NeMo-RL #671), or the state of one
    engine's generators is fed to the other's.
    """
    other = _partner(target)
    stages = [
        Stage(target=target, layout=target.layout),
        Stage(target=other),
        Stage(target=target, layout=target.layout),
    ]
    return journey(target.model(), stages, steps=2)


def _there_and_back(target: Target, layout: Parallelism, *needs: Capability, **model: Any) -> float:
    """Train two steps each on two ranks of the partner, in ``layout``, and on the partner again."""
    two = Stage(target=_partner(target.with_world(2), *needs))
    return journey(target.model(**model), [two, Stage(target=target, layout=layout), two], steps=2)


@case(id="checkpoint.partner_tp", requires=(*PORTABLE, Capability.TP), world=(2,), partner=True)
def partner_tp(target: Target) -> float:
    """Another engine's dp 2, then tensor parallelism, then dp 2 again MUST equal one run.

    Weights, both moments, step and schedule; the embedding is tied, heads are grouped.

    If this fails: moments are cut by rank and not by the box of their weight, so that
    rows are right and columns wrong.
    """
    return _there_and_back(target, Parallelism(tp=2))


@case(id="checkpoint.partner_pp", requires=(*PORTABLE, Capability.PP), world=(2,), partner=True)
def partner_pp(target: Target) -> float:
    """Another engine's dp 2, then a pipeline, then dp 2 again MUST equal one run.

    Weights, both moments, step and schedule; the tied embedding is on both stages, and
    in the checkpoint once.

    If this fails: layers are numbered within a stage (NeMo-RL #671), or the last
    stage's tied embedding has no moments.
    """
    return _there_and_back(target, Parallelism(pp=2))


@case(
    id="checkpoint.partner_tp_pp",
    requires=(*PORTABLE, Capability.TP, Capability.PP),
    world=(4,),
    partner=True,
)
def partner_tp_pp(target: Target) -> float:
    """Another engine's dp 2, then tp 2 × pp 2, then dp 2 again MUST equal one run.

    Weights, both moments, step and schedule; the number of ranks changes on both ways.

    If this fails: the place in one group is taken for the place in the other, or the
    number of ranks for that at the save.
    """
    return _there_and_back(target, Parallelism(tp=2, pp=2))


@case(
    id="checkpoint.partner_ep",
    requires=(*PORTABLE, Capability.EP, Capability.MOE),
    world=(2,),
    partner=True,
)
def partner_ep(target: Target) -> float:
    """Another engine's dp 2, then expert parallelism, then dp 2 again MUST equal one run.

    Weights, both moments, step and schedule, expert by expert.

    If this fails: experts are numbered within a rank, or their moments stand in another
    order than they do.
    """
    model = {"family": "qwen3_moe", "tied": False, "num_experts": 8}
    return _there_and_back(target, Parallelism(ep=2), Capability.MOE, **model)
