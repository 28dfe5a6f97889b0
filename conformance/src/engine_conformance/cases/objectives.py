"""Losses, temperature and entropy in training, against the oracle's own."""

from __future__ import annotations

from engine_api.config import Memory
from engine_conformance.cases import _losses as losses
from engine_conformance.cases._case import FLOAT32, case, must
from engine_conformance.cases._expect import documents, oracle_of, oracle_training, training_matches
from engine_conformance.cases._ranks import train
from engine_conformance.cases._target import Target
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
    ranks = target.run(train, target.config(model), batches=batches, temperature=0.7)
    return training_matches(
        target,
        ranks,
        oracle_training(str(model), batches, loss=losses.oracle_warm),
        oracle_of(str(model)),
    )


# In bfloat16 rounding decides which ratios are clipped: the gradient is another one.
@case(id="train.policy", dtypes=FLOAT32, quick=True)
def policy(target: Target) -> float:
    """A clipped policy loss MUST give the oracle's gradient, and metrics that are sums.

    The denominator is the caller's.

    If this fails: the engine divides by its own count of tokens; metrics are averaged,
    or counted once a rank.
    """
    model = target.model()
    oracle = oracle_of(str(model))
    plain = documents(21, "uneven")
    batch = _near(str(model), plain)
    config = target.config(model, memory=Memory(max_tokens=16))
    ranks = target.run(train, config, batches=[batch], loss=losses.policy, denominators=[17.0])
    want = oracle_training(str(model), (batch,), loss=losses.oracle_policy, denominators=(17.0,))
    got = ranks[0].outputs[0]
    must(got.denominator == 17.0, "denominator", f"{got.denominator}, the caller's is 17")
    must(
        got.metrics["weight"] == batch.denominator,
        "metrics",
        f"weight {got.metrics['weight']}, not {batch.denominator}",
    )
    must(
        got.num_tokens == len(batch.input_ids),
        "num_tokens",
        f"{got.num_tokens} of {len(batch.input_ids)}",
    )
    return training_matches(target, ranks, want, oracle, off_policy=(0,))


@cached_by_seed
def _near(folder: str, batch: PackedDocuments) -> PackedDocuments:
    """Return old log-probs about the current ones, so that some ratios are clipped.

    It is the same object each time.
    """
    now = oracle_of(folder).token_outputs(batch.input_ids, batch.cu_seqlens).log_probs
    return batch.near(1, old_log_probs=now.numpy())


@case(id="train.entropy")
def entropy(target: Target) -> float:
    """A loss that asks for entropy MUST get its gradient too.

    If this fails: entropy is detached, or a fused head or kernel differentiates it
    wrongly (verl #1720: the loss changes).
    """
    model = target.model(tied=False)
    batches = _batches("uneven")
    config = target.config(model, memory=Memory(logit_chunk=5))
    ranks = target.run(train, config, batches=batches, loss=losses.entropy_bonus)
    want = oracle_training(str(model), batches, loss=losses.oracle_entropy_bonus)
    return training_matches(target, ranks, want, oracle_of(str(model)))
