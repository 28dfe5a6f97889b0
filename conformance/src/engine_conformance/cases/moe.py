"""Selections of experts that a batch brings along, as a rollout recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.capabilities import Capability
from engine_api.config import Memory
from engine_api.errors import BatchError, EngineError
from engine_conformance.cases._case import case
from engine_conformance.cases._expect import (
    asking,
    documents,
    oracle_of,
    oracle_training,
    outputs_match,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferredAndTrained,
    Trained,
    caught,
    infer_and_train,
    local_batch,
    opened,
    step,
    summary,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.seeds import cached_by_seed

SINCE = "1.4"
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "tied": False}
_LAYERS = 2
_EXPERTS = 4
_TOP_K = 2


@cached_by_seed
def _batch(seed: int, *, some: bool) -> PackedDocuments:
    return documents(seed).with_experts(
        seed, layers=_LAYERS, experts=_EXPERTS, top_k=_TOP_K, some=some
    )


@case(id="moe.replay", since=SINCE, requires=(Capability.ROUTER_REPLAY, Capability.MOE))
def replayed(target: Target) -> float:
    """The experts of ``routed_experts`` MUST serve their tokens, with the router's live weights.

    In log-probs and in a step of several micro-batches, recomputed where the engine does that.
    The experts are drawn, and no router would select them. Tokens that have -1, and batches
    without the field, keep the router's own. Outputs, loss, norm and every weight after the
    step are the oracle's, those of the routers among them.

    If this fails: the field reaches inference and not training, or not the recomputation; the
    weights are those of the router's own selection, or have no gradient (the router then gets
    none: a known defect of replays); the experts are shifted by one token, as targets are; a
    rank of a layout takes the experts of the whole micro-batch's first tokens.
    """
    # In 16 bits rounding decides which experts a router selects.
    some = target.dtype == "float32"
    batch = _batch(31, some=some)
    recompute = Capability.RECOMPUTE in target.capabilities
    memory = Memory(max_tokens=14, recompute="full" if recompute else "none")
    margins = list[float]()
    for normed in (True, False):
        model = target.model(**EXPERTS, norm_topk_prob=normed)
        oracle = oracle_of(str(model))
        config = target.config(model, memory=memory, router_replay=True)
        calls = [asking(target, batch)]
        if some:
            calls.append(asking(target, documents(31)))
        ranks: list[InferredAndTrained] = target.run(
            infer_and_train, config, calls=calls, batch=batch
        )
        for index, call in enumerate(calls):
            rows = [rank.outputs[index] for rank in ranks]
            margins.append(outputs_match(target, oracle, call, rows))
        want = oracle_training(str(model), (batch,))
        margins.append(training_matches(target, [r.trained for r in ranks], want, oracle))
    return max(margins)


# By name, since a call travels to the ranks by its name: what is wrong with the field.
_WRONG: Mapping[str, str] = {
    "one layer too many": "layers",
    "an expert that the model does not have": "beyond",
    "one expert twice": "twice",
    "some of a token's experts": "some",
}


def _spoiled(batch: Batch, how: str) -> Batch:
    experts = batch[ROUTED_EXPERTS].clone()
    if how == "layers":
        experts = torch.cat([experts, experts[:, :1]], dim=1)
    elif how == "beyond":
        experts[-1, -1, -1] = _EXPERTS
    elif how == "twice":
        experts[-1, -1] = 1
    else:
        experts[-1, -1, 0] = -1
    return batch.with_fields(**{ROUTED_EXPERTS: experts})


def spoil(
    setup: Setup, hows: Sequence[str], batch: PackedDocuments
) -> tuple[list[EngineError | None], Trained]:
    """Return the error of each spoiled field on this rank, and a step of the engine after them."""
    with opened(setup) as engine:
        own = local_batch(engine, batch, setup.device)
        errors = [
            caught(
                lambda how=how: engine.infer_batch(_spoiled(own, how) if own.num_tokens else own)
            )
            for how in hows
        ]
        return errors, summary(engine, [step(engine, setup, batch)])


def offer(setup: Setup, batch: PackedDocuments) -> EngineError | None:
    """Return the error of the field on an engine that is not configured for it."""
    with opened(setup) as engine:
        own = local_batch(engine, batch, setup.device)
        return caught(lambda: engine.infer_batch(own))


@case(
    id="moe.replay_refused",
    since=SINCE,
    requires=(Capability.ROUTER_REPLAY, Capability.MOE),
    dtypes=("float32",),
    world=(1, 2),
    quick="once",
)
def refused(target: Target) -> float:
    """A field ``routed_experts`` that is not the model's MUST be a ``BatchError``.

    It has another number of layers, an expert that there is not, one twice in a layer, or some
    of a layer's and not all. So MUST be any such field on an engine that is not configured
    with ``router_replay``. The engine stays usable.

    If this fails: an index out of range ends the process on an accelerator, an expert counts
    twice, or the field is left out in silence.
    """
    model = target.model(**EXPERTS)
    batch = _batch(31, some=False)
    config = target.config(model, router_replay=True)
    ranks = target.run(spoil, config, hows=list(_WRONG.values()), batch=batch)
    for index, name in enumerate(_WRONG):
        raised_everywhere(name, [errors[index] for errors, _ in ranks], BatchError)
    plain = replace(config, router_replay=False)
    errors: list[EngineError | None] = target.run(offer, plain, batch=batch)
    raised_everywhere("a field without router_replay", errors, BatchError)
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))
