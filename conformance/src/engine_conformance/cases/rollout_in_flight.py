"""Weights that come while a rollout generates: each token is of the weights that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine_api.errors import ConfigError, EngineError, RankFailure, UnsupportedCapability
from engine_api.rollout import Completion
from engine_conformance.cases._case import FLOAT32, RefusedHere, case, must
from engine_conformance.cases._expect import oracle_of
from engine_conformance.cases._flights import LENGTHS, Flight, FlightLog, drive_flights
from engine_conformance.cases._rollouts import Generate, RolloutReply, Spoil, Sync
from engine_conformance.cases._served import (
    prompts_of,
    refused,
    rollout_model,
    sampled,
    served,
    well_formed,
    worked,
)
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_close_per_token
from engine_conformance.oracle.generate import completion_log_probs

MODES = ("recompute", "keep")
_SPOILS: tuple[Spoil, ...] = ("missing", "raises")
# Keys and values of the long prompt fill whole blocks of a cache of prefixes.
_LONG, _SHORT = prompts_of(300, 3)
# The last one waits for a place at the sync, behind keys and values of its own prompt.
_PROMPTS = (_LONG, _SHORT, _LONG)
_COUNTS = (1, 2, 1)
# Seconds for the generations of one try, and for one rollout.
_LIMIT_S = 30.0
_DEADLINE_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """The folders of the weights before a sync and after it."""

    old: Path
    new: Path


@case(
    id="rollout.in_flight",
    since="1.4",
    world=(1,),
    dtypes=FLOAT32,
    profile="rollout",
    in_flight=True,
)
def in_flight(target: Target) -> float:
    """Weights that come while tokens are generated MUST make all later tokens, and no earlier one.

    Two completions run and others wait when a sync comes. Tokens before it have its old version and
    the old weights' log-probs, tokens after it the new ones: of a fresh prompt of the same tokens,
    or over the old keys and values, as the rollout's ``kv_cache_in_flight`` says. Completions
    without a token at the sync, and those submitted after it, are of the new weights alone, behind
    a prompt whose old keys and values were in use. A sync that fails ends all of them with
    ``RolloutError``, and a good one permits generation again. One that is aborted during the sync
    has no token of the new version. ``sleep`` and ``wake_up`` are refused. ``tokens_generated``
    counts all tokens, also those of unfinished completions. Without the argument
    ``in_flight`` a sync is refused, or each token names the weights that made it.

    If this fails: versions are written for a completion, or for a step of the engine whose tokens
    arrive after the sync; a token is made while tensors are installed; keys and values that the
    rollout says to compute again are those of the old weights; a cache of prefixes serves them to a
    new prompt; a sync waits until nothing is generated, or begins completions again; after a failed
    one what is under way goes on.
    """
    weights = _Weights(old=rollout_model(target), new=rollout_model(target, seed=11))
    flight = Flight(
        before=weights.old, after=weights.new, version=10, prompts=_PROMPTS, counts=_COUNTS
    )
    good = Sync(folder=weights.old, version=1)
    ask = Generate(prompts=(_LONG, _SHORT), sampling=sampled())
    script: list[Sync | Generate | Flight] = [good, replace(flight, naps=True), ask]
    for place, spoil in enumerate(_SPOILS):
        script.append(replace(flight, version=20 * (place + 1), spoil=spoil))
        script += [replace(good, version=20 * (place + 1) + 10), ask]
    script.append(replace(flight, version=80, aborted=(0, len(_PROMPTS) - 1)))
    got = _replies(target, weights.old, script)
    if isinstance(got, EngineError):
        _require_refusal(got)
        raise RefusedHere(str(got))
    idle, mixed, after = got[:3]
    worked(idle, "the first sync")
    log = _log_of(mixed, "a sync during generations")
    margins = [_split_by_sync(target, log, weights, idle, "a sync during generations")]
    margins.append(_served(target, after, weights.new, "after it", log.new))
    for place, spoil in enumerate(_SPOILS):
        failed, again, generated = got[3 + 3 * place : 6 + 3 * place]
        where = f"a sync that fails during generations ({spoil})"
        _ends_all(_log_of(failed, where), spoil, where)
        worked(again, f"after {where}")
        version = 20 * (place + 1) + 10
        margins.append(
            _served(target, generated, weights.old, f"after {where} and a good one", version)
        )
    margins.append(_stops_at_sync(target, got[-1], weights))
    margins.append(_without_argument(target, weights, flight))
    return max(margins)


def _replies(
    target: Target,
    model: Path,
    script: Sequence[Sync | Generate | Flight],
    *,
    in_flight: bool = True,
) -> list[RolloutReply] | EngineError:
    """Return the replies of one rollout, or the error with which its options refuse to make it."""
    got: list[RolloutReply] | EngineError = target.run(
        drive_flights,
        target.config(model),
        deadline=_DEADLINE_S,
        actions=script,
        limit_s=_LIMIT_S * target.patience,
        in_flight=in_flight,
    )[0]
    if isinstance(got, EngineError):
        problem = f"is declared, and refused without any option: {got}"
        must(bool(target.options), "in_flight", problem)
    return got


def _require_refusal(error: EngineError) -> None:
    """Require that options which exclude the argument are refused by its name."""
    must(
        isinstance(error, UnsupportedCapability) and error.capability == "in_flight",
        "constructor",
        f"UnsupportedCapability of in_flight expected, got {type(error).__name__}: {error}",
    )


def _served(target: Target, reply: RolloutReply, folder: Path, where: str, version: int) -> float:
    """Do what `served` does for completions without stop tokens."""
    return served(target, reply, folder, where, version=version, eos=())


def _log_of(reply: RolloutReply, where: str) -> FlightLog:
    """Return the log of a flight in which the sync came while generations were under way."""
    worked(reply, where)
    log, flight = reply.completions, reply.action
    assert isinstance(log, FlightLog)
    assert isinstance(flight, Flight)
    assert log.sync is not None
    for nap in log.naps:
        if log.awake:
            refused(nap, f"{where}, {nap.action.member}")
    if flight.spoil is None:
        worked(log.sync, where)
    for over, generation in zip(log.ended, log.generations, strict=True):
        if not (over or flight.spoil or flight.aborted):
            worked(generation, where)
            must(
                any(one.weight_versions[-1:] == [log.new] for one in generation.completions),
                "weight_versions",
                f"unfinished when the export was read to its end, and all of version {log.old}: "
                "the sync let it finish, or its version stayed",
                where=where,
            )
    must(
        log.is_under_way(flight),
        "generations",
        f"none of up to {LENGTHS[-1]} tokens was paused by a sync in {len(LENGTHS)} tries: each "
        f"was done before it, or made by the new weights alone ({_counts(log)})",
        where=where,
    )
    return log


def _counts(log: FlightLog) -> str:
    """Return the numbers of tokens by version, for the text of a failure."""
    made = [one for reply in log.generations for one in reply.completions or ()]
    rows = [[one.weight_versions.count(v) for v in (log.old, log.new)] for one in made]
    return f"tokens before and after by completion: {rows}"


def _split_by_sync(
    target: Target, log: FlightLog, weights: _Weights, idle: RolloutReply, where: str
) -> float:
    """Compare the tokens of both versions with the weights that they name."""
    sync, fresh = log.sync, log.fresh
    assert sync is not None
    assert fresh is not None
    must(
        log.mode in MODES,
        "kv_cache_in_flight",
        f"{log.mode!r}, expected one of {', '.join(MODES)}",
        where=where,
    )
    paused = sync.completions.seconds.get("paused", 0.0)
    must(paused > 0, "SyncResult.seconds", f"paused is {paused}", where=where)
    _counts_tokens(log, where)
    audited = idle.completions.audited
    must(
        sync.completions.audited == audited,
        "audited",
        f"{sync.completions.audited}, {audited} while nothing is generated",
        where=where,
    )
    margins = [
        _tokens_match(target, log, reply, weights, f"{where}, generation {place}")
        for place, reply in enumerate(log.generations)
    ]
    apart = _modes_differ(log, weights)
    assert apart > 4 * target.tolerance("log_probs").atol, f"the fixture's modes differ by {apart}"
    where = f"{where}, submitted after it"
    margins.append(_tokens_match(target, log, fresh, weights, where))
    versions = {version for one in fresh.completions for version in one.weight_versions}
    must(versions == {log.new}, "weight_versions", f"{versions}, not {log.new}", where=where)
    return max(margins)


def _counts_tokens(log: FlightLog, where: str) -> None:
    """Require that the rollout counts each token, when it is made."""
    made = [sum(len(one.tokens) for one in reply.completions or ()) for reply in log.generations]
    total = log.pilot + sum(made)
    must(
        log.counted == total,
        "tokens_generated",
        f"it grew by {log.counted}, where {total} tokens were generated",
        where=where,
    )
    whole = log.pilot + sum(n for n, over in zip(made, log.ended, strict=True) if over)
    must(
        log.seen is not None and log.seen > whole,
        "tokens_generated",
        f"it had grown by {log.seen} at the sync, and whole generations had {whole}: those of "
        "unfinished ones are missing",
        where=where,
    )


def _made_before(log: FlightLog, one: Completion, where: str) -> int:
    """Return the number of tokens of the old version, behind which all are of the new one."""
    count = one.weight_versions.count(log.old)
    rest = len(one.tokens) - count
    must(
        one.weight_versions == [log.old] * count + [log.new] * rest,
        "weight_versions",
        f"{one.weight_versions}, expected {log.old}, and then {log.new}",
        where=where,
    )
    return count


def _tokens_match(
    target: Target, log: FlightLog, reply: RolloutReply, weights: _Weights, where: str
) -> float:
    """Compare the log-probs of completions with those of the weights of each token."""
    worked(reply, where)
    counts = [_made_before(log, one, where) for one in reply.completions]
    # Their form, apart from the versions.
    plain = [replace(one, weight_versions=[log.new] * len(one.tokens)) for one in reply.completions]
    well_formed(replace(reply, completions=plain, version=log.new), where, version=log.new, eos=())
    prompt = reply.action.prompts[0]
    bound = target.tolerance("log_probs")
    want = list[Tensor]()
    for one, count in zip(plain, counts, strict=True):
        found = _expected(one, prompt, count, weights)
        _name_other_weights(log, one, count, found, bound.atol, where)
        want.append(found[log.mode])
    return assert_close_per_token(
        f"log_probs ({where}; a document is a completion)",
        [p for one in plain for p in one.log_probs],
        torch.cat(want),
        bound,
        cu_seqlens=[0, *accumulate(map(len, want))],
    )


def _expected(
    one: Completion, prompt: Sequence[int], count: int, weights: _Weights
) -> dict[str, Tensor]:
    """Return log-probs of a completion's tokens by what made those after the first ``count``.

    Besides the modes these are ``old`` and ``new``, the weights that make all tokens, and
    ``prompt``, the new weights over old keys and values of the prompt alone.
    """
    old, new = oracle_of(str(weights.old)), oracle_of(str(weights.new))
    tokens = torch.tensor(one.tokens)
    rows = {
        name: completion_log_probs(oracle, prompt, one.tokens)
        for name, oracle in (("old", old), ("new", new))
    }
    rows["recompute"] = torch.cat((rows["old"][:count], rows["new"][count:]))
    rows["keep"] = rows["recompute"]
    text, size = [*prompt, *one.tokens], len(prompt)
    with torch.no_grad():
        if 0 < count < len(tokens):
            # The last token before the sync is the first input of the new weights.
            over = new.logits_over(old, text, size + count - 1)[:-1]
            rows["keep"] = torch.cat((rows["old"][:count], over.log_softmax(-1)))
        rows["prompt"] = new.logits_over(old, text, size - 1)[:-1].log_softmax(-1)
    return {name: row.gather(-1, tokens[:, None])[:, 0] for name, row in rows.items()}


_SAYS = {
    "old": "the old weights",
    "new": "the new weights alone",
    "keep": "the new weights over old keys and values",
    "prompt": "the new weights over old keys and values of the prompt",
}


def _name_other_weights(
    log: FlightLog,
    one: Completion,
    count: int,
    found: dict[str, Tensor],
    bound: float,
    where: str,
) -> None:
    """Raise `ConformanceFailure` for tokens of one side of the sync that other weights explain."""
    got = torch.tensor(one.log_probs, dtype=torch.float64)
    parts = {"before": slice(0, count), "after": slice(count, len(one.tokens))}
    for side, part in parts.items():
        if part.start == part.stop:
            continue
        near = float((got - found[log.mode])[part].abs().max())
        if near <= bound:
            continue
        for name, said in _SAYS.items():
            apart = float((got - found[name])[part].abs().max())
            must(
                apart > bound,
                "log_probs",
                f"{said} explain the tokens {side} the sync to {apart:.3g} nats, and what the "
                f"rollout says ({log.mode}) to {near:.3g}",
                where=where,
            )


def _modes_differ(log: FlightLog, weights: _Weights) -> float:
    """Return the largest difference that the modes make to a token, in nats."""
    return max(
        float((found["keep"] - found["recompute"]).abs().max())
        for reply in log.generations
        for one in reply.completions
        for found in [
            _expected(
                one,
                reply.action.prompts[0],
                one.weight_versions.count(log.old),
                weights,
            )
        ]
    )


def _ends_all(log: FlightLog, spoil: str, where: str) -> None:
    """Require that a failed sync ended all generations that were under way, and permits no new."""
    assert log.sync is not None
    assert log.fresh is not None
    refused(log.sync, where, also=(RankFailure,) if spoil == "raises" else ())
    for place, (over, reply) in enumerate(zip(log.ended, log.generations, strict=True)):
        if not over:
            refused(reply, f"{where}, generation {place}")
    refused(log.fresh, f"{where}, submitted after it")


def _stops_at_sync(target: Target, reply: RolloutReply, weights: _Weights) -> float:
    """Require that generations that were aborted during a sync have old tokens alone."""
    where = "generations aborted during a sync"
    log, flight = _log_of(reply, where), reply.action
    assert isinstance(flight, Flight)
    margins = list[float]()
    for place, (over, generation) in enumerate(zip(log.begun, log.generations, strict=True)):
        own = f"{where}, generation {place}"
        if over or place not in flight.aborted:
            margins.append(_tokens_match(target, log, generation, weights, own))
            continue
        worked(generation, own)
        for one in generation.completions:
            must(
                set(one.weight_versions) <= {log.old}
                and len(one.weight_versions) == len(one.tokens) == len(one.log_probs),
                "weight_versions",
                f"{len(one.tokens)} tokens of the versions {one.weight_versions}, "
                f"expected {log.old} alone",
                where=own,
            )
            must(
                one.finish_reason == "abort",
                "finish_reason",
                f"{one.finish_reason!r}, not 'abort'",
                where=own,
            )
            if one.tokens:
                margins.append(_made_by(target, one, generation, weights.old, own))
    return max(margins)


def _made_by(
    target: Target, one: Completion, reply: RolloutReply, folder: Path, where: str
) -> float:
    """Compare the log-probs of a completion with those of one folder's weights."""
    rows = completion_log_probs(oracle_of(str(folder)), reply.action.prompts[0], one.tokens)
    return assert_close_per_token(
        f"log_probs ({where})",
        one.log_probs,
        rows.gather(-1, torch.tensor(one.tokens)[:, None])[:, 0],
        target.tolerance("log_probs"),
        cu_seqlens=[0, len(one.tokens)],
    )


