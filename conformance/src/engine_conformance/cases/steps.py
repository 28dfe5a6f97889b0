"""Steps that must not be taken, and errors after which the engine goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, ScheduleConfig
from engine_api.errors import BatchError, EngineError, RankFailure
from engine_api.losses import LossFn
from engine_api.results import ForwardBackwardOutput, StepOutput, Topology, TrainOutput
from engine_conformance.cases import _losses as losses
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
from engine_conformance.cases._ranks import (
    Trained,
    caught,
    checked,
    digest,
    local_batch,
    opened,
    save,
    step,
    summary,
    to_batch,
    train,
    whole_weights,
)
from engine_conformance.cases._state import assert_same_state
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import PackedDocuments, TinyModel, packed_documents
from engine_conformance.oracle import AdamWConfig, Schedule, loss_and_grads
from engine_conformance.seeds import cached_by_seed
from engine_conformance.tolerances import gradient_tolerances, weight_tolerance

TYPES = (LM, VALUE)
Step = tuple[PackedDocuments, LossFn]


def silent(batch: PackedDocuments) -> PackedDocuments:
    """Return the same documents, with no token that carries loss."""
    return replace(batch, loss_weight=batch.loss_weight * 0)


Skipped = tuple[list[TrainOutput], list[str], Trained]


def skip_and_go_on(
    setup: Setup, before: PackedDocuments, odd: Sequence[Step], folders: Sequence[Path]
) -> Skipped:
    """Take a good step, the odd ones between two looks, and the good step again.

    Return the odd ones' outputs, too. A look is the weights' digest, and a save where
    folders are given.
    """
    with opened(setup) as engine:
        outputs = [step(engine, setup, before)]
        digests = [digest(whole_weights(engine))]
        for folder in folders[:1]:
            save(engine, folder)
        skipped = [
            step(engine, setup, batch, loss=_placed(loss, engine.topology)) for batch, loss in odd
        ]
        digests.append(digest(whole_weights(engine)))
        for folder in folders[1:]:
            save(engine, folder)
        outputs.append(step(engine, setup, before))
        return skipped, digests, summary(engine, outputs)


def _placed(loss: LossFn, topology: Topology) -> LossFn:
    return loss.limit_to_last_rank(topology) if isinstance(loss, losses.CorruptedLoss) else loss


def _skips(target: Target, odd: Sequence[Step]) -> tuple[list[TrainOutput], float]:
    """Require that nothing but the odd steps' reports shows that they were there.

    The moments are looked at in a portable checkpoint, and always by a second step that
    must be bit for bit the one of a run without odd steps.
    """
    model = target.model()
    batch = documents(31, "uneven")
    folder = target.scratch()
    config = target.config(
        model,
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=1.0, eps=EPS),
        schedule=ScheduleConfig(name="linear", total_steps=10),
    )
    portable = Capability.PORTABLE_CHECKPOINT in target.capabilities
    folders = [folder / "before", folder / "after"] if portable else []
    ranks = target.run(skip_and_go_on, config, before=batch, odd=odd, folders=folders)
    undisturbed = target.run(train, config, batches=[batch, batch])
    for rank, (skipped, digests, trained) in enumerate(ranks):
        _reported(rank, skipped, ranks[0][0])
        must(digests[0] == digests[1], "weights", "changed by a skipped step", where=f"rank {rank}")
        same_step(trained, undisturbed[rank], rank, after="a skipped one")
    if portable:
        assert_same_state(folders[1], folders[0], name="state after a skipped step")
    want = oracle_training(
        str(model),
        (batch, batch),
        optimizer=AdamWConfig(weight_decay=0.0, max_grad_norm=1.0, eps=EPS),
        schedule=Schedule(kind="linear", lr=1e-3, total_steps=10),
    )
    return ranks[0][0], training_matches(
        target, [trained for *_, trained in ranks], want, oracle_of(str(model))
    )


def _reported(rank: int, skipped: Sequence[TrainOutput], first: Sequence[TrainOutput]) -> None:
    for output, other in zip(skipped, first, strict=True):
        where = f"rank {rank}"
        must(bool(output.skipped), "skipped", "the step was applied, or says nothing", where=where)
        must(
            output.weight_version == 1,
            "weight_version",
            f"{output.weight_version} after a skipped step",
            where=where,
        )
        must(
            output.skipped == other.skipped,
            "skipped",
            f"{output.skipped!r}, rank 0 says {other.skipped!r}",
            where=where,
        )


@case(id="steps.masked_batch", model_types=TYPES)
def masked_batch(target: Target) -> float:
    """A batch in which no token carries loss MUST change nothing, be reported, and give no NaN.

    If this fails: 0 / 0 in the loss; weight decay or momentum moves weights without a
    gradient.
    """
    loss = losses.default_loss(target.model_type)
    odd = [
        (silent(documents(32, "equal")), loss),
        (documents(32, "one_token").take([0, 2, 3, 5]), loss),
    ]
    outputs, margin = _skips(target, odd)
    for output in outputs:
        finite = math.isfinite(output.loss) and math.isfinite(output.grad_norm)
        must(
            finite and output.loss == 0.0,
            "train output",
            f"loss {output.loss}, grad_norm {output.grad_norm}",
        )
    return margin


@case(id="steps.nonfinite", model_types=TYPES, quick=True)
def nonfinite(target: Target) -> float:
    """A loss that is not finite on one rank MUST skip the step on all and change nothing.

    Weights and optimizer stay bit for bit. Not a number, and infinite
    with a finite gradient, on the last data-parallel rank.

    If this fails: a rank skips alone and the next collective hangs, or moments have
    taken in a NaN for good.
    """
    batch = documents(33, "uneven")
    kind = target.model_type
    bad = (
        losses.CorruptedLoss(model_type=kind, factor=math.nan),
        losses.CorruptedLoss(model_type=kind, constant=math.inf),
    )
    outputs, margin = _skips(target, [(batch, loss) for loss in bad])
    for output in outputs:
        must(
            not math.isfinite(output.loss),
            "loss",
            f"{output.loss} is reported for one that is not finite",
        )
    must(
        math.isfinite(outputs[1].grad_norm),
        "grad_norm",
        f"{outputs[1].grad_norm}: a constant has no gradient",
    )
    return margin


@case(id="steps.infinite_gradient", model_types=TYPES)
def infinite_gradient(target: Target) -> float:
    """A gradient that is not finite though the loss is MUST skip the step.

    If this fails: only the loss is looked at.
    """
    loss = losses.ForModelType(target.model_type, losses.infinite_gradient)
    outputs, margin = _skips(target, [(documents(34, "uneven"), loss)])
    must(math.isfinite(outputs[0].loss), "loss", "the fixture's loss is finite")
    must(
        not math.isfinite(outputs[0].grad_norm),
        "grad_norm",
        f"{outputs[0].grad_norm} for an infinite gradient",
    )
    return margin


Raising = tuple[list[str], Trained]


def raise_and_go_on(setup: Setup, batch: PackedDocuments) -> Raising:
    """Train with a loss that raises (after a good first half), then take a good step.

    Return the error, too.
    """
    raising = losses.ForModelType(setup.model_type, losses.raises)
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        raised = list[str]()
        for call in (engine.train_batch, engine.forward_backward):
            try:
                call(mine, raising)
            except KeyError as error:
                raised.append(str(error))
        return raised, summary(engine, [step(engine, setup, batch)])


@case(id="steps.loss_raises", model_types=TYPES)
def loss_raises(target: Target) -> float:
    """An exception of the loss MUST reach the caller as it is and leave no part of a gradient.

    At the first micro-batch, and at the second, when the first one's gradient is there
    already.

    If this fails: gathered parameters or partial gradients stay behind and join the
    next step's.
    """
    model = target.model()
    batch = documents(35, "uneven")
    ranks = target.run(raise_and_go_on, target.config(model), batch=batch)
    for rank, (raised, _) in enumerate(ranks):
        must(
            len(raised) == 2,
            "error",
            f"{len(raised)} of 2 calls raised the loss's own error",
            where=f"rank {rank}",
        )
    want = oracle_training(str(model), (batch,))
    margin = training_matches(
        target, [trained for _, trained in ranks], want, oracle_of(str(model))
    )
    return max(margin, _no_half_stays(target, model))


Halved = tuple[list[str], StepOutput, Trained]


def raise_halfway(setup: Setup, batch: PackedDocuments) -> Halved:
    """Train with a loss that raises at its second micro-batch, then with a good one, and step.

    The documents are the same.
    """
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        raised = list[str]()
        try:
            engine.forward_backward(mine, losses.RaisesLater(setup.model_type))
        except KeyError as error:
            raised.append(str(error))
        engine.forward_backward(mine, losses.default_loss(setup.model_type))
        last = checked(engine.optimizer_step(), StepOutput, "optimizer_step")
        return raised, last, summary(engine, [])


@cached_by_seed
def _two_for_each_rank() -> PackedDocuments:
    """Return documents of at least two micro-batches of 12 tokens on each of up to four ranks."""
    return packed_documents(39, (7, 1, 12, 5, 3, 9, 8, 6, 4, 10, 2, 11))


def _no_half_stays(target: Target, model: Path) -> float:
    batch = _two_for_each_rank()
    ranks = target.run(
        raise_halfway, target.config(model, memory=Memory(max_tokens=12)), batch=batch
    )
    for rank, (raised, _, _) in enumerate(ranks):
        must(
            len(raised) == 1,
            "error",
            "the second micro-batch's error did not come out",
            where=f"rank {rank}",
        )
    same_on_all_ranks([trained for *_, trained in ranks])
    want = oracle_training(str(model), (batch,))
    (_, last, trained) = ranks[0]
    exact = want.steps[0].grad_norm
    bounds = weight_tolerance(want, target.torch_dtype)
    return max(
        assert_scalar_close(
            "grad_norm after an error", last.grad_norm, exact, target.tolerance("grad_norm")
        ),
        assert_weights_close(
            trained.weights, want.params, bounds, start=oracle_of(str(model)).params
        ),
    )


Alone = tuple[list[tuple[str, str, list[int]]], Trained]


def raise_alone(setup: Setup, batch: PackedDocuments) -> Alone:
    """Train with a loss that raises on the last rank, then take a good step.

    Returns each call's error (its class, its text, the ranks that it blames), and the
    step.
    """
    good = losses.default_loss(setup.model_type)
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        last = engine.topology.rank == engine.topology.world_size - 1
        errors: list[tuple[str, str, list[int]]] = []
        for call in (engine.train_batch, engine.forward_backward):
            for raising in (
                losses.ForModelType(setup.model_type, losses.raises),
                losses.RaisesLater(setup.model_type),
            ):
                try:
                    call(mine, raising if last else good)
                except (KeyError, EngineError) as error:
                    blamed = list(error.failures) if isinstance(error, RankFailure) else []
                    errors.append((type(error).__name__, str(error), blamed))
                else:
                    errors.append(("", "", []))
        return errors, summary(engine, [step(engine, setup, batch)])


@case(id="steps.loss_raises_on_one_rank", since="1.3", world=(2, 4), model_types=TYPES, quick=True)
def loss_raises_on_one_rank(target: Target) -> float:
    """A loss that raises on one rank MUST end the call everywhere, elsewhere by a ``RankFailure``.

    The rank itself raises its own error; the ``RankFailure`` on the other ranks names
    it. At the first micro-batch and at the second; the next step is as ever.

    If this fails with a stall: the good ranks wait in a collective of their backward
    for the one that raised.
    """
    model = target.model()
    batch = _two_for_each_rank()
    ranks = target.run(raise_alone, target.config(model, memory=Memory(max_tokens=12)), batch=batch)
    last = target.world - 1
    for rank, (errors, _) in enumerate(ranks):
        want, blamed = ("KeyError", []) if rank == last else ("RankFailure", [last])
        for kind, text, named in errors:
            must(
                kind == want,
                "error",
                f"{kind or 'none'} ({text}), {want} expected",
                where=f"rank {rank}",
            )
            must(
                named == blamed,
                "RankFailure.failures",
                f"ranks {named}, {blamed} expected",
                where=f"rank {rank}",
            )
            must(
                "on purpose" in text,
                "error",
                f"{text!r} does not say what the loss raised",
                where=f"rank {rank}",
            )
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


def one_bad_rank(setup: Setup, good: PackedDocuments) -> tuple[list[EngineError | None], Trained]:
    """Train on batches that are bad on the last rank alone, then take a good step.

    Return each call's error.
    """
    loss = losses.default_loss(setup.model_type)
    with opened(setup) as engine:
        mine = local_batch(engine, good, setup.device)
        last = engine.topology.rank == engine.topology.world_size - 1
        bad = to_batch(good.take([0]), setup.device)
        errors = []
        first_outside = TinyModel().vocab_size
        outside = _with_id(bad, first_outside)
        for wrong in (outside, _with_id(bad, -1), _long(bad), _unweighted(bad)):
            given = wrong if last else mine
            errors.append(caught(lambda given=given: engine.train_batch(given, loss)))
        for wrong in (outside, _long(bad)):
            given = wrong if last else mine
            errors.append(caught(lambda given=given: engine.infer_batch(given)))
        return errors, summary(engine, [step(engine, setup, good)])


def _with_id(batch: Batch, number: int) -> Batch:
    """Return the batch with ``number`` as its last token."""
    ids = batch.input_ids.clone()
    ids[-1] = number
    return Batch(input_ids=ids, cu_seqlens=batch.cu_seqlens, fields=batch.fields)


def _unweighted(batch: Batch) -> Batch:
    return Batch(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)


def _long(batch: Batch) -> Batch:
    length = 200  # the budget of the case is 64
    ids = torch.zeros(length, dtype=torch.int64, device=batch.input_ids.device)
    ends = torch.tensor([0, length], device=ids.device)
    weight = torch.ones(length, device=ids.device).index_fill(0, ends[:1], 0.0)
    return Batch(input_ids=ids, cu_seqlens=ends, fields={"loss_weight": weight})


@case(id="steps.bad_batch_on_one_rank", model_types=TYPES, quick=True)
def bad_batch_on_one_rank(target: Target) -> float:
    """A bad batch on one rank MUST raise ``BatchError`` there and ``RankFailure`` elsewhere.

    The first id outside the vocabulary and a negative one, a document beyond the token
    budget, no loss weights; the next step is as ever.

    If this fails with a stall: the good ranks wait in a collective for the one that
    raised, as a test of several processes does for ever without a deadline (pytorch
    #194943).
    """
    model = target.model()
    batch = documents(36, "uneven")
    config = target.config(model, memory=Memory(max_tokens=64))
    ranks = target.run(one_bad_rank, config, good=batch)
    names = (
        "first id outside the vocabulary",
        "negative id",
        "document beyond the budget",
        "no loss weights",
        "inference with the first id outside the vocabulary",
        "inference beyond the budget",
    )
    for index, name in enumerate(names):
        raised_everywhere(
            name, [errors[index] for errors, _ in ranks], BatchError, faulty=[target.world - 1]
        )
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))


@case(id="steps.clipping", model_types=TYPES)
def clipping(target: Target) -> float:
    """A norm below ``clip_norm`` MUST leave the step untouched, one above MUST scale it.

    The norm is reported as it is before clipping. Plain SGD, whose update shows the
    scale of the gradient: AdamW's first one does not.

    If this fails: a norm of each rank's own shard, clipping to it where nothing is to
    be clipped, the clipped norm in the report.
    """
    model = target.model()
    batch = documents(37, "uneven")
    oracle = oracle_of(str(model))
    loss = losses.oracle_default(oracle_of(str(model)))
    _, grads = loss_and_grads(oracle, batch, loss, batch.denominator)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
    runs = {}
    for limit in (None, 2 * norm, norm / 2):
        optimizer = OptimizerConfig(name="torch.optim.SGD", lr=1e-2, clip_norm=limit)
        runs[limit] = target.run(train, target.config(model, optimizer=optimizer), batches=[batch])[
            0
        ]
    margins = [
        assert_scalar_close(
            "grad_norm", run.outputs[0].grad_norm, norm, target.tolerance("grad_norm")
        )
        for run in runs.values()
    ]
    untouched = runs[None].digest == runs[2 * norm].digest
    must(
        untouched,
        "weights",
        "a step whose norm is half of clip_norm differs from one without clipping",
    )
    params = dict[str, Tensor]()
    bounds = dict[str, Tensor]()
    gradients = gradient_tolerances(grads, target.torch_dtype)
    for name, grad in grads.items():
        params[name] = oracle.params[name] - 1e-2 * 0.5 * grad
        # The gradient's error, the norm's that it is scaled by, and a rounding of the weight.
        wrong = gradients[name] + target.tolerance("grad_norm").bound(grad)
        bounds[name] = 1e-2 * 0.5 * wrong + 2e-7 * params[name].abs()
    return max(
        *margins, assert_weights_close(runs[norm / 2].weights, params, bounds, start=oracle.params)
    )


def versions(setup: Setup, batch: PackedDocuments, folder: Path) -> dict[str, int]:
    """Return ``weight_version`` after each kind of call."""
    loss = losses.default_loss(setup.model_type)
    seen = dict[str, int]()
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        seen["initialize"] = engine.weight_version
        engine.infer_batch(mine)
        seen["infer_batch"] = engine.weight_version
        checked(engine.forward_backward(mine, loss), ForwardBackwardOutput, "forward_backward")
        seen["forward_backward"] = engine.weight_version
        engine.optimizer_step()
        seen["optimizer_step"] = engine.weight_version
        save(engine, folder / "one")
        seen["save_checkpoint"] = engine.weight_version
        seen["train_batch"] = step(engine, setup, batch).weight_version
        seen["a skipped step"] = step(engine, setup, silent(batch)).weight_version
        still = losses.ForModelType(setup.model_type, losses.no_gradient)
        seen["a step whose gradient is zero"] = step(
            engine, setup, batch, loss=still
        ).weight_version
        seen["a step whose gradient is large"] = step(
            engine, setup, batch, denominator=1e-6
        ).weight_version
        nothing = Batch.pack([]).to(setup.device)
        seen["a batch without documents"] = engine.train_batch(nothing, loss).weight_version
        whole_weights(engine)
        seen["get_per_tensor_param"] = engine.weight_version
        engine.load_checkpoint(folder / "one")
        seen["load_checkpoint"] = engine.weight_version
        return seen


@case(id="steps.version", model_types=TYPES)
def version(target: Target) -> None:
    """``weight_version`` MUST count applied steps, take a load's value, and change by nothing else.

    If this fails: skipped steps or halves are counted, and rollouts are thrown away as
    stale, or never are; a step is left out though its gradient is finite, and tokens
    carry loss.
    """
    want = {
        "initialize": 0,
        "infer_batch": 0,
        "forward_backward": 0,
        "optimizer_step": 1,
        "save_checkpoint": 1,
        "train_batch": 2,
        "a skipped step": 2,
        "a step whose gradient is zero": 3,
        "a step whose gradient is large": 4,
        "a batch without documents": 4,
        "get_per_tensor_param": 4,
        "load_checkpoint": 1,
    }
    ranks = target.run(
        versions,
        target.config(target.model()),
        batch=documents(38, "equal"),
        folder=target.scratch(),
    )
    for rank, seen in enumerate(ranks):
        for call, number in want.items():
            got = f"{seen[call]} after {call}, not {number}"
            must(seen[call] == number, "weight_version", got, where=f"rank {rank}")
