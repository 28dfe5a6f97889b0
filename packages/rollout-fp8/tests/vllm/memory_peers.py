"""Memory that rollouts take and free, measured in ranks."""

from __future__ import annotations

import functools
import gc
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from holders import holders
from torch._dynamo import guards
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.models import interfaces
from vllm_peers import DEVICE, GREEDY, PROMPTS, error_of, export_of, opened

from engine_api.errors import EngineError
from engine_api.rollout import SamplingParams
from rollout_fp8.vllm import start


def closed_asleep(model: str, weights: bool) -> tuple[int, int, list[list[int]], list[list[int]]]:
    """Return free bytes of the device without a rollout, before and after one was closed asleep.

    And the tokens of it and of the next.
    """
    tokens, free = list[list[list[int]]](), list[int]()
    # The first rollout leaves memory that stays: kernels, libraries' workspaces.
    for end in (
        None,
        {"weights": weights},
        None,
    ):
        with opened(model) as rollout:
            tokens.append([c.tokens for c in rollout.generate(PROMPTS, GREEDY)])
            if end is not None:
                rollout.sleep(**end)
        free.append(torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0)
    return free[0], free[1], tokens[1], tokens[2]


def cache_for_batch(model: str, batch_size: int, max_model_len: int) -> tuple[int, int, list[int]]:
    """Return vLLM's blocks, their size, and the tokens of completions that fill the cache."""
    arguments = {
        "kv_cache_bytes": None,
        "kv_cache_for_batch": True,
        "max_model_len": max_model_len,
        "eos_token_ids": (),
    }
    with opened(model, batch_size=batch_size, **arguments) as rollout:
        config = rollout._engine.vllm_config.cache_config
        prompts = [tuple(range(5 + i, 13 + i)) for i in range(batch_size)]
        got = rollout.generate(
            prompts, SamplingParams(max_new_tokens=max_model_len - 8, temperature=0.0)
        )
        return config.num_gpu_blocks, config.block_size, [len(c.tokens) for c in got]


def crowded(model: str) -> tuple[EngineError | None, int, list[list[int]], list[list[int]]]:
    """Wake up while a tensor holds the GPU's memory.

    Returns the free bytes when PyTorch keeps it, and tokens before and after that.
    """
    with opened(model) as rollout:
        before = rollout.generate(PROMPTS, GREEDY)
        rollout.sleep()
        held = torch.empty(
            torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=DEVICE
        )
        error = error_of(rollout.wake_up)
        del held
        free = torch.cuda.mem_get_info()[0]
        rollout.wake_up()
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        after = rollout.generate(PROMPTS, GREEDY)
    return error, free, [c.tokens for c in before], [c.tokens for c in after]


class Compiled(torch.nn.Module, TorchCompileWithNoGuardsWrapper):
    """Model that vLLM compiles."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        TorchCompileWithNoGuardsWrapper.__init__(self)

    def forward(self) -> None:
        """Return nothing: it is not called."""


def attention_of_failed_start() -> list[str]:
    """Return the holders of an attention layer after a start that fails in vLLM's own compiler.

    That is on CUDA; on a CPU vLLM leaves it to PyTorch's, which knows nothing of vLLM's
    configuration.
    """
    layer = torch.nn.Module()
    left, config = weakref.ref(layer), VllmConfig()
    config.compilation_config.mode, config.compilation_config.backend = (
        CompilationMode.VLLM_COMPILE,
        "inductor",
    )
    config.compilation_config.static_forward_context["layer"] = layer
    with (
        suppress(RuntimeError),
        start.private.forgotten_on_failure(),
        set_current_vllm_config(config),
    ):
        Compiled()
        raise RuntimeError
    del layer, config
    gc.collect()
    return [] if left() is None else ["a layer", *holders(left())]


class Tower(torch.nn.Module):
    """Module with a cache of a method, which keeps it."""

    @functools.lru_cache(maxsize=4)  # noqa: B019 - as vLLM's towers have it
    def positions(self, length: int) -> int:
        """Return a result."""
        return length


def tower_in_caches() -> list[str]:
    """Return the holders of a tower that vLLM's caches have met, after they forgot it."""
    tower = Tower()
    left = weakref.ref(tower)
    tower.positions(3)
    # The keys of 0.26 are strong.
    table: dict[torch.nn.Module, torch.nn.Module] = {tower: torch.nn.Identity()}
    with patch.object(interfaces, "_language_model_by_module", table):
        start.private._forget_cached(torch.nn.Sequential(tower))
    del tower
    return [] if left() is None else ["a tower", *holders(left())]


def layer_in_guards() -> list[str]:
    """Return the holders of a layer that a guard has read, after Dynamo's tables forgot it."""
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    compiled(torch.ones(1, 2))
    managers = [one for one in gc.get_objects() if type(one) is guards.GuardManagerWrapper]
    layer = torch.nn.Linear(2, 2)
    left = weakref.ref(layer)
    tables = [{"tmp0": layer}, *(one.closure_vars for one in managers[:1])]
    tables[-1]["tmp"] = layer
    with patch.object(guards, "_CLOSURE_VARS", tables[0]):
        start.private._forget_guarded()
    del layer
    return [] if left() is None else ["a layer", *holders(left())]


def emptied_by_sleep(executor: str) -> list[str]:
    """Return the calls that return PyTorch's memory, in a sleep of vLLM's and behind it."""
    calls: list[str] = []
    at = "in a sleep"
    plan = SimpleNamespace(in_process=executor == "in_process")
    # As vLLM's allocator does.
    engine = SimpleNamespace(sleep=lambda level: torch.cuda.empty_cache())
    with patch.object(torch.cuda, "empty_cache", lambda: calls.append(at)):
        start.sleep(engine, plan, weights=True)
        at = "behind it"
        torch.cuda.empty_cache()
    return calls


def woken(executor: str, need: int, free: int, kept: int) -> tuple[list[Any], EngineError | None]:
    """Return the calls that wake up ``need`` bytes, by free bytes and bytes that PyTorch keeps."""
    calls, plan = (
        list[Any](),
        SimpleNamespace(in_process=executor == "in_process", device=torch.device("cuda", 0)),
    )
    engine = SimpleNamespace(wake_up=calls.append)

    def empty() -> None:
        calls.append("empty_cache")

    def room(_: Any) -> tuple[int, int]:
        return free + (kept if calls else 0), 1 << 40

    with (
        patch.object(start.private, "sleeping_bytes", lambda _: need),
        patch.object(torch.cuda, "empty_cache", empty),
        patch.object(torch.cuda, "mem_get_info", room),
        patch.object(torch.cuda, "memory_allocated", lambda _: 7 << 30),
    ):
        error = error_of(start.wake_up, engine, plan, {"weights", "kv_cache"})
    return calls, error
