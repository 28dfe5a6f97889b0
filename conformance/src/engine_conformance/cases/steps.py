"""Steps that must not be taken, and errors after which the engine goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, ScheduleConfig
from engine_api.errors import BatchError, EngineError
from engine_api.losses import LossFn, sft_loss
from engine_api.results import TrainOutput
from engine_conformance.cases import _losses as losses
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents, oracle_of, oracle_training, raised_everywhere, training_matches
from engine_conformance.cases._ranks import Trained, caught, local_batch, opened, save, summary, to_batch
from engine_conformance.cases._state import read_state
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import AdamWConfig, Schedule

PORTABLE = (Capability.PORTABLE_CHECKPOINT,)
Step = tuple[PackedDocuments, LossFn]


def silent(batch: PackedDocuments) -> PackedDocuments:
    """The same documents, none of whose tokens carries loss."""
    return replace(batch, loss_weight=batch.loss_weight * 0)


def skip_and_go_on(
    setup: Setup, before: PackedDocuments, odd: Sequence[Step], folder: Path
) -> tuple[list[TrainOutput], Trained]:
    """A good step, the odd ones between two saves, and the good step again; with the odd ones' outputs."""
    with opened(setup) as engine:
        good = local_batch(engine, before, setup.device)
        outputs = [engine.train_batch(good, sft_loss)]
        save(engine, folder / "before")
        skipped = [engine.train_batch(local_batch(engine, batch, setup.device), loss) for batch, loss in odd]
        save(engine, folder / "after")
        outputs.append(engine.train_batch(good, sft_loss))
        return skipped, summary(engine, outputs)


def _skips(target: Target, odd: Sequence[Step]) -> tuple[list[TrainOutput], float]:
    """Nothing but the odd steps' reports may show that they were there."""
    model, batch, folder = target.model(), documents(31, "uneven"), target.scratch()
    config = target.config(
        model, optimizer=OptimizerConfig(lr=1e-3, clip_norm=1.0), schedule=ScheduleConfig(name="linear", total_steps=10)
    )
    ranks = target.run(skip_and_go_on, config, before=batch, odd=odd, folder=folder)
    for rank, (skipped, _) in enumerate(ranks):
        for output in skipped:
            must(bool(output.skipped), "skipped", "the step was applied, or says nothing", where=f"rank {rank}")
            must(output.weight_version == 1, "weight_version", f"{output.weight_version} after a skipped step")
            must(output.skipped == ranks[0][0][0].skipped or len(odd) > 1, "skipped", "ranks disagree on why")
    assert_bitwise(read_state(folder / "after"), read_state(folder / "before"), name="state after a skipped step")
    want = oracle_training(
        str(model), (batch, batch), optimizer=AdamWConfig(weight_decay=0.0, max_grad_norm=1.0),
        schedule=Schedule(kind="linear", lr=1e-3, total_steps=10),
    )  # fmt: skip
    return ranks[0][0], training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


@case(id="steps.masked_batch", requires=PORTABLE)
def masked_batch(target: Target) -> float:
    """A batch in which no token carries loss MUST change nothing, be reported, and give no NaN.

    If this fails: 0 / 0 in the loss; weight decay or momentum moves weights without a gradient.
    """
    odd = [(silent(documents(32, "equal")), sft_loss), (documents(32, "one_token").take([0, 2, 3, 5]), sft_loss)]
    outputs, margin = _skips(target, odd)
    for output in outputs:
        finite = math.isfinite(output.loss) and math.isfinite(output.grad_norm)
        must(finite and output.loss == 0.0, "train output", f"loss {output.loss}, grad_norm {output.grad_norm}")
    return margin


@case(id="steps.nonfinite", requires=PORTABLE)
def nonfinite(target: Target) -> float:
    """A loss that is not finite on one rank MUST skip the step on all, and leave weights and optimizer bit for bit.

    Not a number, and infinite with a finite gradient.

    If this fails: a rank skips alone and the next collective hangs, or moments have taken in a NaN for good.
    """
    batch = documents(33, "uneven")
    outputs, margin = _skips(target, [(batch, losses.nan_on_last_rank), (batch, losses.infinite_on_last_rank)])
    for output in outputs:
        must(not math.isfinite(output.loss), "loss", f"{output.loss} is reported for one that is not finite")
    must(math.isfinite(outputs[1].grad_norm), "grad_norm", f"{outputs[1].grad_norm}: a constant has no gradient")
    return margin


