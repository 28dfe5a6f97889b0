"""Functions that the tests of vLLM call in ranks; each makes, uses and closes a rollout."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from holders import compiled_functions, holders, sleepable
from torch._dynamo import convert_frame
from transformers import AutoConfig

from engine_api.batch import Batch
from engine_api.config import EngineConfig, ModelSource, OptimizerConfig, Precision
from engine_api.errors import EngineError
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, SamplingParams, SyncResult
from engine_conformance.cases._rollouts import export_of
from rollout_fp8.export import exporter
from rollout_fp8.export.exporter import collect_export

# What they run on: ``ROLLOUT_TEST_DEVICE=cuda`` runs them all on GPUs, as far as there are as many
# as ranks.
DEVICE = os.environ.get("ROLLOUT_TEST_DEVICE", "cpu")
HAS_FP8_CACHE = DEVICE != "cpu" or bool(
    {"avx512f", "amx_tile"} & {*Path("/proc/cpuinfo").read_text().split()}
)
"""Presence of vLLM's kernels for an FP8 cache on this processor."""

# On a GPU tests stand side by side: without a size for its cache vLLM measures what is free while
# the others take it, and fails.
SMALL = {"kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.1} if DEVICE == "cuda" else {}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=6, seed=1, n=2)
LONG = SamplingParams(max_new_tokens=480, temperature=0.0)  # greedy: it never comes to an end token
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 6, 7), (9, 8), (11, 12, 13, 14, 15))


def hide_kernels() -> None:
    """Let transformers compute linear attention in plain PyTorch, for a model on the CPU.

    It would take its functions from these packages in a process with a GPU.
    """
    for name in ("fla", "causal_conv1d"):
        sys.modules.setdefault(name, cast("Any", None))


@contextmanager
def opened(model: str, *, version: int | None = 1, **arguments: Any) -> Iterator[Any]:
    """Yield a rollout, with the weights of its folder unless ``version`` is None."""
    arguments = {"eos_token_ids": (2,), "enforce_eager": True} | SMALL | arguments
    compiled = compiled_functions()
    rollout = RolloutRegistry.create(
        name="vllm", device=DEVICE, model=ModelSource(path=model), pad_token_id=0, **arguments
    )
    try:
        if version is not None:
            rollout.update_weights(export_of(Path(model), DEVICE), version)
        weights = weights_of(rollout)
        yield rollout
    finally:
        rollout.close()
    # Before anything else is collected: vLLM's next engine looks only there.
    assert sleepable() == []
    assert_gone(weights)
    assert compiled_functions() <= compiled


def assert_gone(weights: Sequence[weakref.ref[Any]]) -> None:
    """Check that nothing of a closed rollout is in memory."""
    alive = [weight for tensor in weights if (weight := tensor()) is not None]
    assert not alive, (
        f"the closed rollout still has {len(alive)} weights or layers in memory:{holders(alive[0])}"
    )


def weights_of(rollout: Any) -> list[weakref.ref[Any]]:
    """Return the weights and layers of a rollout in this process.

    The layers' buffers lie in the memory that can sleep, too. Activations without buffers, which
    vLLM makes once and shares between the models of its backend, are left out.
    """
    from vllm.model_executor.layers.activation import _ACTIVATION_AND_MUL_REGISTRY

    if rollout.options.executor != "in_process":
        return []
    shared = [one for one in _ACTIVATION_AND_MUL_REGISTRY._dict.values() if not [*one.buffers()]]
    models = rollout._engine.collective_rpc("get_model")
    return [
        weakref.ref(thing)
        for model in models
        for thing in (*model.parameters(), *model.modules())
        if not any(thing is one for one in shared)
    ]


def read_configurations(folder: str) -> list[type[Any]]:
    """Return the class of a folder's configuration before and after a start of vLLM.

    The start may be refused.
    """
    before = type(AutoConfig.from_pretrained(folder))
    refused(folder)
    return [before, type(AutoConfig.from_pretrained(folder))]


