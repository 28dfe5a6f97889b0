"""Judgement of a rollout's replies in the controller: form, weights, distribution, refusals."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_api.errors import ConfigError, EngineError, RolloutError
from engine_api.rollout import Completion, SamplingParams
from engine_conformance.cases._case import must
from engine_conformance.cases._expect import oracle_of
from engine_conformance.cases._rollouts import (
    EOS,
    Action,
    Generate,
    Link,
    Prompts,
    RolloutReply,
    drive,
)
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_close_per_token
from engine_conformance.oracle import OracleModel
from engine_conformance.oracle.generate import Greedy, completion_log_probs, greedy
from engine_conformance.tolerances import Tolerance

__all__ = [
    "FAMILIES",
    "GREEDY",
    "UNEVEN",
    "binds",
    "clear_paths",
    "engine_matches",
    "follows",
    "likelier_than_sampled",
    "prompts_of",
    "refused",
    "replies",
    "rollout_model",
    "sampled",
    "served",
    "well_formed",
    "worked",
]

UNEVEN = (5, 1, 23, 9, 2)  # tokens of prompts
FAMILIES: tuple[dict[str, Any], ...] = (
    {"family": "llama", "tied": False},
    {"family": "qwen2", "tied": True},
    {"family": "qwen3", "tied": True},
    {"family": "qwen3_moe", "tied": False},
)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


def sampled(seed: int = 1, **kwargs: Any) -> SamplingParams:
    """Build a request for eight drawn tokens."""
    arguments_of: dict[str, Any] = {"max_new_tokens": 8, "seed": seed} | kwargs
    return SamplingParams(**arguments_of)


def rollout_model(target: Target, **kwargs: Any) -> Path:
    """Return a generated model whose heads have 32 elements, or 64 with experts.

    Kernels of servers have a smallest head, and 16 is below it. SGLang 0.5.16 serves
    experts in bf16 with none of 32.
    """
    # Untied: a tied head with random weights mostly repeats the last token.
    # Qwen2 has no head_dim of its own: its heads share the hidden size.
    own = {
        "qwen2": {"num_heads": 2, "num_kv_heads": 1},
        # Of this seed bf16 leaves a sixth of the tokens comparable: for the others rounding may
        # choose other experts.
        "qwen3_moe": {"head_dim": 64, "seed": 1},
    }.get(kwargs.get("family", ""), {})
    return target.model(**({"tied": False, "head_dim": 32, **own} | kwargs))


def prompts_of(*lengths: int, seed: int = 0, vocab: int = 256) -> Prompts:
    """Return random prompts of these lengths, without the first three ids."""
    generator = np.random.default_rng(seed)
    return tuple(tuple(generator.integers(3, vocab, length).tolist()) for length in lengths)


def replies(
    target: Target, model: Path, actions: Sequence[Action], *, eos: Sequence[int] = (EOS,)
) -> list[RolloutReply]:
    """Return the replies of one rollout for ``model``."""
    answered: list[RolloutReply] = target.run(
        drive, target.config(model), actions=actions, eos=eos
    )[0]
    return answered


def worked(reply: RolloutReply, where: str) -> None:
    """Require that there was no error of any kind."""
    problem = reply.crash or (f"{type(reply.error).__name__}: {reply.error}" if reply.error else "")
    must(not problem, type(reply.action).__name__.lower(), problem, where=where)


def refused(
    reply: RolloutReply,
    where: str,
    *,
    also: tuple[type[EngineError], ...] = (),
    prompt: int | None = None,
) -> None:
    """Require ``RolloutError`` (or one of ``also``) with a remedy.

    The text names the place of the prompt at fault.
    """
    what = type(reply.action).__name__.lower()
    must(not reply.crash, what, f"RolloutError expected, got:\n{reply.crash}", where=where)
    error = reply.error
    must(error is not None, what, "nothing was raised, RolloutError expected", where=where)
    must(
        isinstance(error, (RolloutError, *also)),
        what,
        f"{type(error).__name__}: {error}",
        where=where,
    )
    if isinstance(error, (RolloutError, ConfigError)):
        must(bool(error.remedy), what, f"the error does not say what to do: {error}", where=where)
    named = prompt is None or re.search(rf"\b{prompt}\b", str(error)) is not None
    must(named, what, f"the error does not name prompt {prompt}: {error}", where=where)


def well_formed(
    reply: RolloutReply, where: str, *, version: int, vocab: int = 256, eos: Sequence[int] = (EOS,)
) -> list[Completion]:
    """Return the completions grouped by prompt, after checking their lengths and finish reasons."""
    worked(reply, where)
    action = reply.action
    assert isinstance(action, Generate)
    got = reply.completions
    sampling = action.sampling
    order = [index for index in range(len(action.prompts)) for _ in range(sampling.n)]
    must(
        isinstance(got, list), "completions", f"{type(got).__name__}, a list expected", where=where
    )
    must(
        [c.prompt_index for c in got] == order,
        "prompt_index",
        f"{[c.prompt_index for c in got]}",
        where=where,
    )
    must(
        reply.version == version,
        "weight_version",
        f"{reply.version}, {version} was installed",
        where=where,
    )
    for place, c in enumerate(got):
        _check_completion(
            c,
            sampling,
            {*eos, *sampling.stop_token_ids},
            vocab,
            version,
            f"{where}, completion {place}",
        )
    return got


def _check_completion(
    c: Completion, sampling: SamplingParams, stops: set[int], vocab: int, version: int, where: str
) -> None:
    count = len(c.tokens)
    must(
        1 <= count <= sampling.max_new_tokens,
        "tokens",
        f"{count} of at most {sampling.max_new_tokens}",
        where=where,
    )
    must(
        all(type(t) is int and 0 <= t < vocab for t in c.tokens),
        "tokens",
        f"{c.tokens}",
        where=where,
    )
    must(
        len(c.log_probs) == count,
        "log_probs",
        f"{len(c.log_probs)} for {count} tokens",
        where=where,
    )
    must(
        all(-math.inf < p <= 1e-3 for p in c.log_probs), "log_probs", f"{c.log_probs}", where=where
    )
    must(
        c.weight_versions == [version] * count,
        "weight_versions",
        f"{c.weight_versions}, not {version}",
        where=where,
    )
    inner = stops.intersection(c.tokens[:-1])
    must(not inner, "tokens", f"{c.tokens} go on after the stop token {inner}", where=where)
    reason = "stop" if c.tokens[-1] in stops else "length"
    must(
        c.finish_reason == reason,
        "finish_reason",
        f"{c.finish_reason!r}, not {reason!r}: {c.tokens}",
        where=where,
    )
    full = reason == "stop" or count == sampling.max_new_tokens
    must(
        full,
        "tokens",
        f"{count} of {sampling.max_new_tokens}, and no stop token: {c.tokens}",
        where=where,
    )


def served(
    target: Target,
    reply: RolloutReply,
    folder: Path,
    where: str,
    *,
    version: int,
    eos: Sequence[int] = (EOS,),
) -> float:
    """Require that every token came from the weights of ``folder``, and return the margin.

    Greedy tokens must be the oracle's, or lie behind its choice by no more than
    rounding explains; the log-probs of sampled ones must be the oracle's.
    """
    action = reply.action
    oracle = oracle_of(str(folder))
    assert isinstance(action, Generate)
    completions = well_formed(reply, where, version=version, eos=eos)
    keep = [
        _comparable(target, oracle, action.prompts[c.prompt_index], c.tokens) for c in completions
    ]
    assert any(bool(k[0]) for k in keep), f"the fixture leaves nothing to compare: {where}"
    compare = _greedy_matches if action.sampling.temperature == 0 else _log_probs_match
    return compare(target, oracle, action, completions, keep, where)


def _greedy_matches(
    target: Target,
    oracle: OracleModel,
    action: Generate,
    completions: Sequence[Completion],
    keep: Sequence[Tensor],
    where: str,
) -> float:
    rounding = 2 * target.tolerance("log_probs").atol
    worst = 0.0
    for c, kept in zip(completions, keep, strict=True):
        prompt = action.prompts[c.prompt_index]
        rows = completion_log_probs(oracle, prompt, c.tokens)
        behind = rows.amax(-1) - rows.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
        step = int(behind.masked_fill(~kept, 0.0).argmax())
        problem = (
            f"token {c.tokens[step]}, the oracle has {int(rows[step].argmax())} "
            f"(by {behind[step]:.3g} nats)"
        )
        place = f"{where}, prompt {c.prompt_index} of {len(prompt)} tokens, step {step}"
        margin = float(behind[step] / rounding) if kept[step] else 0.0
        must(margin <= 1, "greedy tokens", problem, where=place)
        worst = max(worst, margin)
    return worst


def _log_probs_match(
    target: Target,
    oracle: OracleModel,
    action: Generate,
    completions: Sequence[Completion],
    keep: Sequence[Tensor],
    where: str,
) -> float:
    want = list[Tensor]()
    for c in completions:
        rows = completion_log_probs(
            oracle, action.prompts[c.prompt_index], c.tokens, action.sampling.temperature
        )
        want.append(rows.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0])
    got = [p for c in completions for p in c.log_probs]
    bounds = [0, *accumulate(len(w) for w in want)]
    name = f"log_probs ({where}; a document is a completion)"
    tol = target.tolerance("log_probs")
    return assert_close_per_token(
        name, got, torch.cat(want), tol, cu_seqlens=bounds, keep=torch.cat(list(keep))
    )


def _comparable(
    target: Target, oracle: OracleModel, prompt: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Return the tokens before which rounding cannot have changed a choice of experts.

    The result is bool ``[len(tokens)]``.
    """
    if oracle.config.moe is None:
        return torch.ones(len(tokens), dtype=torch.bool)
    ids = [*prompt, *tokens]
    gap = 2 * target.tolerance("router_logits").atol
    return (oracle.routing_margin(ids, [0, len(ids)]) > gap)[len(prompt) :]


