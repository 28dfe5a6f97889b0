"""Training steps, whose loss, gradient norm and updated weights are the oracle's.

They are so in every split of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, Precision, ScheduleConfig
from engine_api.results import ForwardBackwardOutput, StepOutput
from engine_conformance.cases._case import FLOAT32, LM, VALUE, case, must
from engine_conformance.cases._expect import (
    asking,
    clear_documents,
    documents,
    looks_like,
    oracle_of,
    oracle_training,
    outputs_match,
    same_on_all_ranks,
    trained_on,
    training_matches,
)
from engine_conformance.cases._losses import default_loss
from engine_conformance.cases._prefixes import alike_documents, shared_or_refused
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    Trained,
    build,
    checked,
    infer,
    infer_on_rank,
    local_batch,
    opened,
    step,
    summary,
    train,
)
from engine_conformance.cases._rows import Rows
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.cases.mechanisms import MODELS, model_of
from engine_conformance.compare import (
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import (
    PackedDocuments,
    TinyModel,
    concatenate,
    packed_documents,
)
from engine_conformance.oracle import AdamWConfig, OracleModel, Schedule, loss_and_grads, sft
from engine_conformance.seeds import cached_by_seed
from engine_conformance.tolerances import gradient_tolerances, weight_tolerance

TYPES = (LM, VALUE)
_DECAY = 0.1
_MOMENTUM = OptimizerConfig(
    name="torch.optim.SGD", lr=1e-2, weight_decay=_DECAY, clip_norm=None, kwargs={"momentum": 0.9}
)


def _batches(*lengths: str, seed: int = 10) -> tuple[PackedDocuments, ...]:
    return tuple(documents(seed + i, name) for i, name in enumerate(lengths))


@case(id="train.trajectory", model_types=TYPES, quick=True)
def trajectory(target: Target) -> float:
    """Loss, norm, rate and weights MUST be the oracle's over 20 steps of clipped, decayed AdamW.

    The norm is the gradient's. Warm-up, cosine decay, clipping at half of the usual
    norm, weight decay 0.1; batches of all lengths.

    If this fails: the update is under-applied at an equal gradient (Megatron-LM #5974),
    the step count is ahead of the moments (Automodel #3191: a first update that is 1.34
    times too large), decay on other tensors than all, a gradient norm in another unit
    than everybody's (verl #4710: Megatron's is three times FSDP2's).
    """
    model = target.model()
    names = ("uneven", "equal", "skewed", "one_token")
    batches = _batches(*(names * 5))
    config = target.config(
        model,
        optimizer=OptimizerConfig(
            lr=1e-3, weight_decay=0.1, clip_norm=2.0, betas=(0.9, 0.95), eps=1e-4
        ),
        schedule=ScheduleConfig(name="cosine", warmup_steps=4, total_steps=18, min_ratio=0.1),
    )
    want = oracle_training(
        str(model),
        batches,
        optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, betas=(0.9, 0.95), eps=1e-4),
        schedule=Schedule(kind="cosine", lr=1e-3, warmup_steps=4, total_steps=18, min_ratio=0.1),
    )
    assert max(step.grad_norm for step in want.steps) > 2.0, "clipping is not active"
    return training_matches(
        target, target.run(train, config, batches=batches), want, oracle_of(str(model))
    )


# In bfloat16 gradients of epsilon's size are off by more than any of these defects move a weight.
@case(id="train.epsilon", dtypes=FLOAT32)
def epsilon(target: Target) -> float:
    """AdamW MUST use the configured betas, and add epsilon to the corrected moment's root.

    The root is that of the second moment, and epsilon is the configured one. Three
    unclipped steps at an epsilon of 1e-3, which is of the size of many gradients, and
    betas of 0.8 and 0.97.

    If this fails: epsilon stands inside the root or before the correction, where it is
    six times larger at the first step, or epsilon or betas are the library's defaults.
    """
    model = target.model()
    batches = _batches("uneven", "equal", "skewed", seed=16)
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=None, eps=1e-3, betas=(0.8, 0.97))
    ranks = target.run(train, target.config(model, optimizer=optimizer), batches=batches)
    exact = AdamWConfig(weight_decay=0.0, eps=1e-3, betas=(0.8, 0.97))
    want = oracle_training(str(model), batches, optimizer=exact)
    return training_matches(target, ranks, want, oracle_of(str(model)))


def _count_distinct(batch: Batch) -> int:
    """Return the number of beginnings of documents, which are the tokens that differ."""
    parts = [batch.input_ids[a:b].tolist() for a, b in pairwise(batch.boundaries)]
    return len({tuple(part[:end]) for part in parts for end in range(1, len(part) + 1)})


def shared_rows(setup: Setup, batch: PackedDocuments, model: TinyModel) -> tuple[int, int, int]:
    """Return the most rows of logits in a step, the distinct tokens, and all tokens of a rank."""
    with opened(setup) as engine:
        own = local_batch(engine, batch, setup.device)
        with Rows(model.vocab_size, model.hidden_size) as rows:
            step(engine, setup, batch)
        return rows.most, _count_distinct(own), own.num_tokens


def _shared_by(target: Target, mechanism: Capability) -> float:
    """Require shared beginnings to be right or refused in the model of a mechanism.

    In 16 bits, in which rounding decides about experts and selected tokens, models with either are
    left out, as are families that the engine does not build.
    """
    decided = mechanism in (Capability.SAVED_BUFFERS, Capability.SPARSE_ATTENTION)
    arguments = model_of(target, mechanism)
    if not target.builds(arguments["family"]) or (decided and target.dtype != "float32"):
        return 0.0
    config = target.config(target.model(**arguments), memory=Memory(share_prefixes=True))
    return shared_or_refused(target, f"{mechanism}", config)


@case(
    id="train.shared_prefixes",
    since="1.4",
    requires=(Capability.SHARED_PREFIXES,),
    world=(1, 2),
    model_types=TYPES,
    quick="once",
)
def shared_prefixes(target: Target) -> float:
    """Documents that share their beginning MUST have the outputs and gradients of each alone.

    Two prompts with five answers each, of which some begin alike and two are equal, in one
    micro-batch and in several. Loss is on tokens of the prompts, too, and differs between
    documents. In further steps a rank has fewer micro-batches than another one, and none. What
    documents share is computed once: logits have fewer rows than there are tokens. Models of the
    mechanisms that the engine declares are right, too, or the option is refused for them by name.

    If this fails: an answer sees another one of its group; positions go on from one answer to the
    next; the first token of an answer is predicted from the token before it in the pack in place
    of the prompt's last; a shared token has the gradient of one document alone; an empty
    micro-batch is an error; a state passes from one answer to the next; the option is accepted, and
    nothing is shared.
    """
    model = TinyModel(vocab_size=640, tied=False, value_model=target.model_type == VALUE)
    folder = target.model(vocab_size=640, tied=False)
    # Of two ranks one has a micro-batch less in the third step, and no document in the fourth.
    batches = (alike_documents(15), alike_documents(16), *_batches("skewed", "single", seed=17))
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=None, eps=EPS)
    want = oracle_training(str(folder), batches)
    margins = list[float]()
    whole = Memory(share_prefixes=True)
    for memory in (whole, replace(whole, max_tokens=24, logit_chunk=7, pad_to_multiple=4)):
        config = target.config(folder, optimizer=optimizer, memory=memory)
        call = asking(target, batches[0], temperature=0.7)
        outputs = target.run(infer, config, calls=[call])
        margins.append(
            outputs_match(target, oracle_of(str(folder)), call, [one for (one,) in outputs])
        )
        ranks = target.run(train, config, batches=batches)
        margins.append(training_matches(target, ranks, want, oracle_of(str(folder))))
    if target.model_type == VALUE:
        return max(margins)
    margins += [_shared_by(target, one) for one in MODELS if one in target.capabilities]
    # In float32: torch cannot count inside the compiled attention that an engine may have for trees
    # in half precision.
    precision = Precision(compute="float32")
    config = target.config(folder, optimizer=optimizer, memory=whole, precision=precision)
    found = target.run(shared_rows, config, batch=batches[0], model=model)
    for rank, (rows, distinct, tokens) in enumerate(found):
        problem = f"of {rows} tokens, {distinct} of {tokens} are distinct"
        must(2 * rows <= distinct + tokens, "logits", problem, where=f"rank {rank}")
    return max(margins)


@case(id="train.families")
def families(target: Target) -> float:
    """Two unclipped steps of every dense family, tied and untied, MUST end in the oracle's weights.

    If this fails: a tied weight gets half of its gradient, or is updated twice (NeMo-RL
    #227); biases do not train.
    """
    batches = _batches("uneven", "skewed")
    margins = list[float]()
    for model in target.models(
        {"family": "llama", "tied": False},
        {"family": "qwen2"},
        {"family": "qwen3", "tied": False},
    ):
        ranks = target.run(train, target.config(model), batches=batches)
        want = oracle_training(str(model), batches)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


@case(id="train.moe", requires=(Capability.MOE,))
def moe(target: Target) -> float:
    """Steps of a mixture of experts MUST end in the oracle's weights, router and every expert.

    In one micro-batch and in several, and in float32 with an optimizer named by path. The
    documents are chosen such that rounding changes no choice of experts.

    If this fails: experts without tokens have no gradient on some ranks; the router's
    gradient is lost; experts keep the last micro-batch's gradient alone; an optimizer other than
    ``adamw`` moves a copy of the router that was made before it came to the device.
    """
    model = target.model(family="qwen3_moe", tied=False)
    oracle = oracle_of(str(model))
    if target.dtype == "float32":
        batches = tuple(clear_documents(oracle, seed, (6, 5, 4, 3), gap=0.05) for seed in (0, 1))
    else:
        batches = tuple(trained_on(target, oracle, seed) for seed in (0, 1))
    want = oracle_training(str(model), batches)
    longest = max(length for batch in batches for length in batch.lengths)
    margins = list[float]()
    for memory in (Memory(), Memory(max_tokens=longest)):
        ranks = target.run(train, target.config(model, memory=memory), batches=batches)
        margins.append(training_matches(target, ranks, want, oracle))
    count = ranks[0].outputs[0].num_micro_batches
    must(target.world > 2 or count > 1, "micro-batches", f"{count} for {longest} tokens")
    if target.dtype == "float32":
        # One step, after which other weights might choose other experts. 16 bits show no more.
        ranks = target.run(train, target.config(model, optimizer=_MOMENTUM), batches=batches[:1])
        same_on_all_ranks(ranks)
        params, bounds = _sgd(target, oracle, batches[:1])
        margins.append(assert_weights_close(ranks[0].weights, params, bounds, start=oracle.params))
    return max(margins)


@cached_by_seed
def _partly_without_loss() -> PackedDocuments:
    """Return documents of which the first fills a micro-batch of 24 tokens, and carries no loss."""
    batch = packed_documents(14, (24, 12, 8, 6))
    weights = batch.loss_weight.copy()
    weights[:24] = 0.0
    return replace(batch, loss_weight=weights)


@case(id="train.microbatches", model_types=TYPES)
def microbatches(target: Target) -> float:
    """Loss, gradient norm and weights MUST NOT depend on the number of micro-batches.

    One of them has no token that carries loss, and more tokens than a chunk of logits.

    If this fails: a loss scale is missing when micro-batches are uneven (verl #3294,
    #4021), gradients double with each micro-batch in a group of one (Megatron-LM
    #6660), or one without loss is divided by its own weights, which are zero.
    """
    model = target.model()
    batches = (*_batches("uneven", "equal", "skewed"), _partly_without_loss())
    config = target.config(model, memory=Memory(max_tokens=24, logit_chunk=7))
    split = target.config(model, memory=Memory(max_tokens=12, pad_to_multiple=4))
    want = oracle_training(str(model), batches)
    start = oracle_of(str(model))
    ranks = target.run(train, config, batches=batches)
    small = target.run(train, split, batches=batches[:2])
    count = small[0].outputs[0].num_micro_batches
    must(target.world > 2 or count > 1, "micro-batches", f"{count} for a budget of 12 tokens")
    both = oracle_training(str(model), batches[:2])
    return max(
        training_matches(target, ranks, want, start), training_matches(target, small, both, start)
    )


@case(id="train.uneven_ranks", world=(2, 4), model_types=TYPES, quick=True)
def uneven_ranks(target: Target) -> float:
    """Loss, gradient norm and weights MUST NOT depend on how tokens are divided among ranks.

    A data-parallel rank may even be empty.

    If this fails with a ratio: gradients are averaged over ranks after the division by
    the global denominator (AReaL PR #335, torchtitan #2318, verl #4710), or ranks with
    few tokens weigh as much as the others (prime-rl #2562 and #2358, Megatron-LM #4590;
    miles #3231: off by tokens / dp). With a stall: an empty rank skips a collective.
    """
    model = target.model()
    batches = _batches("skewed", "single", "one_token")
    ranks = target.run(train, target.config(model), batches=batches)
    return training_matches(
        target, ranks, oracle_training(str(model), batches), oracle_of(str(model))
    )


@case(id="train.schedules", model_types=TYPES)
def schedules(target: Target) -> float:
    """The rate of step n MUST be the schedule's at n, and be the rate that moves the weights.

    Two steps come after the schedule's last.

    If this fails: the schedule is a step ahead (a first rate of zero), or warm-up
    counts calls, not applied steps; the rate goes on falling below the floor.
    """
    model = target.model()
    batches = _batches("equal", "uneven", "equal", "one_token", "single")
    margins = []
    kinds = (("linear", 1, 0.5), ("cosine", 0, 0.0), ("constant", 2, 0.0))
    for name, warmup, ratio in kinds[: 1 if target.model_type == VALUE else None]:
        schedule = ScheduleConfig(name=name, warmup_steps=warmup, total_steps=3, min_ratio=ratio)  # type: ignore[arg-type]
        ranks = target.run(train, target.config(model, schedule=schedule), batches=batches)
        exact = Schedule(kind=name, warmup_steps=warmup, total_steps=3, min_ratio=ratio)  # type: ignore[arg-type]
        want = oracle_training(str(model), batches, schedule=exact)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


Halves = tuple[Trained, list[ForwardBackwardOutput], list[int], StepOutput]


def accumulate(setup: Setup, parts: Sequence[PackedDocuments], denominator: float) -> Halves:
    """Call ``forward_backward`` once per part and step once.

    Return every output, and the version after each call.
    """
    loss = default_loss(setup.model_type)
    versions = list[int]()
    with opened(setup) as engine:
        halves = []
        for part in parts:
            output = engine.forward_backward(
                local_batch(engine, part, setup.device), loss, denominator=denominator
            )
            halves.append(checked(output, ForwardBackwardOutput, "forward_backward"))
            versions.append(engine.weight_version)
        last = checked(engine.optimizer_step(), StepOutput, "optimizer_step")
        return summary(engine, []), halves, versions, last


def _accumulates(target: Target, model: Path, parts: Sequence[PackedDocuments]) -> float:
    """Require that the parts' gradients and losses add up to those of the whole batch."""
    batch = concatenate(parts)
    ranks = target.run(accumulate, target.config(model), parts=parts, denominator=batch.denominator)
    want = oracle_training(str(model), (batch,))
    oracle = oracle_of(str(model))
    same_on_all_ranks([rows[0] for rows in ranks])
    trained, halves, versions, last = ranks[0]
    for rank, row in enumerate(ranks):
        must(row[1:] == ranks[0][1:], "outputs", "differ from rank 0's", where=f"rank {rank}")
    must(not any(versions), "weight_version", f"{versions} before the step")
    must(
        trained.version == last.weight_version == 1,
        "weight_version",
        f"{trained.version} after the step",
    )
    must(last.skipped is None, "skipped", f"{last.skipped}")
    factors = {"ranks": float(target.world), "calls": float(len(parts))}
    loss = sum(half.loss for half in halves)
    exact = want.steps[0]
    bounds = weight_tolerance(want, target.torch_dtype)
    return max(
        assert_scalar_close("loss", loss, exact.loss, target.tolerance("loss"), factors=factors),
        assert_scalar_close(
            "grad_norm",
            last.grad_norm,
            exact.grad_norm,
            target.tolerance("grad_norm"),
            factors=factors,
        ),
        assert_weights_close(
            trained.weights, want.params, bounds, start=oracle.params, factors=factors
        ),
    )


@case(id="train.accumulation", model_types=TYPES, quick=True)
def accumulation(target: Target) -> float:
    """Two ``forward_backward`` and one ``optimizer_step`` MUST equal one ``train_batch``.

    The one batch holds all documents.

    If this fails: the second call zeroes or rescales the first one's gradient
    (Megatron-LM #6660 in a group of one).
    """
    batch = documents(12, "uneven")
    return _accumulates(target, target.model(), [batch.take([0, 2, 4]), batch.take([1, 3, 5])])


_FAINT = 1 / 512


@cached_by_seed
def _large_and_many_faint(seed: int) -> list[PackedDocuments]:
    """Return a batch, then many whose gradients are faint next to the first's.

    They are below half a unit in bfloat16's last place of the first's.
    """
    parts = [packed_documents(seed + i, (5, 4, 3, 6)) for i in range(25)]
    return [
        parts[0],
        *(replace(part, loss_weight=part.loss_weight * np.float32(_FAINT)) for part in parts[1:]),
    ]


@case(id="train.accumulation_precision", model_types=TYPES)
def accumulation_precision(target: Target) -> float:
    """Gradients MUST be accumulated in float32: many faint ones after a large one stay visible.

    25 calls, the first with weights of about 1 and the others of 1/512. In bfloat16,
    where each gradient differs from the oracle's by more than all faint ones, the sum
    is compared with the sum of what the engine gives for its parts alone.

    If this fails: gradients are accumulated in bfloat16 (ISEEKYAN/Megatron-LM #149: the
    gradient norm is off by 3.5e-5 at an identical loss; here by more), or reduced over
    ranks in bfloat16 with each call.
    """
    parts = _large_and_many_faint(400)
    if target.dtype == "float32":
        return _accumulates(target, target.model(), parts)
    return _adds_up(target, target.model(), parts)


def _adds_up(target: Target, model: Path, parts: Sequence[PackedDocuments]) -> float:
    """Compare the gradient of all parts with the sum of the large one's and the faint ones'.

    SGD's updates show the gradients.
    """
    config = target.config(
        model, optimizer=OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)
    )
    denominator = concatenate(parts).denominator
    stored = oracle_of(str(model)).params
    gradients = []
    for given in (parts, parts[:1], parts[1:]):
        ranks: list[Halves] = target.run(accumulate, config, parts=given, denominator=denominator)
        same_on_all_ranks([trained for trained, *_ in ranks])
        weights = ranks[0][0].weights
        gradients.append({name: stored[name] - weights[name].double() for name in stored})
    whole, large, faint = gradients
    want = {name: large[name] + faint[name] for name in whole}
    # What float32 loses in sums of another order, and three roundings of a weight.
    bounds = {
        n: bound + 2e-7 * stored[n].abs() + 1e-7 * want[n].abs()
        for n, bound in gradient_tolerances(want).items()
    }
    return assert_weights_close(whole, want, bounds, name="accumulated gradient")


def train_then_look(
    setup: Setup, batches: Sequence[PackedDocuments], call: InferCall
) -> tuple[list[Trained], list[RankOutputs]]:
    """Return everything that shows the weights after each step: the export and the outputs."""
    trained = list[Trained]()
    inferred = list[RankOutputs]()
    outputs = []
    with opened(setup) as engine:
        for batch in batches:
            outputs.append(step(engine, setup, batch))
            inferred.append(infer_on_rank(engine, call, setup.device))
            trained.append(summary(engine, outputs))
    return trained, inferred


@case(id="train.visible_at_once", model_types=TYPES, quick=True)
def visible_at_once(target: Target) -> float:
    """Export and inference MUST use the stepped weights after each step, tied ones as one.

    If this fails: the export reads a copy that the optimizer does not move, inference
    uses weights gathered before the step, or a tied embedding and head part with the
    first step (NeMo-RL #227).
    """
    model = target.model()
    batches = _batches("uneven", "skewed", seed=14)
    call = asking(target, documents(13))
    ranks = target.run(train_then_look, target.config(model), batches=batches, call=call)
    margins = []
    start = oracle_of(str(model))
    for index in range(len(batches)):
        want = oracle_training(str(model), batches[: index + 1])
        margins.append(
            training_matches(target, [trained[index] for trained, _ in ranks], want, start)
        )
        # Weights may differ by the tolerance of training, which the outputs then show on top of
        # their own.
        margins.append(
            looks_like(target, want.oracle, start, call, [inferred[index] for _, inferred in ranks])
        )
    return max(margins)


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Return whether a saved tensor has two dimensions or more, and is no bias."""
    return weight.ndim >= 2 and not name.endswith("bias")


@case(
    id="train.decay",
    since="1.4",
    requires=(Capability.PARAMETER_GROUPS,),
    world=(1, 2),
    model_types=TYPES,
    quick="once",
)
def decay(target: Target) -> float:
    """A weight that is saved as a matrix MUST decay with ``decay: matrices``, and no other.

    A bias does not. Two clipped steps of AdamW with a decay of 10 at a rate of 1e-3: of the usual
    model, of one with biases and, where the engine serves sinks, of one with them. In float32 also
    a step of an optimizer by path.

    If this fails: norms or biases decay, or embeddings or stacked experts do not; dimensions are
    those of a shard, which may be flat; an optimizer named by path has no groups.
    """
    optimizer = OptimizerConfig(
        lr=1e-3, weight_decay=10.0, clip_norm=2.0, eps=EPS, decay="matrices"
    )
    exact = AdamWConfig(weight_decay=10.0, max_grad_norm=2.0, eps=EPS, decays=_is_matrix)
    margins = list[float]()
    batches = _batches("uneven", "skewed", seed=19)
    models = [target.model(tied=False), *target.models({"family": "qwen2"})]
    for model in models:
        ranks = target.run(train, target.config(model, optimizer=optimizer), batches=batches)
        want = oracle_training(str(model), batches, optimizer=exact)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    arguments = MODELS[Capability.SINKS]
    sinks = Capability.SINKS in target.capabilities and target.builds(arguments["family"])
    if sinks and target.model_type == LM:
        model = target.model(**arguments)
        trained = (trained_on(target, oracle_of(str(model)), 41),)
        ranks = target.run(train, target.config(model, optimizer=optimizer), batches=trained)
        want = oracle_training(str(model), trained, optimizer=exact)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    if target.dtype == "float32" and target.model_type == LM:
        by_path = replace(_MOMENTUM, decay="matrices")
        ranks = target.run(train, target.config(models[-1], optimizer=by_path), batches=batches[:1])
        same_on_all_ranks(ranks)
        oracle = oracle_of(str(models[-1]))
        params, bounds = _sgd(target, oracle, batches[:1], decays=_is_matrix)
        margins.append(assert_weights_close(ranks[0].weights, params, bounds, start=oracle.params))
    return max(margins)


@case(id="train.optimizer_by_path")
def optimizer_by_path(target: Target) -> float:
    """An optimizer named by path MUST be used: ``torch.optim.SGD`` with momentum, in float64.

    With weight decay, and the oracle is in float64. Arguments of ``adamw`` in
    ``optimizer.kwargs`` are used or refused: one step with ``maximize`` is the mirror
    image of a step.

    If this fails: another optimizer is used in silence, or its arguments are dropped.
    """
    model = target.model()
    batches = _batches("uneven", "equal", "uneven")
    ranks = target.run(train, target.config(model, optimizer=_MOMENTUM), batches=batches)
    same_on_all_ranks(ranks)
    oracle = oracle_of(str(model))
    _uses_arguments_of_adamw(target, model, batches[0])
    params, bounds = _sgd(target, oracle, batches)
    return assert_weights_close(ranks[0].weights, params, bounds, start=oracle.params)


def _uses_arguments_of_adamw(target: Target, model: Path, batch: PackedDocuments) -> None:
    """Require ``maximize`` to turn the update around, or to be refused."""
    adamw = OptimizerConfig(lr=1e-3, clip_norm=None, eps=EPS)
    turned = replace(adamw, kwargs={"maximize": True})
    if any(
        error is not None for error in target.run(build, target.config(model, optimizer=turned))
    ):
        return
    start = oracle_of(str(model)).params
    up, down = (
        target.run(train, target.config(model, optimizer=one), batches=[batch])[0].weights
        for one in (turned, adamw)
    )
    for name, weight in start.items():
        moved = (up[name] - weight) * (down[name] - weight)
        must(float(moved.sum()) <= 0, name, "moves as without optimizer.kwargs: {maximize: true}")


def _sgd(
    target: Target,
    oracle: OracleModel,
    batches: Sequence[PackedDocuments],
    decays: Callable[[str, Tensor], bool] = lambda _name, _weight: True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the final weights and how far each may be off. ``decays`` says which of them decay.

    An update is a sum of gradients here, not of ratios of them: its error is the sum of
    theirs, and of roundings of the weight.
    """
    model = oracle
    momentum = {name: torch.zeros_like(p) for name, p in oracle.params.items()}
    errors = dict(momentum)
    bounds = dict(momentum)
    for batch in batches:
        _, grads = loss_and_grads(model, batch, sft, batch.denominator)
        params = {}
        bound = gradient_tolerances(grads, target.torch_dtype)
        for name, grad in grads.items():
            decay = _DECAY if decays(name, model.params[name]) else 0.0
            momentum[name] = 0.9 * momentum[name] + grad + decay * model.params[name]
            errors[name] = 0.9 * errors[name] + bound[name]
            bounds[name] = bounds[name] + 1e-2 * errors[name]
            params[name] = model.params[name] - 1e-2 * momentum[name]
        model = OracleModel(config=oracle.config, params=params)
    return model.params, {name: bounds[name] + 2e-7 * p.abs() for name, p in model.params.items()}