def error_of(call: Any, *args: Any, **kwargs: Any) -> EngineError | None:
    """Return a call's error without the frames that it passed, because they hold the model."""
    try:
        call(*args, **kwargs)
    except EngineError as error:
        return error.with_traceback(None)
    return None


def require_error(error: EngineError | None, kind: type[EngineError], *words: str) -> None:
    """Require an error of a kind with these words, and with what to do."""
    assert isinstance(error, kind), error
    assert error.remedy
    assert all(word in str(error) for word in words), error


def refused(model: str, **arguments: Any) -> EngineError | None:
    """Return the error of making a rollout."""

    def make() -> None:
        with opened(model, **arguments):
            pass

    return error_of(make)


def float32_of_starts(model: str) -> dict[str, str | None]:
    """Return Triton's float32 setting when engines for CUDA are built, whose start ends there."""
    from rollout_fp8.options import VllmOptions
    from rollout_fp8.vllm import start

    seen: dict[str, str | None] = {}
    with mock.patch.dict(os.environ), mock.patch.object(start.vllm, "EngineArgs") as arguments:
        os.environ.pop("TRITON_F32_DEFAULT", None)
        for dtype in ("bfloat16", "float32"):

            def ends(dtype: str = dtype, **_: Any) -> None:
                seen[dtype] = os.environ.get("TRITON_F32_DEFAULT")
                raise RuntimeError

            arguments.side_effect = ends
            plan = start.Plan(
                device=torch.device("cuda", 0),
                model=ModelSource(path=model),
                dtype=dtype,
                max_num_seqs=1,
                options=VllmOptions(executor="workers"),
                tied=False,
            )
            assert error_of(start.start, plan)
    return seen


def explained(text: str) -> EngineError:
    """Return the error text for a start that vLLM ended with ``text``."""
    from rollout_fp8.vllm import start

    return start._explain(AssertionError(text))


def left_by_failed_start(model: str) -> tuple[EngineError | None, int, list[str]]:
    """Return the remains of a start that fails once the model is built and compiled.

    They are Dynamo's hooks and functions, and the holders of its memory and layers.
    """
    hooks, before = len(convert_frame._bytecode_hooks), compiled_functions()
    error = refused(model, enforce_eager=False, kv_cache_bytes=1 << 50)
    left = sleepable()  # before anything is collected: vLLM's next engine looks only there
    gc.unfreeze()
    gc.collect()
    named = ("Qwen3", "RotaryEmbedding", "Attention")
    layers = [
        one
        for one in gc.get_objects()
        if isinstance(one, torch.nn.Module) and type(one).__name__.startswith(named)
    ]
    left += [*(compiled_functions() - before), *(holders(layers[0]) if layers else [])]
    return error, len(convert_frame._bytecode_hooks) - hooks, left


def drawn(
    model: str,
    batches: Sequence[Sequence[Sequence[int]]],
    sampling: SamplingParams,
    **arguments: Any,
) -> list[list[Completion]]:
    """Return the completions of each batch of prompts."""
    with opened(model, **arguments) as rollout:
        return [rollout.generate(batch, sampling) for batch in batches]


def _random_state() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002 - the legacy one


def random_states(model: str) -> list[Any]:
    """Return the global generators' states, and torch's threads.

    Before, after a rollout was made, and after it generated.
    """
    states = [_random_state()]
    threads = torch.set_num_threads
    with opened(model) as rollout:
        states.append(_random_state())
        rollout.generate(PROMPTS, SamplingParams(max_new_tokens=4, n=2))
        states.append(_random_state())
    return [*states, torch.set_num_threads is threads]


def drawn_freely(model: str) -> tuple[list[list[int]], list[Any]]:
    """Return tokens of three calls without own seeds, with one ``sampling.seed``.

    And the global generators before and after.
    """
    with opened(model, deterministic=False) as rollout:
        before = _random_state()
        calls = [
            rollout.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12, seed=1))
            for _ in range(3)
        ]
        return [call[0].tokens for call in calls], [before, _random_state()]


