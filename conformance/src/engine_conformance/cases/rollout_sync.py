"""A rollout's weights: the newest complete ones are served, and memory is freed during sleep."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_api.errors import RankFailure
from engine_conformance.cases._case import FLOAT32, case, must
from engine_conformance.cases._rollouts import SPOILS, Action, Do, Generate, Sync
from engine_conformance.cases._served import (
    FAMILIES,
    GREEDY,
    UNEVEN,
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
from engine_conformance.compare import assert_close_per_token
from engine_conformance.oracle import read_safetensors


@case(id="rollout.sync", world=(1,), profile="rollout")
def sync(target: Target) -> float:
    """All of the new weights and nothing else MUST be served after every sync, first and later.

    Weights A, B, A, C; each tensor of an export is overwritten when the next one is
    asked for, as an engine may do. Prompts repeat, one of them long enough for a cache
    of prefixes. Every token carries the version.

    If this fails: a kernel's repacked copy of a weight stays (verl #7986; vLLM's CPU
    linears under plain ``load_weights``, where the head stays old); CUDA graphs or the
    loader keep pointers to old tensors (vLLM #48312, #41670); scales are laid out or
    rounded differently than the exporter did (vime #133, vLLM #58157); a tensor is kept
    by reference, not copied; keys and values of old weights are served again.
    """
    margins = []
    for kwargs in (FAMILIES[0], FAMILIES[2], FAMILIES[3]):
        models = [rollout_model(target, seed=seed, **kwargs) for seed in (0, 11, 0, 12)]
        prompts = prompts_of(6, 150, 1, 1, 1, 1)
        asks = [Generate(prompts=prompts, sampling=s) for s in (GREEDY, sampled(n=2))]
        script: list[Action] = []
        for version, model in zip((1, 2, 3, 7), models, strict=True):
            script += [Sync(folder=model, version=version), *asks]
        got = replies(target, models[0], script)
        for place, (version, model) in enumerate(zip((1, 2, 3, 7), models, strict=True)):
            where = f"{kwargs['family']}, sync {place + 1}"
            own = got[3 * place : 3 * place + 3]
            worked(own[0], where)
            margins += [served(target, reply, model, where, version=version) for reply in own[1:]]
    return max(margins)


# Factor of keys and values, by which their readers are divided. A power of two rounds nothing.
LARGER = 4096.0


@case(id="rollout.scales", since="1.4", world=(1,), profile="rollout")
def scales(target: Target) -> float:
    """Whatever a rollout computes from weights MUST be computed again after every sync.

    Weights A, B, A. B has keys and values of 4,096 times the size and computes the same as A, so
    that the rollout generates the same with all three. Its log-probs may be off from the model's,
    as with a cache in FP8 (``--option kv_cache_dtype=fp8``), but by the same each time.

    If this fails: scales of a cache in FP8 are those of the first weights, and larger keys and
    values are cut off; scales of activations are calibrated once.
    """
    model = rollout_model(target)
    larger = _with_larger_cache(model)
    asks = [
        Generate(prompts=prompts_of(6, 150, 1), sampling=s) for s in (GREEDY, sampled(n=2, seed=5))
    ]
    script: list[Action] = []
    for version, folder in enumerate((model, larger, model), start=1):
        script += [Sync(folder=folder, version=version), *asks]
    got = replies(target, model, script)
    tol = target.tolerance("log_probs")
    margins = []
    for place, where in enumerate(("the first weights", "larger", "the first weights again")):
        own = got[3 * place : 3 * place + 3]
        worked(own[0], where)
        for first, reply in zip(got[1:3], own[1:], strict=True):
            before = well_formed(first, "the first weights", version=1)
            now = well_formed(reply, where, version=place + 1)
            must(
                [c.tokens for c in now] == [c.tokens for c in before],
                "tokens",
                f"{[c.tokens for c in now]}, not {[c.tokens for c in before]}",
                where=where,
            )
            margins.append(
                assert_close_per_token(
                    f"log_probs ({where}; a document is a completion)",
                    [p for c in now for p in c.log_probs],
                    torch.tensor([p for c in before for p in c.log_probs]),
                    tol,
                    cu_seqlens=[0, *accumulate(len(c.tokens) for c in before)],
                )
            )
    return max(margins)


def _with_larger_cache(folder: Path) -> Path:
    """Return a model that computes the same with larger keys and values."""
    larger = folder.with_name(f"{folder.name}-larger")
    larger.mkdir(exist_ok=True)
    factors = {
        "k_norm.weight": LARGER,
        "q_norm.weight": 1 / LARGER,
        "v_proj.weight": LARGER,
        "o_proj.weight": 1 / LARGER,
    }
    tensors = read_safetensors(folder)
    for name, tensor in tensors.items():
        for end, factor in factors.items():
            if name.endswith(end):
                tensors[name] = tensor * factor
    (larger / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, larger / "model.safetensors")
    return larger


@case(id="rollout.failed_sync", world=(1,), dtypes=FLOAT32, profile="rollout")
def failed_sync(target: Target) -> float:
    """A misfit export MUST raise ``RolloutError`` and block generation until a whole one comes.

    A name that is missing, unknown or given twice, another shape, integers for a
    weight, and an export that fails in the middle (its own error, or a
    ``RolloutError``).

    If this fails: a loader skips names that it does not know, or goes on with a mixture
    of old and new weights.
    """
    old = rollout_model(target)
    new = rollout_model(target, seed=11)
    ask = Generate(prompts=prompts_of(6, 2), sampling=sampled())
    script: list[Action] = [Sync(folder=old, version=1)]
    for spoil in SPOILS:
        script += [Sync(folder=new, version=2, spoil=spoil), ask, Sync(folder=new, version=3), ask]
    got = replies(target, old, script)
    margins = []
    for place, spoil in enumerate(SPOILS):
        bad, after, good, again = got[1 + 4 * place : 5 + 4 * place]
        refused(bad, spoil, also=(RankFailure,) if spoil == "raises" else ())
        refused(after, f"after a sync that failed ({spoil})")
        worked(good, f"after {spoil}")
        margins.append(served(target, again, new, f"after {spoil} and a good sync", version=3))
    return max(margins)


@case(
    id="rollout.stale_sync", since="1.2", world=(1,), dtypes=FLOAT32, profile="rollout", quick=True
)
def stale_sync(target: Target) -> float:
    """Weights older than the served ones MUST be refused and block generation.

    A good sync permits it again. The version that is served may come again, and be
    other weights.

    If this fails: a sync that came late, or of an engine that went back to a
    checkpoint, is served as if it were new.
    """
    old = rollout_model(target)
    new = rollout_model(target, seed=11)
    ask = Generate(prompts=prompts_of(6, 2), sampling=GREEDY)
    script = [
        Sync(folder=new, version=5),
        Sync(folder=old, version=2),
        ask,
        Sync(folder=old, version=5),
        ask,
    ]
    first, late, silent, again, generated = replies(target, new, script)
    worked(first, "version 5")
    refused(late, "version 2 after 5")
    must(
        late.version == 5, "weight_version", f"{late.version} after a refused sync, 5 was installed"
    )
    refused(silent, "after a refused sync")
    worked(again, "version 5 again")
    return served(target, generated, old, "version 5 again", version=5)


@case(id="rollout.sleep", world=(1,), profile="rollout")
def sleep(target: Target) -> float:
    """``sleep`` MUST free memory, and a woken rollout MUST refuse until a sync.

    It then serves the new weights as it did before. Other weights after the first nap,
    the first ones after the second, whose caches wake up behind the sync. Twice asleep
    and twice awake is the same as once. Memory is measured where the device counts it
    (not on a CPU).

    If this fails: pools of memory are kept, or captured graphs point into memory that
    is gone (vLLM #48312); keys and values of old weights outlive the nap, where a
    device frees nothing (one prompt is long enough for a cache of prefixes).
    """
    model = rollout_model(target)
    other = rollout_model(target, seed=11)
    ask = Generate(prompts=prompts_of(*UNEVEN, 150), sampling=sampled(n=2))
    good = Sync(folder=model, version=4)
    new = Sync(folder=other, version=5)
    nap = [Do("sleep"), Do("sleep"), ask, Do("wake_up"), Do("wake_up"), ask, new, ask]
    late = [
        Do("sleep"),
        ask,
        Do("wake_up", "weights"),
        Do("wake_up", "weights"),
        replace(good, version=6),
        Do("wake_up", "kv_cache"),
        ask,
    ]
    got = replies(target, model, [good, ask, *nap, *late])
    for place in (0, 2, 3, 5, 6, 8, 10, 12, 13, 14, 15):
        worked(got[place], f"call {place}, sleep and wake")
    for place, where in ((4, "asleep"), (7, "awake, not synced"), (11, "asleep again")):
        refused(got[place], where)
    margins = [
        served(target, got[1], model, "before", version=4),
        served(target, got[9], other, "awake", version=5),
        served(target, got[16], model, "awake with its caches later", version=6),
    ]
    same = [c.tokens for c in got[16].completions] == [c.tokens for c in got[1].completions]
    must(same, "tokens", "the same seed draws others after waking up")
    if target.device != "cpu":
        _gives_memory_back(target)
    return max(margins)


def _gives_memory_back(target: Target) -> None:
    large = rollout_model(target, vocab_size=32768, hidden_size=1024)
    script = [
        Sync(folder=large, version=1),
        Do("sleep"),
        Do("wake_up"),
        Sync(folder=large, version=2),
    ]
    awake, asleep, _, again = replies(target, large, script)
    weights = (large / "model.safetensors").stat().st_size * target.torch_dtype.itemsize // 4
    for reply in (awake, again):
        freed = reply.used - asleep.used
        must(freed >= weights // 2, "memory", f"{freed} bytes freed, the weights have {weights}")
