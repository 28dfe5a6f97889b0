"""Duties of a rollout: it serves the weights that it was given, and reports them token by token.

Stopping completions from outside (``finish_reason`` ``abort``) has no member in the
contract yet: it comes with asynchronous generation, and its cases with it.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import OptimizerConfig
from engine_api.devices import DEVICES
from engine_api.errors import ConfigError, PluginError, PluginNotFound, PluginUnavailable
from engine_api.plugin import CONTRACT, contract_problem
from engine_api.registry import RolloutRegistry
from engine_api.rollout import Rollout, SamplingParams
from engine_conformance.cases._case import FLOAT32, case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._rollouts import EOS, Do, Generate, Sync, arguments, chain
from engine_conformance.cases._served import (
    FAMILIES,
    GREEDY,
    UNEVEN,
    binds,
    clear_paths,
    engine_matches,
    follows,
    likelier_than_sampled,
    prompts_of,
    refused,
    replies,
    rollout_model,
    sampled,
    served,
    well_formed,
    worked,
)
from engine_conformance.cases._target import Target
from engine_conformance.compare import ConformanceFailure

# The other half of tied and untied, for the case that is cheap enough.
MORE: tuple[dict[str, Any], ...] = tuple(one | {"tied": not one["tied"]} for one in FAMILIES[:3])

_LIGHT = """
import sys
sys.path[:0] = {path!r}
from engine_api.registry import RolloutRegistry
rows = [row for found, row in RolloutRegistry.rows() if {backend!r} in row.backends]
assert rows, "not discovered in a fresh process"
heavy = sorted({{"torch", "transformers", "numpy", "vllm", "sglang"}} & set(sys.modules))
assert not heavy, f"loading the descriptor imports {{heavy}}"
"""


@case(id="rollout.descriptor", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True)
def descriptor(target: Target) -> None:
    """The descriptor MUST load without torch, state a served contract, and probe every device.

    The probe never raises. An explicit device is never replaced, and a misspelt name is
    refused with the near match.

    If this fails: the descriptor's module imports the rollout; a missing driver is an
    exception of the probe.
    """
    code = _LIGHT.format(path=sys.path, backend=target.backend)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    must(
        done.returncode == 0,
        "descriptor",
        done.stderr.strip().splitlines()[-1] if done.stderr else "exit code",
    )
    plugin = target.resolution.plugin
    must(
        contract_problem(plugin.contract) is None,
        "contract",
        f"{plugin.contract}, engine-api serves {CONTRACT}",
    )
    for device in DEVICES:
        said = plugin.probe(device)
        must(
            said.ok or bool(said.reason and said.remedy),
            "probe",
            "says no without reason or remedy",
            where=device,
        )
    must(
        target.resolution.device == target.device,
        "device",
        f"{target.resolution.device}, not {target.device}",
    )
    try:
        got = RolloutRegistry.resolve(backend=target.backend, device="abacus")
    except PluginUnavailable as error:
        must(bool(error.remedy), "error", "does not say what to do")
    else:
        must(False, "device", f"abacus was replaced by {got.device}")
    try:
        RolloutRegistry.resolve(backend=target.backend + "x", device=target.device)
    except PluginNotFound as error:
        must(target.backend in error.remedy, "error", f"does not name {target.backend}: {error}")
    else:
        must(False, "name", f"{target.backend}x was taken for {target.backend}")


@case(id="rollout.signatures", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True)
def signatures(target: Target) -> None:
    """The class MUST take the arguments of every rollout, and its members those of the contract.

    A rollout that declares `vision` takes images, too.

    If this fails: a renamed parameter works by position until a caller names it.
    """
    try:
        cls = target.resolution.load()
    except PluginError as error:
        raise ConformanceFailure("class", str(error)) from error
    given = arguments(target.setup(target.config(Path())))
    binds(cls, "constructor", resolution=target.resolution, **given)
    for name, member in inspect.getmembers(Rollout, inspect.isfunction):
        if not name.startswith("_"):
            must(callable(getattr(cls, name, None)), "member", "is missing", where=name)
            parameters = list(inspect.signature(member).parameters)
            binds(getattr(cls, name), name, *([None] * len(parameters)))
            binds(getattr(cls, name), name, None, **dict.fromkeys(parameters[1:]))
    # The argument is newer than the case.
    if Capability.VISION in target.capabilities and target.is_asked_since("1.4"):
        binds(cls.generate, "generate", None, [], SamplingParams(), images=[])


@case(id="rollout.states", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True)
def states(target: Target) -> None:
    """Generating before a first sync or after ``close`` MUST be a ``RolloutError`` with a remedy.

    ``wake_up`` of one that is awake, and ``close`` of one that is closed, change
    nothing.

    If this fails: random weights answer as if they were trained; a closed one fails
    with an error of its inside.
    """
    model = rollout_model(target)
    ask = Generate(prompts=prompts_of(4), sampling=GREEDY)
    good = Sync(folder=model, version=1)
    script = [
        ask,
        Do("wake_up"),
        ask,
        good,
        Do("wake_up"),
        ask,
        Do("close"),
        Do("close"),
        ask,
        good,
        Do("wake_up"),
    ]
    got = replies(target, model, [*script, Do("sleep")])
    refused(got[0], "before a sync")
    worked(got[1], "awake already")
    refused(got[2], "before a sync, awake")
    for place in (3, 4):
        worked(got[place], f"call {place}")
    served(target, got[5], model, "after a sync", version=1)
    for place in (6, 7):
        worked(got[place], "close")
    for place in (8, 9, 10):
        refused(got[place], "closed")
    must(not got[11].crash, "sleep", got[11].crash, where="closed")
    unused = replies(target, model, [Do("sleep"), ask, Do("close"), Do("close")])
    refused(unused[1], "asleep before a sync")
    for place in (0, 2, 3):
        worked(unused[place], "never synced")


@case(id="rollout.greedy", world=(1,), profile="rollout")
def greedy(target: Target) -> float:
    """Temperature 0 MUST give the likeliest tokens for every family, batch and number of samples.

    Prompts of uneven length stand in one call, one of them twice; no prompts give no
    completions.

    If this fails: padding is attended to or shifts positions; a tied head is stale or
    random; biases and norms of queries and keys are not read.
    """
    margins = []
    for kwargs in FAMILIES + MORE:
        model = rollout_model(target, **kwargs)
        prompts = prompts_of(*UNEVEN)
        ask = Generate(prompts=(*prompts, prompts[1]), sampling=replace(GREEDY, n=3))
        nothing = Generate(prompts=(), sampling=GREEDY)
        sync, got, empty = replies(target, model, [Sync(folder=model, version=5), ask, nothing])
        worked(sync, model.name)
        margins.append(served(target, got, model, model.name, version=5))
        well_formed(empty, "no prompts", version=5)
    return max(margins)


@case(id="rollout.log_probs", world=(1,), profile="rollout")
def log_probs(target: Target) -> float:
    """The log-prob of each sampled token MUST be the model's, at the call's temperature.

    Logits are divided by the temperature before the softmax.

    If this fails: log-probs are taken before the temperature (vLLM's default
    ``raw_logprobs``), or of the token after.
    """
    margins = []
    for kwargs in FAMILIES:
        model = rollout_model(target, **kwargs)
        asks = [
            Generate(prompts=prompts_of(*UNEVEN), sampling=sampled(n=4, temperature=t))
            for t in (1.0, 0.7)
        ]
        got = replies(target, model, [Sync(folder=model, version=1), *asks])
        for ask, reply in zip(asks, got[1:], strict=True):
            where = f"{model.name} at temperature {ask.sampling.temperature}"
            margins.append(served(target, reply, model, where, version=1))
    return max(margins)


@case(id="rollout.repeats", since="1.4", world=(1,), dtypes=FLOAT32, profile="rollout")
def repeats(target: Target) -> float:
    """In a text that repeats itself tokens and log-probs MUST be the model's, as in any other.

    Prompts repeat one, two and four tokens, and completions are long enough to come
    back to some of them. Greedily, and at temperatures 1 and 0.7.

    If this fails: speculative decoding (``--option speculative=ngram``) accepts tokens
    that the model would not have drawn, or reports the log-probs of the proposal, which
    is certain of its tokens.
    """
    model = rollout_model(target)
    prompts = ((9,) * 12, (11, 12) * 8, (5, 6, 7, 8) * 6)
    asks = [
        Generate(prompts=prompts, sampling=sampling)
        for sampling in (
            replace(GREEDY, max_new_tokens=48),
            sampled(n=4, max_new_tokens=48),
            sampled(n=4, max_new_tokens=48, temperature=0.7),
        )
    ]
    got = replies(target, model, [Sync(folder=model, version=1), *asks])
    worked(got[0], "sync")
    return max(
        served(target, reply, model, f"temperature {ask.sampling.temperature}", version=1)
        for ask, reply in zip(asks, got[1:], strict=True)
    )


@case(id="rollout.truncation", world=(1,), dtypes=FLOAT32, profile="rollout")
def truncation(target: Target) -> float:
    """``top_k`` and ``top_p`` MUST exclude tokens, but leave log-probs of the whole distribution.

    ``top_k=1`` is greedy. No sampled token lies outside the nucleus (Holtzman et al.
    2019, arXiv:1904.09751).

    If this fails: log-probs are renormalized over what is left, which biases the
    importance weights of the loss.
    """
    model = rollout_model(target)
    cuts = [{"top_k": 1}, {"top_k": 4}, {"top_p": 0.6}, {"top_p": 0.0001}]
    asks = [
        Generate(prompts=prompts_of(*UNEVEN), sampling=sampled(n=8, temperature=1.5, **cut))
        for cut in cuts
    ]
    got = replies(target, model, [Sync(folder=model, version=1), *asks])
    margins = []
    noise = 2 * target.tolerance("log_probs").atol
    for ask, cut, reply in zip(asks, cuts, got[1:], strict=True):
        margins.append(served(target, reply, model, f"{cut}", version=1))
        ranks = [
            rank for c in reply.completions for rank in likelier_than_sampled(model, ask, c, noise)
        ]
        others = cut in ({"top_k": 4}, {"top_p": 0.6})
        must(
            any(ranks) == others,
            "tokens",
            f"{'none is' if others else 'some are'} not the likeliest",
            where=f"{cut}",
        )
    return max(margins)


DRAWS = 256  # of each prompt


@case(id="rollout.sampling", world=(1,), dtypes=FLOAT32, profile="rollout")
def sampling(target: Target) -> float:
    """Samples MUST follow the model's distribution, repeat with the seed, and differ without.

    They differ among ``n``, too. First tokens of a vocabulary of 16 are compared, at
    temperatures 1 and 2, by Pearson's chi-square at a level of 1e-4.

    If this fails: the temperature reaches the log-probs and not the draw; one generator
    serves all rows, so that a group of samples is one sample; a server's default seed
    makes every step draw alike.
    """
    model = rollout_model(target)
    small = rollout_model(target, vocab_size=16, seed=3)
    asks = [
        Generate(prompts=prompts_of(4, 7), sampling=sampled(n=4, temperature=1.5, seed=s))
        for s in (1, 1, 2)
    ]
    free = replace(asks[0], sampling=replace(asks[0].sampling, seed=None))
    got = replies(target, model, [Sync(folder=model, version=1), *asks, free, free])
    first, again, other, one, two = (
        [c.tokens for c in well_formed(r, "seeds", version=1)] for r in got[1:]
    )
    must(first == again, "tokens", "the same seed drew others")
    must(first != other, "tokens", "another seed drew the same")
    must(one != two, "tokens", "without a seed the same was drawn twice")
    for group in (first[:4], first[4:]):
        must(
            len({tuple(tokens) for tokens in group}) == 4,
            "tokens",
            f"completions of one prompt are alike: {group}",
        )
    draws = [sampled(n=DRAWS, max_new_tokens=1, temperature=t, seed=7) for t in (1.0, 2.0)]
    many = [Generate(prompts=prompts_of(3, 6, vocab=16), sampling=draw) for draw in draws]
    counted = replies(target, small, [Sync(folder=small, version=1), *many])
    return max(follows(small, ask, reply) for ask, reply in zip(many, counted[1:], strict=True))


@case(id="rollout.stop", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True)
def stop(target: Target) -> None:
    """A completion MUST end at its first stop token or ``max_new_tokens``, and say which.

    Completions stand in their prompts' order. A stop token of the
    model and one of the call are alike; one at the very last place is a stop.

    If this fails: the stop token is cut off (the loss never learns to end); rows that
    ended early come back first.
    """
    model = rollout_model(target)
    prompts, paths = clear_paths(target, model, 6)
    eos = paths[0].tokens[1]
    own = paths[1].tokens[3]
    last = paths[2].tokens[5]
    calls = [
        SamplingParams(n=2, temperature=0.0, max_new_tokens=6, stop_token_ids=(own, last)),
        SamplingParams(temperature=0.0, max_new_tokens=4),
        SamplingParams(temperature=0.0, max_new_tokens=1),
    ]
    asks = [Generate(prompts=prompts, sampling=call) for call in calls]
    got = replies(target, model, [Sync(folder=model, version=1), *asks], eos=(EOS, eos))
    for ask, reply in zip(asks, got[1:], strict=True):
        where = f"max_new_tokens={ask.sampling.max_new_tokens}"
        stops = {EOS, eos, *ask.sampling.stop_token_ids}
        for c in well_formed(reply, where, version=1, eos=(EOS, eos)):
            want = paths[c.prompt_index].until(stops, ask.sampling.max_new_tokens)
            must(
                c.tokens == want,
                "tokens",
                f"{c.tokens}, not {want}",
                where=f"{where}, prompt {c.prompt_index}",
            )


@case(id="rollout.bad_requests", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True)
def bad_requests(target: Target) -> float:
    """A senseless request MUST raise ``RolloutError`` or ``ConfigError``.

    The rollout stays usable. Where one prompt is at fault the error names it: empty,
    too long, or with a token outside the vocabulary.

    If this fails: a token outside the vocabulary reads other memory, or ends the
    process on a GPU; a negative temperature draws the unlikeliest tokens.
    """
    model = rollout_model(target)
    good = prompts_of(4, 3)
    prompts = {"empty": (), "too long": (5,) * 510, "outside": (5, 256), "negative": (5, -1)}
    options: dict[str, dict[str, Any]] = {
        "n": {"n": 0},
        "max_new_tokens": {"max_new_tokens": 0},
        "temperature": {"temperature": -0.5},
        "top_p": {"top_p": 1.5},
        "top_k": {"top_k": -1},
    }
    ask = Generate(prompts=good, sampling=sampled())
    asks = {
        name: Generate(prompts=(*good, bad), sampling=sampled()) for name, bad in prompts.items()
    }
    asks |= {name: replace(ask, sampling=sampled(**bad)) for name, bad in options.items()}
    got = replies(target, model, [Sync(folder=model, version=1), *asks.values(), ask])
    for name, reply in zip(asks, got[1:-1], strict=True):
        refused(reply, name, also=(ConfigError,), prompt=2 if name in prompts else None)
    return served(target, got[-1], model, "after the refused requests", version=1)


@case(id="rollout.engine", world=(1,), profile="rollout", partner=True)
def engine(target: Target) -> float:
    """Log-probs of generated tokens MUST be the engine's own after each step and sync.

    Both are of the same text. Versions are the engine's, one more after each step.
    Needs the name of an engine.

    If this fails: the first sync works and later ones change nothing; the export's
    names are mapped to another tensor; rollout and engine divide by the temperature
    differently.
    """
    model = rollout_model(target)
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=None)
    other = target.partner_target()
    trainer = other.setup(other.config(model, optimizer=optimizer))
    ask = Generate(prompts=prompts_of(*UNEVEN), sampling=sampled(n=2, temperature=0.8))
    batches = [documents(seed) for seed in range(3)]
    links = target.run(chain, target.config(model), trainer=trainer, batches=batches, ask=ask)[0]
    versions = [link.engine_version for link in links]
    must(versions == [1, 2, 3], "weight_version", f"the engine counts {versions}")
    for step, link in enumerate(links):
        worked(link.sync, f"sync {step + 1}")
    return max(engine_matches(target, link, f"step {step + 1}") for step, link in enumerate(links))