def background(model: str) -> dict[str, Any]:
    """Run ``submit`` during ``generate``, ``abort``, and the calls that are refused meanwhile."""
    said: dict[str, Any] = {}
    with opened(model) as rollout:
        alone = rollout.generate([PROMPTS[0]], SAMPLED)
        running = rollout.submit(PROMPTS[1], LONG)
        quick = rollout.submit(PROMPTS[0], SAMPLED)
        said["beside"] = (alone, quick.result(600), rollout.generate([PROMPTS[0]], GREEDY))
        said["sync"] = error_of(rollout.update_weights, export_of(Path(model), DEVICE), 2)
        said["sleep"] = error_of(rollout.sleep)
        said["running"] = not running.done()
        try:
            running.result(0.0)
        except TimeoutError:
            said["timeout"] = True
        running.abort()
        said["aborted"] = running.result(0.0)
        said["bad"] = error_of(rollout.submit, (), LONG)
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        said["after"] = rollout.generate([PROMPTS[0]], GREEDY)
        lost = rollout.submit(PROMPTS[1], LONG)
    said["lost"] = error_of(lost.result, 60)
    return said


def during_a_sync(model: str) -> list[EngineError | None]:
    """Return the results of other threads while an export is read."""
    got: list[EngineError | None] = []
    with opened(model) as rollout:

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            for place, pair in enumerate(export_of(Path(model), DEVICE)):
                if place == 1:
                    calls = [
                        lambda: rollout.generate(PROMPTS, GREEDY),
                        lambda: rollout.update_weights(iter(()), 3),
                    ]
                    for call in calls:
                        thread = threading.Thread(
                            target=lambda call=call: got.append(error_of(call))
                        )
                        thread.start()
                        thread.join()
                yield pair

        rollout.update_weights(export(), 2)
        got.append(error_of(rollout.generate, PROMPTS, GREEDY))
        assert rollout.weight_version == 2
    return got


def naps(model: str, other: str) -> dict[str, Any]:
    """Run weights and caches that sleep separately, and ``other``'s weights after a sleep."""
    # The prompt fills blocks, whose keys and values are kept.
    long = tuple(3 + 7 * i % 200 for i in range(300))
    asked = [*PROMPTS, long]
    with opened(model) as rollout:
        before = rollout.generate(asked, GREEDY)
        rollout.sleep(weights=False)
        caches = error_of(rollout.generate, asked, GREEDY)
        rollout.wake_up(kv_cache=True, weights=False)
        after = rollout.generate(asked, GREEDY)
        rollout.sleep()
        order = error_of(rollout.wake_up, weights=False)
        asleep = error_of(rollout.update_weights, export_of(Path(model), DEVICE), 2)
        rollout.wake_up(kv_cache=False)
        rollout.update_weights(export_of(Path(other), DEVICE), 2)
        half = error_of(rollout.generate, asked, GREEDY)
        rollout.wake_up(weights=False)
        synced = rollout.generate(asked, GREEDY)
        rollout.update_weights(export_of(Path(other), DEVICE), 3)
        again = rollout.generate(asked, GREEDY)
    return {
        "tokens": [[c.tokens for c in some] for some in (before, after, synced, again)],
        "errors": [caches, order, asleep, half],
    }


