"""Documents that begin alike, and engines that share their beginnings rightly or refuse it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory, Parallelism
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_conformance.cases._case import must
from engine_conformance.cases._expect import (
    asking,
    oracle_of,
    oracle_training,
    outputs_match,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._ranks import InferredAndTrained, build, infer_and_train
from engine_conformance.cases._target import Target
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.seeds import cached_by_seed

__all__ = ["alike_documents", "shared_in_layout", "shared_or_refused"]

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


def shared_in_layout(target: Target, model: Path, layout: Parallelism) -> float:
    """Require that shared beginnings are right in a layout or refused, if they are declared."""
    if Capability.SHARED_PREFIXES not in target.capabilities:
        return 0.0
    memory = Memory(share_prefixes=True)
    config = target.config(model, parallelism=layout, memory=memory)
    return shared_or_refused(target, f"{layout}", config)


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
            _require_refusal(name, errors)
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


def _require_refusal(name: str, errors: Sequence[EngineError | None]) -> None:
    kind = next(type(error) for error in errors if error is not None)
    allowed = issubclass(kind, (ConfigError, UnsupportedCapability))
    raised_everywhere(f"shared prefixes, {name}", errors, kind if allowed else ConfigError)
    said = str(errors[0])
    named = any(one in said for one in _NAMES)
    must(named, f"shared prefixes, {name}", f"expected a refusal by that name, got: {said}")