@case(id="steps.infinite_gradient", requires=PORTABLE)
def infinite_gradient(target: Target) -> float:
    """A gradient that is not finite though the loss is MUST skip the step.

    If this fails: only the loss is looked at.
    """
    outputs, margin = _skips(target, [(documents(34, "uneven"), losses.infinite_gradient)])
    must(math.isfinite(outputs[0].loss), "loss", "the fixture's loss is finite")
    must(not math.isfinite(outputs[0].grad_norm), "grad_norm", f"{outputs[0].grad_norm} for an infinite gradient")
    return margin


def raise_and_go_on(setup: Setup, batch: PackedDocuments) -> tuple[list[str], Trained]:
    """A loss that raises (after a first half that was fine), then a good step; with what was raised."""
    with opened(setup) as engine:
        mine, raised = local_batch(engine, batch, setup.device), list[str]()
        for call in (engine.train_batch, engine.forward_backward):
            try:
                call(mine, losses.raises)
            except KeyError as error:
                raised.append(str(error))
        return raised, summary(engine, [engine.train_batch(mine, sft_loss)])


@case(id="steps.loss_raises")
def loss_raises(target: Target) -> float:
    """An exception of the loss function MUST reach the caller as it is, and leave no half of a gradient.

    If this fails: gathered parameters or partial gradients stay behind and join the next step's.
    """
    model, batch = target.model(), documents(35, "uneven")
    ranks = target.run(raise_and_go_on, target.config(model), batch=batch)
    for rank, (raised, _) in enumerate(ranks):
        must(len(raised) == 2, "error", f"{len(raised)} of 2 calls raised the loss's own error", where=f"rank {rank}")
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


def one_bad_rank(setup: Setup, good: PackedDocuments) -> tuple[list[EngineError | None], Trained]:
    """Batches that are bad on the last rank alone, then a good step; with each call's error."""
    with opened(setup) as engine:
        mine = local_batch(engine, good, setup.device)
        last = engine.topology.rank == engine.topology.world_size - 1
        bad = to_batch(good.take([0]), setup.device)
        cases = [_outside(bad), _long(bad), _unweighted(bad)]
        errors = []
        for wrong in cases:
            given = wrong if last else mine
            errors.append(caught(lambda given=given: engine.train_batch(given, sft_loss)))
        errors.append(caught(lambda: engine.infer_batch(_long(bad) if last else mine)))
        return errors, summary(engine, [engine.train_batch(mine, sft_loss)])


def _outside(batch: Batch) -> Batch:
    return Batch(input_ids=batch.input_ids + 10**6, cu_seqlens=batch.cu_seqlens, fields=batch.fields)


def _unweighted(batch: Batch) -> Batch:
    return Batch(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)


def _long(batch: Batch) -> Batch:
    length = 200  # the budget of the case is 64
    ids = torch.zeros(length, dtype=torch.int64, device=batch.input_ids.device)
    ends = torch.tensor([0, length], device=ids.device)
    weight = torch.ones(length, device=ids.device).index_fill(0, ends[:1], 0.0)
    return Batch(input_ids=ids, cu_seqlens=ends, fields={"loss_weight": weight})


@case(id="steps.bad_batch_on_one_rank")
def bad_batch_on_one_rank(target: Target) -> float:
    """A batch that is bad on one rank MUST end the call on every rank: ``BatchError`` there, ``RankFailure`` elsewhere.

    A token outside the vocabulary, a document beyond the token budget, no loss weights; the next step is as ever.

    If this fails with a stall: the good ranks wait in a collective for the one that raised.
    """
    model, batch = target.model(), documents(36, "uneven")
    config = target.config(model, memory=Memory(max_tokens=64))
    ranks = target.run(one_bad_rank, config, good=batch)
    names = (
        "token outside the vocabulary",
        "document beyond the budget",
        "no loss weights",
        "inference beyond the budget",
    )
    for index, name in enumerate(names):
        raised_everywhere(name, [errors[index] for errors, _ in ranks], BatchError, faulty=[target.world - 1])
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))