def failures(model: str) -> dict[str, Any]:
    """Run syncs that an exporter's stream or vLLM's own loader makes fail, and good ones between.

    They fail at the first sync and at later ones.
    """
    whole = {name: tensor.clone() for name, tensor in export_of(Path(model), DEVICE)}
    up, down, norm = (
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    )
    bad = {
        "missing": {name: tensor for name, tensor in whole.items() if name != up},
        "short": whole | {down: whole[down][:7]},
        "unknown": whole | {norm.replace("norm", "nrm"): whole[norm]},
    }
    said: dict[str, Any] = {"errors": {}, "tokens": []}
    with opened(model, version=None) as rollout:

        def failed(
            tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
        ) -> list[str]:
            """Return the errors of a sync and of ``generate``, as text.

            Errors hold the frames that they passed, and those hold the model.
            """
            stream = collect_export(
                iter(tensors.items()),
                device=torch.device(DEVICE),
                dtype=dtype,
                architecture=None,
                scales="fp32",
                audit=True,
            )
            errors = [
                error_of(rollout.update_weights, stream, 1),
                error_of(rollout.generate, PROMPTS, GREEDY),
            ]
            return ["" if error is None else f"{type(error).__name__}: {error}" for error in errors]

        for when in ("first", "later"):
            for kind, tensors in bad.items():
                said["errors"][when, kind] = failed(tensors)
            for kind, dtype in (("half", torch.float32), ("half, another plan", torch.bfloat16)):
                with _ending_half_way(rollout):
                    said["errors"][when, kind] = failed(whole, dtype)
                said["errors"][f"after {when} {kind}", "none"] = failed(whole)
                said["tokens"].append([c.tokens for c in rollout.generate(PROMPTS, GREEDY)])
    return said


