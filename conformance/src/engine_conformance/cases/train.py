"""What a step does: loss, gradient norm and updated weights are the oracle's, however the work is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, ScheduleConfig
from engine_api.losses import sft_loss
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    same_on_all_ranks,
    training_matches,
)
from engine_conformance.cases._ranks import Trained, local_batch, opened, summary, train
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.oracle import AdamWConfig, OracleModel, Schedule, loss_and_grads, sft
from engine_conformance.tolerances import weight_tolerance

BOTH = ("float32", "bfloat16")


def _batches(*lengths: str, seed: int = 10) -> tuple[PackedDocuments, ...]:
    return tuple(documents(seed + i, name) for i, name in enumerate(lengths))


@case(id="train.trajectory", dtypes=BOTH)
def trajectory(target: Target) -> float:
    """Loss, gradient norm, rate and every weight MUST be the oracle's over 20 steps of clipped, decayed AdamW.

    Warm-up, cosine decay, clipping at half of the usual norm, weight decay 0.1; batches of all lengths.

    If this fails: the update is under-applied at an equal gradient (Megatron-LM #5974), the step count is ahead of
    the moments (Automodel #3191: a first update that is 1.34 times too large), decay on other tensors than all.
    """
    model, names = target.model(), ("uneven", "equal", "skewed", "one_token")
    batches = _batches(*(names * 5))
    config = target.config(
        model,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, betas=(0.9, 0.95)),
        schedule=ScheduleConfig(name="cosine", warmup_steps=4, total_steps=18, min_ratio=0.1),
    )
    want = oracle_training(
        str(model),
        batches,
        optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, betas=(0.9, 0.95)),
        schedule=Schedule(kind="cosine", lr=1e-3, warmup_steps=4, total_steps=18, min_ratio=0.1),
    )
    assert max(step.grad_norm for step in want.steps) > 2.0, "clipping is not active"
    return training_matches(target, target.run(train, config, batches=batches), want, oracle_of(str(model)))


@case(id="train.families", dtypes=BOTH)
def families(target: Target) -> float:
    """Two unclipped steps of every dense family, tied and untied, MUST end in the oracle's weights.

    If this fails: a tied weight gets half of its gradient, or is updated twice (NeMo-RL #227); biases do not train.
    """
    batches, margins = _batches("uneven", "skewed"), list[float]()
    for arguments in ({"family": "llama", "tied": False}, {"family": "qwen2"}, {"family": "qwen3", "tied": False}):
        model = target.model(**arguments)
        ranks = target.run(train, target.config(model), batches=batches)
        want = oracle_training(str(model), batches)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


@case(id="train.moe", requires=(Capability.MOE,))
def moe(target: Target) -> float:
    """Steps of a mixture of experts MUST end in the oracle's weights, router and every expert.

    The documents are chosen such that rounding changes no choice of experts.

    If this fails: experts without tokens have no gradient on some ranks; the router's gradient is lost.
    """
    model = target.model(family="qwen3_moe", tied=False)
    oracle = oracle_of(str(model))
    batches = tuple(_steady(oracle, seed) for seed in (0, 1000))
    ranks = target.run(train, target.config(model), batches=batches)
    return training_matches(target, ranks, oracle_training(str(model), batches), oracle)


_STEADY: dict[tuple[int, int], PackedDocuments] = {}


def _steady(oracle: OracleModel, seed: int) -> PackedDocuments:
    """The first batch from ``seed`` on whose choices of experts a step of training does not change."""
    for candidate in range(seed, seed + 200):
        batch = _STEADY.setdefault((id(oracle), candidate), packed_documents(candidate, (6, 5, 4, 3)))
        if oracle.routing_margin(batch.input_ids, batch.cu_seqlens).min() > 0.05:
            return batch
    raise AssertionError("no batch with clear choices of experts")


@case(id="train.microbatches", dtypes=BOTH)
def microbatches(target: Target) -> float:
    """Loss, gradient norm and weights MUST NOT depend on the number of micro-batches.

    If this fails: a loss scale is missing when micro-batches are uneven (verl #3294, #4021), gradients double with
    each micro-batch in a group of one (Megatron-LM #6660), or are accumulated in bfloat16 (Megatron-LM #149:
    3.5e-5 relative, which the tolerance of grad_norm sees).
    """
    model, batches = target.model(), _batches("uneven", "equal", "skewed")
    config = target.config(model, memory=Memory(max_tokens=24, logit_chunk=7))
    split = target.config(model, memory=Memory(max_tokens=12, pad_to_multiple=4))
    want, start = oracle_training(str(model), batches), oracle_of(str(model))
    ranks = target.run(train, config, batches=batches)
    small = target.run(train, split, batches=batches[:2])
    count = small[0].outputs[0].num_micro_batches
    must(target.world > 2 or count > 1, "micro-batches", f"{count} for a budget of 12 tokens")
    both = oracle_training(str(model), batches[:2])
    return max(training_matches(target, ranks, want, start), training_matches(target, small, both, start))


@case(id="train.uneven_ranks", world=(2, 4), dtypes=BOTH)
def uneven_ranks(target: Target) -> float:
    """Loss, gradient norm and weights MUST NOT depend on how tokens fall on data-parallel ranks, an empty rank included.

    If this fails with a ratio: gradients are averaged over ranks after the division by the global denominator
    (AReaL PR 335, torchtitan #2318, verl #4710), or ranks with few tokens weigh as much as the others (prime-rl
    #2562, miles #3231). With a stall: an empty rank skips a collective.
    """
    model, batches = target.model(), _batches("skewed", "single", "one_token")
    ranks = target.run(train, target.config(model), batches=batches)
    return training_matches(target, ranks, oracle_training(str(model), batches), oracle_of(str(model)))


@case(id="train.schedules")
def schedules(target: Target) -> float:
    """The rate of step n MUST be the schedule's at n, and be the rate that moves the weights.

    If this fails: the schedule is a step ahead (a first rate of zero), or warm-up counts calls, not applied steps.
    """
    model, batches = target.model(), _batches("equal", "uneven", "equal")
    margins = []
    for name, warmup, ratio in (("constant", 2, 0.0), ("linear", 1, 0.5), ("cosine", 0, 0.0)):
        schedule = ScheduleConfig(name=name, warmup_steps=warmup, total_steps=3, min_ratio=ratio)  # type: ignore[arg-type]
        ranks = target.run(train, target.config(model, schedule=schedule), batches=batches)
        exact = Schedule(kind=name, warmup_steps=warmup, total_steps=3, min_ratio=ratio)  # type: ignore[arg-type]
        want = oracle_training(str(model), batches, schedule=exact)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


def accumulate(setup: Setup, parts: Sequence[PackedDocuments], denominator: float) -> tuple[Trained, float, int, float]:
    """Two halves, one step; with the sum of the losses, the version between, and the step's gradient norm."""
    with opened(setup) as engine:
        outputs = [
            engine.forward_backward(local_batch(engine, part, setup.device), sft_loss, denominator=denominator)
            for part in parts
        ]
        between = engine.weight_version
        step = engine.optimizer_step()
        return summary(engine, []), sum(o.loss for o in outputs), between, step.grad_norm


@case(id="train.accumulation", dtypes=BOTH)
def accumulation(target: Target) -> float:
    """Two ``forward_backward`` and one ``optimizer_step`` MUST equal one ``train_batch`` of all documents.

    If this fails: the second call zeroes or rescales the first one's gradient (Megatron-LM #6660 in a group of one).
    """
    model, batch = target.model(), documents(12, "uneven")
    parts = [batch.take([0, 2, 4]), batch.take([1, 3, 5])]
    ranks = target.run(accumulate, target.config(model), parts=parts, denominator=batch.denominator)
    want, oracle = oracle_training(str(model), (batch,)), oracle_of(str(model))
    same_on_all_ranks([rows[0] for rows in ranks])
    trained, loss, between, norm = ranks[0]
    must(between == 0 and trained.version == 1, "weight_version", f"{between} before, {trained.version} after the step")
    margins = [
        assert_scalar_close("loss", loss, want.steps[0].loss, target.tolerance("loss")),
        assert_scalar_close("grad_norm", norm, want.steps[0].grad_norm, target.tolerance("grad_norm")),
        assert_weights_close(
            trained.weights, want.params, weight_tolerance(want, target.torch_dtype), start=oracle.params
        ),
    ]
    return max(margins)


@case(id="train.optimizer_by_path")
def optimizer_by_path(target: Target) -> float:
    """An optimizer named by path MUST be that one: ``torch.optim.SGD`` with momentum, against float64.

    If this fails: another optimizer is used in silence, or its arguments are dropped.
    """
    model, batches = target.model(), _batches("uneven", "equal", "uneven")
    optimizer = OptimizerConfig(name="torch.optim.SGD", lr=1e-2, clip_norm=None, kwargs={"momentum": 0.9})
    ranks = target.run(train, target.config(model, optimizer=optimizer), batches=batches)
    same_on_all_ranks(ranks)
    oracle = oracle_of(str(model))
    params, largest = _sgd(oracle, batches)
    # An update is a sum of gradients here, not of ratios of them: its error is the gradient's own.
    bounds = {name: 1e-5 * largest[name] + 2e-7 * p.abs() for name, p in params.items()}
    return assert_weights_close(ranks[0].weights, params, bounds, start=oracle.params)


def _sgd(oracle: OracleModel, batches: Sequence[PackedDocuments]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Final weights, and the largest distance that an element of each tensor moved."""
    model, momentum = oracle, {name: torch.zeros_like(p) for name, p in oracle.params.items()}
    for batch in batches:
        _, grads = loss_and_grads(model, batch, sft, batch.denominator)
        momentum = {name: 0.9 * momentum[name] + grads[name] for name in momentum}
        params = {name: p - 1e-2 * momentum[name] for name, p in model.params.items()}
        model = OracleModel(config=oracle.config, params=params)
    return model.params, {name: (p - oracle.params[name]).abs().max() for name, p in model.params.items()}