def _without_argument(target: Target, weights: _Weights, flight: Flight) -> float:
    """Require that a rollout without the argument refuses the sync, or names what made a token."""
    where = "a sync during generations, without in_flight"
    last = Sync(folder=weights.new, version=90)
    ask = Generate(prompts=(_SHORT,), sampling=sampled())
    script = [flight, last, ask]
    got = _replies(target, weights.old, script, in_flight=False)
    if isinstance(got, EngineError):
        # Options may say what is done in flight alone.
        must(
            isinstance(got, ConfigError), "constructor", f"{type(got).__name__}: {got}", where=where
        )
        return 0.0
    reply, again, generated = got
    margins = list[float]()
    if reply.error is None:
        margins += _names_its_weights(target, reply, weights, where)
    else:
        # It may generate in the background with the argument alone.
        refused(reply, where, also=(UnsupportedCapability,))
    worked(again, f"after {where}")
    margins.append(_served(target, generated, weights.new, f"after {where}", 90))
    return max(margins)


def _names_its_weights(
    target: Target, reply: RolloutReply, weights: _Weights, where: str
) -> list[float]:
    """Require that a sync was refused, or that each token names the weights that made it."""
    worked(reply, where)
    log = reply.completions
    assert isinstance(log, FlightLog)
    assert log.sync is not None
    is_refused = bool(log.sync.error or log.sync.crash)
    if is_refused:
        refused(log.sync, where)
    margins = list[float]()
    for place, generation in enumerate(log.generations):
        own = f"{where}, generation {place}"
        if generation.error is not None or generation.crash:
            refused(generation, own)
            continue
        for one in generation.completions:
            count = _made_before(log, one, own)
            problem = f"{one.weight_versions} after a refused sync, {log.old} expected"
            must(count == len(one.tokens) or not is_refused, "weight_versions", problem, where=own)
            if count:
                begin = _begin_of(one, count)
                margins.append(_made_by(target, begin, generation, weights.old, own))
    return margins


def _begin_of(one: Completion, count: int) -> Completion:
    """Return the first tokens of a completion."""
    return replace(
        one,
        tokens=one.tokens[:count],
        log_probs=one.log_probs[:count],
        weight_versions=one.weight_versions[:count],
    )