@contextmanager
def _ending_half_way(rollout: Any) -> Iterator[None]:
    """Make vLLM's loader take a part of the weights and fail, without a message."""
    (served,) = rollout._engine.collective_rpc("get_model")
    load = type(served).load_weights

    def half(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        # One of two fused tensors has come.
        load(served, takewhile(lambda pair: "layers.1.mlp.up_proj" not in pair[0], weights))
        raise AssertionError

    served.load_weights = half
    try:
        yield
    finally:
        del served.load_weights


def trained(
    model: str, folder: str, dtype: str
) -> tuple[list[list[int]], list[SyncResult], list[list[float]], list[list[float]]]:
    """Train with fsdp2, sync its shards, twice; then save what is served.

    Greedy tokens; what the syncs said; log-probs of drawn tokens by vLLM and by the engine.
    """
    source, config = (
        ModelSource(path=model),
        {"dtype": dtype, "pad_token_id": 0, "enforce_eager": True} | SMALL,
    )
    engine = EngineRegistry.create(
        backend="fsdp2",
        device=DEVICE,
        config=EngineConfig(
            model=source, optimizer=OptimizerConfig(lr=1e-2), precision=Precision(compute=dtype)
        ),
    )
    engine.initialize()
    rollout = RolloutRegistry.create(name="vllm", device=DEVICE, model=source, **config)
    exporter = RolloutRegistry.create_exporter(
        name="vllm", device=DEVICE, model=source, dtype=dtype
    )
    ids = torch.arange(40).reshape(4, 10) + 5
    batch = Batch.pack(
        [{"input_ids": row, "loss_weight": torch.tensor([0.0] + [1.0] * 9)} for row in ids]
    )
    try:
        said = []
        for _ in range(2):
            engine.train_batch(batch, sft_loss)
            said.append(rollout.update_weights(exporter.export(engine), engine.weight_version))
        engine.save_hf(folder, dtype=getattr(torch, dtype))
        greedy = [c.tokens for c in rollout.generate(PROMPTS, GREEDY)]
        drawn = rollout.generate(PROMPTS, SAMPLED)
        asked = Batch.pack(
            [{"input_ids": torch.tensor([*PROMPTS[c.prompt_index], *c.tokens])} for c in drawn]
        )
        rows = engine.infer_batch(asked).log_probs.split(
            [len(PROMPTS[c.prompt_index]) + len(c.tokens) for c in drawn]
        )
        return (
            greedy,
            said,
            [c.log_probs for c in drawn],
            [row[-len(c.tokens) :].tolist() for row, c in zip(rows, drawn, strict=True)],
        )
    finally:
        rollout.close()
        exporter.close()
        engine.close()


def raw_and_synced(old: str, new: str, dtype: str) -> tuple[str, list[list[int]], list[list[int]]]:
    """Call ``load_weights`` on the served model, and then sync in many buckets.

    Returns the error of the first, and tokens after each.
    """
    with opened(old, dtype=dtype) as rollout:
        tensors = [(name, tensor.clone()) for name, tensor in export_of(Path(new), DEVICE)]
        raised = ""
        try:
            rollout._engine.apply_model(lambda model: model.load_weights(tensors))
        except Exception as error:  # noqa: BLE001 - whatever vLLM says
            raised = f"{type(error).__name__}: {error}"
        rollout._engine.reset_prefix_cache()
        raw = [c.tokens for c in rollout.generate(PROMPTS, GREEDY)]
        # Buffers are filled again while vLLM loads.
        with mock.patch.object(exporter, "BUCKET_BYTES", 1 << 14):
            rollout.update_weights(iter(tensors), 2)
        return raised, raw, [c.tokens for c in rollout.generate(PROMPTS, GREEDY)]


def on_ranks(model: str, **options: Any) -> tuple[list[Completion], float]:
    """Run this rank's own prompts, from weights that came twice; then sum over the ranks."""
    mine = [PROMPTS[dist.get_rank()]]
    with opened(model, **options) as rollout:
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        got = rollout.generate(mine, SAMPLED)
    total = torch.ones(())
    dist.all_reduce(total)  # the group is still there
    return got, float(total)


def in_workers(model: str, **options: Any) -> tuple[list[Completion], float]:
    """Do the same with a server in its own processes."""
    began = time.monotonic()
    with opened(model, executor="workers", **options) as rollout:
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        got = rollout.generate(PROMPTS, SAMPLED)
    return got, time.monotonic() - began


def mixed(
    model: str, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
) -> tuple[list[Completion], list[Completion]]:
    """Run each prompt with its own sampling, all at the same time and one after another."""
    with opened(model) as rollout:
        running = [rollout.submit(p, s) for p, s in zip(prompts, samplings, strict=True)]
        together = [g.result(600)[0] for g in running]
        return together, [
            rollout.generate([p], s)[0] for p, s in zip(prompts, samplings, strict=True)
        ]


@torch.no_grad()
def routed(model: str, completions: Sequence[Completion]) -> list[torch.Tensor]:
    """Return by completion of ``PROMPTS`` the experts that transformers' routers select."""
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
    found: list[torch.Tensor] = []
    for layer in lm.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _given, out: found.append(out[2]))
    result: list[torch.Tensor] = []
    for c in completions:
        found.clear()
        lm(input_ids=torch.tensor([[*PROMPTS[c.prompt_index], *c.tokens]], device=DEVICE))
        result.append(torch.stack(found, dim=1).cpu())
    return result


def recorded(
    model: str, **arguments: Any
) -> tuple[list[Completion], list[Completion], list[torch.Tensor]]:
    """Return completions with recorded experts, twice, and the experts that should serve them.

    At the second time the prompts' keys and values are in the cache.
    """
    with opened(model, routed_experts=True, **arguments) as rollout:
        first, again = (rollout.generate(PROMPTS, SAMPLED) for _ in range(2))
    return first, again, routed(model, first)


# Tokens of a long prompt, whose keys and values are read from the cache.
LONG_PROMPT: tuple[int, ...] = tuple(3 + 7 * i % 200 for i in range(90))


