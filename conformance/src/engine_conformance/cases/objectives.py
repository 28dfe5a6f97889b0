"""Losses, temperature and entropy in training, against the oracle's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine_api.batch import Batch
from engine_api.config import Memory
from engine_api.losses import sft_loss
from engine_api.results import LossOutput, TokenOutputs, TrainOutput
from engine_conformance.cases import _losses as losses
from engine_conformance.cases._case import FLOAT32, case, must
from engine_conformance.cases._expect import documents, oracle_of, oracle_training, training_matches
from engine_conformance.cases._ranks import local_batch, opened, train
from engine_conformance.cases._target import Setup, Target
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.seeds import cached_by_seed


def _batches(*lengths: str) -> tuple[PackedDocuments, ...]:
    return tuple(documents(20 + i, name) for i, name in enumerate(lengths))


@case(id="train.temperature")
def temperature(target: Target) -> float:
    """The temperature of a training call MUST divide the logits of loss and gradient.

    If this fails: the log-probs of training and inference are not the same function.
    """
    model = target.model()
    batches = _batches("uneven")
    want = oracle_training(str(model), batches, loss=losses.oracle_warm)
    margins = list[float]()
    # In one chunk, and in several, where a head may form the gradient in another way.
    for memory in (Memory(), Memory(logit_chunk=5)):
        config = target.config(model, memory=memory)
        ranks = target.run(train, config, batches=batches, temperature=0.7)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


# In bfloat16 rounding decides which ratios are clipped: the gradient is another one.
@case(id="train.policy", dtypes=FLOAT32, quick=True)
def policy(target: Target) -> float:
    """A clipped policy loss MUST give the oracle's gradient, and metrics that are sums.

    The denominator is the caller's, then the sum of the weights, in which tokens with
    advantage 0 count like all others.

    If this fails: the engine divides by its own count of tokens; metrics are averaged,
    or counted once a rank, or lost where not every micro-batch has them; integers reach
    the loss as float32.
    """
    model = target.model()
    oracle = oracle_of(str(model))
    plain = documents(21, "uneven")
    batch = _perturb_old_log_probs(str(model), plain)
    config = target.config(model, memory=Memory(max_tokens=16))
    ranks = target.run(train, config, batches=[batch], loss=losses.policy, denominators=[17.0])
    want = oracle_training(str(model), (batch,), loss=losses.oracle_policy, denominators=(17.0,))
    got = ranks[0].outputs[0]
    must(got.denominator == 17.0, "denominator", f"{got.denominator}, the caller's is 17")
    for name in ("weight", "max/weight", "min/weight", "mean/weight"):
        must(
            got.metrics[name] == batch.denominator,
            "metrics",
            f"{name} {got.metrics[name]}, not {batch.denominator}",
        )
    rare = int((batch.input_ids % 8 == 1).sum())
    must(got.metrics["rare"] == rare, "metrics", f"{dict(got.metrics)}, {rare} are rare")
    fives = 5 * batch.lengths.count(5)
    must(got.metrics.get("fives") == fives, "metrics", f"{dict(got.metrics)}, not {fives} fives")
    must(
        got.num_tokens == len(batch.input_ids),
        "num_tokens",
        f"{got.num_tokens} of {len(batch.input_ids)}",
    )
    margin = training_matches(target, ranks, want, oracle, off_policy=(0,))
    idle = _zero_some_advantages(batch)
    ranks = target.run(train, config, batches=[idle], loss=losses.policy)
    want = oracle_training(str(model), (idle,), loss=losses.oracle_policy)
    return max(margin, training_matches(target, ranks, want, oracle, off_policy=(0,)))


@cached_by_seed
def _zero_some_advantages(batch: PackedDocuments) -> PackedDocuments:
    """Return the batch with every third advantage 0."""
    advantages = batch.advantages.copy()
    advantages[::3] = 0
    return replace(batch, advantages=advantages)


@cached_by_seed
def _perturb_old_log_probs(folder: str, batch: PackedDocuments) -> PackedDocuments:
    """Return old log-probs about the current ones, so that some ratios are clipped.

    It is the same object each time.
    """
    now = oracle_of(folder).token_outputs(batch.input_ids, batch.cu_seqlens).log_probs
    return batch.near(1, old_log_probs=now.numpy())


@case(id="train.entropy", quick="once")
def entropy(target: Target) -> float:
    """A loss that asks for entropy MUST get its gradient too, at every temperature.

    Temperatures 1 and 0.7.

    If this fails: entropy is detached, or a fused head or kernel differentiates it
    wrongly (verl #1720: the loss changes), or its gradient lacks the factor
    1/temperature.
    """
    model = target.model(tied=False)
    batches = _batches("uneven")
    config = target.config(model, memory=Memory(logit_chunk=5))
    margins = list[float]()
    for temperature, exact in (
        (1.0, losses.oracle_entropy_bonus),
        (0.7, losses.oracle_warm_entropy),
    ):
        ranks = target.run(
            train, config, batches=batches, loss=losses.entropy_bonus, temperature=temperature
        )
        want = oracle_training(str(model), batches, loss=exact)
        margins.append(training_matches(target, ranks, want, oracle_of(str(model))))
    return max(margins)


_BITS = "_bits"


def _count_changed(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return a loss whose metrics count the fields' elements, and those whose bits differ."""
    result = sft_loss(outputs, batch)
    seen = changed = 0
    for name in [name for name in batch.fields if name + _BITS in batch.fields]:
        value = batch[name]
        seen += value.numel()
        # Another dtype has other bits in all elements.
        same = value.dtype == torch.float32
        bits = value.view(torch.int32) if same else torch.zeros_like(batch[name + _BITS])
        changed += int((bits != batch[name + _BITS]).sum())
    return LossOutput(loss=result.loss, metrics={"seen": float(seen), "changed": float(changed)})


def train_on_fields(setup: Setup, documents: PackedDocuments) -> TrainOutput:
    """Make a step whose loss looks at the bits of its batch's float32 fields."""
    with opened(setup) as engine:
        batch = local_batch(engine, documents, setup.device)
        if batch.num_tokens:
            # Numbers that need all 24 bits.
            drawn = torch.linspace(-3.0, 5.0, batch.num_tokens).square().div(3.0)
            batch = batch.with_fields(drawn=drawn.to(setup.device))
            floats = {n: v for n, v in batch.fields.items() if v.dtype == torch.float32}
            bits = {f"{n}{_BITS}": v.view(torch.int32) for n, v in floats.items()}
            batch = batch.with_fields(**bits)
        return engine.train_batch(batch, _count_changed)


@case(id="train.fields", since="1.4")
def fields(target: Target) -> None:
    """A loss MUST see each field of its batch bit for bit, whatever `precision.compute` is.

    The loss weight and a field of the user's own, which need all bits of float32, in several
    micro-batches, on ranks of which one may have no documents.

    If this fails: the inputs of a module are cast to the dtype of the computation, and fields with
    them, so that advantages and old log-probs have three digits.
    """
    for lengths in ("uneven", "single"):
        batch = documents(29, lengths)
        config = target.config(target.model(), memory=Memory(max_tokens=24))
        ranks: list[TrainOutput] = target.run(train_on_fields, config, documents=batch)
        metrics = ranks[0].metrics
        must(metrics["seen"] > 0, "fields", "the loss is given none of the batch's fields")
        problem = f"{metrics['changed']:.0f} of {metrics['seen']:.0f} elements have other bits"
        must(metrics["changed"] == 0, "fields", problem)
