"""Documents that begin alike, and engines that share their beginnings rightly or refuse it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory, Parallelism
from engine_api.errors import EngineError
from engine_conformance.cases._expect import (
    asking,
    oracle_of,
    oracle_training,
    outputs_match,
    require_refusal_by_name,
    training_matches,
)
from engine_conformance.cases._layouts import layout_holds
from engine_conformance.cases._ranks import InferredAndTrained, build, infer_and_train
from engine_conformance.cases._target import Target
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.seeds import cached_by_seed

__all__ = ["alike_documents", "holds_with_prefixes", "shared_or_refused"]

_NAMES = ("shared-prefixes", "share_prefixes")


@cached_by_seed
def alike_documents(seed: int) -> PackedDocuments:
    """Return documents that begin alike: two prompts with five answers each, and others.

    An answer of the first prompt begins with another one, two answers to the second are equal, and
    one document is a prompt alone. Tokens of the prompts carry loss, of each document another.
    """
    answers = ((9, (5, 3, 1, 6, 4)), (6, (4, 7, 2, 4, 0)))
    lengths = [prompt + own for prompt, parts in answers for own in parts]
    batch = packed_documents(seed, [*lengths, 3, 1])
    ids = batch.input_ids.copy()
    starts = [int(start) for start in batch.cu_seqlens]
    for group, (prompt, parts) in enumerate(answers):
        first = starts[group * len(parts)]
        for document in range(len(parts)):
            start = starts[group * len(parts) + document]
            ids[start : start + prompt] = ids[first : first + prompt]
    # The third answer, of one token, begins the first; the fourth to the other prompt repeats.
    ids[starts[2] + 9] = ids[starts[0] + 9]
    ids[starts[8] + 6 : starts[9]] = ids[starts[5] + 6 : starts[5] + 10]
    # The tokens of all ranks in an order in which no group stays together.
    whole = replace(batch, input_ids=ids)
    return whole.take([0, 5, 10, 6, 1, 2, 7, 11, 8, 3, 4, 9])


def holds_with_prefixes(target: Target, model: Path, layout: Parallelism) -> float:
    """Compare a layout with the oracle, and with shared beginnings too if they are declared."""
    margin = layout_holds(target, model, layout)
    if Capability.SHARED_PREFIXES not in target.capabilities:
        return margin
    memory = Memory(share_prefixes=True)
    config = target.config(model, parallelism=layout, memory=memory)
    return max(margin, shared_or_refused(target, f"{layout}", config))


def shared_or_refused(target: Target, name: str, config: EngineConfig) -> float:
    """Require right outputs and a right step of documents that begin alike, or a refusal.

    The optimizer is that of `Target.config`. A refusal comes when the engine is built, on every
    rank, and names the option.

    Args:
        target: the engine.
        name: the model or layout, for failures.
        config: a configuration with ``memory.share_prefixes``.
    """
    errors: list[EngineError | None] = target.run(build, config)
    if any(errors):
        # A model that is refused without sharing, too, lacks something else, such as a kernel.
        unshared = replace(config, memory=replace(config.memory, share_prefixes=False))
        if not any(target.run(build, unshared)):
            require_refusal_by_name(f"shared prefixes, {name}", _NAMES, errors)
        return 0.0
    batch = alike_documents(15)
    call = asking(target, batch)
    ranks: list[InferredAndTrained] = target.run(infer_and_train, config, calls=[call], batch=batch)
    oracle = oracle_of(config.model.path)
    want = oracle_training(config.model.path, (batch,))
    return max(
        outputs_match(target, oracle, call, [rank.outputs[0] for rank in ranks]),
        training_matches(target, [rank.trained for rank in ranks], want, oracle),
    )