def cached_in_fp8(model: str, other: str, **arguments: Any) -> dict[str, Any]:
    """Run an FP8 cache over syncs of two models' weights, with fresh scales and with stale ones."""
    asked = [*PROMPTS, LONG_PROMPT]
    said: dict[str, Any] = {}
    with opened(model, kv_cache_dtype="fp8", **arguments) as rollout:
        said["first"] = rollout.generate(asked, GREEDY)
        result = rollout.update_weights(export_of(Path(other), DEVICE), 2)
        said["phases"] = sorted(result.seconds)
        said["synced"] = rollout.generate(asked, GREEDY)
        rollout.update_weights(export_of(Path(model), DEVICE), 3)
        said["again"] = rollout.generate(asked, GREEDY)

        def stale(version: int) -> None:
            rollout._scales_version = version

        with mock.patch.object(rollout, "_scale_cache", stale):
            rollout.update_weights(export_of(Path(other), DEVICE), 4)
        said["stale"] = rollout.generate(asked, GREEDY)
        with mock.patch.object(rollout, "_scale_cache"):
            rollout.update_weights(export_of(Path(other), DEVICE), 5)
        said["refused"] = error_of(rollout.generate, asked, GREEDY)
        rollout.sleep()
        rollout.wake_up(kv_cache=False)
        rollout.update_weights(export_of(Path(other), DEVICE), 6)
        rollout.wake_up(weights=False)
        said["woken"] = rollout.generate(asked, GREEDY)
        rollout.update_weights(export_of(Path(model), DEVICE), 7)
        rollout.sleep()
        rollout.wake_up(kv_cache=False)
        rollout.update_weights(export_of(Path(other), DEVICE), 7)
        rollout.wake_up(weights=False)
        said["same_version"] = rollout.generate(asked, GREEDY)
        rollout.sleep(weights=False)
        rollout.wake_up(weights=False)
        said["slept"] = rollout.generate(asked, GREEDY)
    return said


def interrupted_scales(model: str, **arguments: Any) -> dict[str, Any]:
    """Interrupt the pass that scales are computed from, and sync once more."""
    # They import vLLM.
    from rollout_fp8.vllm.generation import Job
    from rollout_fp8.vllm.private import attention_layers

    said: dict[str, Any] = {}
    with opened(model, kv_cache_dtype="fp8", **arguments) as rollout:
        said["first"] = rollout.generate(PROMPTS, GREEDY)
        (served,) = rollout._engine.collective_rpc("get_model")
        layers = attention_layers(served).values()
        before = torch.get_rng_state()
        with mock.patch.object(Job, "result", side_effect=KeyboardInterrupt):
            try:
                rollout.update_weights(export_of(Path(model), DEVICE), 2)
            except KeyboardInterrupt:
                said["busy"] = rollout._stepper.busy
                said["observed"] = ["forward" in vars(layer.impl) for layer in layers]
        said["same_generators"] = torch.equal(torch.get_rng_state(), before)
        # They hold the model.
        del served, layers
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        said["again"] = rollout.generate(PROMPTS, GREEDY)
    return said


def refused_backend(model: str, **arguments: Any) -> EngineError | None:
    """Return the error of a start with a backend of attention that is not known."""
    # It imports vLLM.
    from rollout_fp8.vllm import cache

    with mock.patch.object(cache, "_BACKENDS", ("SOME_ATTN",)):
        return refused(model, version=None, kv_cache_dtype="fp8", **arguments)


def held_and_streamed(model: str) -> tuple[list[Any], list[Any], list[int], int]:
    """Return completions with log-probs by ``generate`` and by ``submit``.

    With them the number of outputs that vLLM's processor saw for each, and of those left over.
    """
    with opened(model) as rollout:
        held = rollout._stepper._held
        seen: list[int] = []
        process = held._process

        def count(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(outputs))
            return process(outputs, *args, **kwargs)

        held._process = count
        together = rollout.generate(PROMPTS, SAMPLED)
        counts = [sum(seen)]
        seen.clear()
        # The seeds of a draw follow the prompt and its number among the equal ones.
        streamed = [
            one for prompt in PROMPTS for one in rollout.submit(prompt, SAMPLED).result(600)
        ]
        counts.append(sum(seen))
        left = len(held._held) + len(held._ended)
    rows = [[(one.tokens, one.log_probs) for one in group] for group in (together, streamed)]
    return rows[0], rows[1], counts, left