def engine_matches(
    target: Target, link: Link, where: str, *, vocab: int = 256, layers: int = 2
) -> float:
    """Compare the rollout's log-probs with the engine's.

    Each may be off from the truth by its own tolerance.
    """
    completions = well_formed(link.generated, where, version=link.engine_version, vocab=vocab)
    got = torch.tensor([p for c in completions for p in c.log_probs])
    bounds = [0, *accumulate(len(c.tokens) for c in completions)]
    tol = Tolerance(atol=2 * target.tolerance("log_probs", layers=layers).atol)
    return assert_close_per_token(
        f"log_probs ({where})", got, torch.cat(link.log_probs), tol, cu_seqlens=bounds
    )


def likelier_than_sampled(model: Path, ask: Generate, c: Completion, noise: float) -> list[int]:
    """Count the tokens that are clearly likelier than each sampled one.

    Too many of them, or too much of their mass, is a failure.
    """
    sampling = ask.sampling
    prompt = ask.prompts[c.prompt_index]
    rows = completion_log_probs(oracle_of(str(model)), prompt, c.tokens, sampling.temperature)
    own = rows.gather(-1, torch.tensor(c.tokens)[:, None])
    likelier = rows > own + noise
    mass = (rows.exp() * likelier).sum(-1)
    where = f"top_k={sampling.top_k}, top_p={sampling.top_p}, prompt {c.prompt_index}"
    counted: list[int] = likelier.sum(-1).tolist()
    if sampling.top_k:
        must(
            max(counted) < sampling.top_k,
            "tokens",
            f"{max(counted)} likelier tokens were passed over",
            where=where,
        )
    most = float(mass.max())
    must(
        most < sampling.top_p + noise,
        "tokens",
        f"one lies outside the nucleus: {most:.3g} is likelier",
        where=where,
    )
    return counted


def follows(model: Path, ask: Generate, reply: RolloutReply) -> float:
    """Return the larger ratio of the prompts' chi-square to its critical value.

    Compared are the first tokens of each prompt.
    """
    worst = 0.0
    completions = well_formed(reply, "many samples", version=1, vocab=16)
    for index, prompt in enumerate(ask.prompts):
        rows = completion_log_probs(oracle_of(str(model)), prompt, [EOS], ask.sampling.temperature)
        seen = Counter(c.tokens[0] for c in completions if c.prompt_index == index)
        statistic, critical = _chi_square(seen, rows[0].exp() * ask.sampling.n)
        problem = f"chi-square {statistic:.3g}, critical {critical:.3g}: seen {dict(seen)}"
        must(
            statistic <= critical, "distribution", problem, where=f"prompt {index}, {ask.sampling}"
        )
        worst = max(worst, statistic / critical)
    return worst


def _chi_square(
    seen: Mapping[int, int], expected: Tensor, quantile: float = 3.719
) -> tuple[float, float]:
    """Return Pearson's statistic and its critical value at 1e-4 (Wilson and Hilferty 1931).

    Cells below 5 are joined.
    """
    order = expected.argsort(descending=True).tolist()
    cells = [[float(seen.get(token, 0)), float(expected[token])] for token in order]
    while len(cells) > 1 and cells[-1][1] < 5:
        got, want = cells.pop()
        cells[-1] = [cells[-1][0] + got, cells[-1][1] + want]
    assert len(cells) > 2, "the fixture's distribution is too sharp to say anything"
    degrees = len(cells) - 1
    spread = 2 / (9 * degrees)
    critical = degrees * (1 - spread + quantile * math.sqrt(spread)) ** 3
    return sum((got - want) ** 2 / want for got, want in cells), critical


def clear_paths(target: Target, model: Path, steps: int) -> tuple[Prompts, list[Greedy]]:
    """Return four prompts whose greedy tokens differ from one another in each completion.

    No rounding decides a token.
    """
    clear = 4 * target.tolerance("log_probs").atol
    pairs = [
        (p, greedy(oracle_of(str(model)), p, steps))
        for p in prompts_of(*UNEVEN, *UNEVEN, *UNEVEN, seed=4)
    ]
    good = [(p, g) for p, g in pairs if g.lead > clear and len({EOS, *g.tokens}) == steps + 1][:4]
    assert len(good) == 4, "the fixture has too few prompts that are clear"
    return tuple(p for p, _ in good), [g for _, g in good]


def binds(function: Any, where: str, *positional: Any, **named: Any) -> None:
    """Return whether ``function`` accepts such a call, without calling it."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        must(False, "signature", f"{inspect.signature(function)}: {error}", where=where)
