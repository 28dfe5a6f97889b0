"""Functions that run inside a rollout's rank: build it, follow the case's script, close it."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.contract import Engine
from engine_api.errors import EngineError, RankFailure
from engine_api.hf_vision import has_vision
from engine_api.losses import sft_loss
from engine_api.media import Media
from engine_api.registry import RolloutRegistry
from engine_api.rollout import Completion, PromptImages, Rollout, SamplingParams
from engine_api.weights import WeightExport
from engine_conformance.cases._ranks import local_batch, opened
from engine_conformance.cases._target import Setup
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import expected_shapes, read_config, read_safetensors

__all__ = [
    "EOS",
    "SPOILS",
    "Action",
    "Do",
    "Generate",
    "Link",
    "Prompts",
    "RolloutReply",
    "Spoil",
    "Sync",
    "arguments",
    "attempt",
    "chain",
    "drive",
    "export_of",
    "generate",
]

Prompts = tuple[tuple[int, ...], ...]
Spoil = Literal["missing", "unknown", "shape", "integers", "twice", "raises"]
SPOILS: tuple[Spoil, ...] = ("missing", "unknown", "shape", "integers", "twice", "raises")
EOS = 2  # as the generated config.json says


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Action ``update_weights`` with the tensors of a folder, corrupted in one way or whole.

    Corrupted is a tensor in the middle of those whose names contain ``part``.
    """

    folder: Path
    version: int
    spoil: Spoil | None = None
    part: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Action ``generate``, whose argument ``images`` is left out where it is None."""

    prompts: Prompts
    sampling: SamplingParams
    images: tuple[PromptImages | None, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Do:
    """Action that calls a member without arguments, or with one part alone.

    One part alone is for ``sleep`` and ``wake_up``.
    """

    member: Literal["sleep", "wake_up", "close"]
    only: Literal["weights", "kv_cache"] | None = None


Action = Sync | Generate | Do


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReply:
    """Result of one action.

    ``crash`` is the traceback of an error that is not the contract's; ``version`` the
    rollout's ``weight_version`` afterwards; ``used`` the device's memory in use then,
    in bytes (0 on the CPU).
    """

    action: Any
    completions: Any = None
    error: EngineError | None = None
    crash: str = ""
    version: Any = None
    used: int = 0


def arguments(setup: Setup, eos: Sequence[int] = (EOS,)) -> dict[str, Any]:
    """Return the arguments that the trainer gives to every rollout."""
    config = setup.config
    return {
        "model": config.model,
        "pad_token_id": 0,
        "eos_token_ids": tuple(eos),
        "batch_size": 64,
        "dtype": config.precision.compute,
        **(config.options or {}),
    }


def drive(
    setup: Setup, actions: Sequence[Action], eos: Sequence[int] = (EOS,)
) -> list[RolloutReply]:
    """Run ``actions`` one after another on one rollout, where an error ends its own action only."""
    rollout: Rollout = RolloutRegistry.create(
        name=setup.backend, device=setup.device, **arguments(setup, eos)
    )

    def act(action: Action) -> Any:
        if isinstance(action, Sync):
            return rollout.update_weights(
                export_of(action.folder, setup.device, action.spoil, action.part), action.version
            )
        if isinstance(action, Generate):
            return generate(rollout, action)
        parts = (
            {part: part == action.only for part in ("weights", "kv_cache")} if action.only else {}
        )
        return getattr(rollout, action.member)(**parts)

    try:
        return [attempt(rollout, action, partial(act, action), setup.device) for action in actions]
    finally:
        rollout.close()


def generate(rollout: Any, ask: Generate) -> list[Completion]:
    """Return the completions of a rollout, which gets images where the request has any."""
    shown = {} if ask.images is None else {"images": ask.images}
    found: list[Completion] = rollout.generate(ask.prompts, ask.sampling, **shown)
    return found


def attempt(rollout: Rollout, action: Any, call: Callable[[], Any], device: str) -> RolloutReply:
    """Return the reply of ``call``, or its error."""
    reply = RolloutReply(action=action)
    try:
        reply = replace(reply, completions=call())
    except EngineError as error:
        reply = replace(reply, error=error)
    except Exception:  # noqa: BLE001 - a rollout may raise anything; the case judges what it was
        reply = replace(reply, crash=traceback.format_exc())
    return replace(reply, version=rollout.weight_version, used=_used(device))


def _used(device: str) -> int:
    """Return the memory in use on the whole device.

    A rollout may keep its weights in processes of its own.
    """
    if device == "cpu":
        return 0
    module = torch.get_device_module(device)
    module.synchronize()
    free, total = module.mem_get_info()
    return total - free


def export_of(
    folder: Path, device: str, spoil: Spoil | None = None, part: str = ""
) -> WeightExport:
    """Yield a folder's tensors as an engine exports them, one of them corrupted (see `Sync`).

    A tensor is gone when the next one is asked for.
    """
    stored = read_safetensors(folder)
    # The oracle reads no model with a tower. Such a folder has nothing beside what is exported.
    pictured = has_vision(json.loads((folder / "config.json").read_text()))
    names = list(stored if pictured else expected_shapes(read_config(folder)))
    for name, tensor in _spoilt([(name, stored[name]) for name in names], spoil, part):
        sent = tensor.to(device, copy=True)
        yield name, sent
        sent.fill_(math.nan if sent.is_floating_point() else -1)


def _spoilt(
    tensors: Sequence[tuple[str, Tensor]], spoil: Spoil | None, part: str
) -> Iterator[tuple[str, Tensor]]:
    chosen = [place for place, (name, _) in enumerate(tensors) if part in name]
    middle = chosen[len(chosen) // 2]
    for place, (name, tensor) in enumerate(tensors):
        if place != middle:
            yield name, tensor
        elif spoil == "raises":
            raise RankFailure({1: "the export ended in the middle"})
        elif spoil == "shape":
            yield name, tensor[..., :-1]
        elif spoil == "integers":
            yield name, tensor.round().long()
        elif spoil != "missing":
            yield name, tensor
    if spoil == "unknown":
        yield (f"{part}no_such.weight" if part else "model.layers.0.no_such.weight"), tensors[0][1]
    if spoil == "twice":
        yield tensors[middle if part else 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Outputs of rollout and engine after one step.

    ``log_probs`` holds the engine's, of each completion's tokens.
    """

    sync: RolloutReply
    generated: RolloutReply
    engine_version: int
    log_probs: list[Tensor] = field(repr=False)


def chain(
    setup: Setup, trainer: Setup, batches: Sequence[PackedDocuments | Batch], ask: Generate
) -> list[Link]:
    """Step, sync, generate, and ask the engine about the same tokens, once per batch."""
    rollout: Rollout = RolloutRegistry.create(
        name=setup.backend, device=setup.device, **arguments(setup)
    )
    try:
        with opened(trainer) as engine:
            links: list[Link] = []
            for batch in batches:
                own = (
                    batch.to(setup.device)
                    if isinstance(batch, Batch)
                    else local_batch(engine, batch, setup.device)
                )
                engine.train_batch(own, sft_loss)
                version = engine.weight_version
                export = engine.get_per_tensor_param()
                install = partial(rollout.update_weights, export, version)
                sync = attempt(rollout, Sync(folder=Path(), version=version), install, setup.device)
                generated = attempt(rollout, ask, partial(generate, rollout, ask), setup.device)
                told = _asked(engine, ask, generated.completions or [], setup.device)
                links.append(
                    Link(sync=sync, generated=generated, engine_version=version, log_probs=told)
                )
            return links
    finally:
        rollout.close()


def _asked(
    engine: Engine, ask: Generate, completions: Sequence[Completion], device: str
) -> list[Tensor]:
    """Return the engine's log-probs of generated tokens, on the CPU."""
    if not completions:
        return []
    texts = [[*ask.prompts[c.prompt_index], *c.tokens] for c in completions]
    lengths = [len(text) for text in texts]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    batch = Batch(input_ids=torch.tensor([t for text in texts for t in text]), cu_seqlens=bounds)
    if ask.images is not None:
        shown = [ask.images[c.prompt_index] for c in completions]
        own = [Media.none(1) if one is None else one.media for one in shown]
        batch = batch.with_media(Media.concat(own))
    told = engine.infer_batch(batch.to(device), temperature=ask.sampling.temperature).log_probs
    assert told is not None, "a language model answered without log-probs"
    rows = told.cpu().split(lengths)
    return [row[-len(c.tokens) :] for row, c in zip(rows, completions, strict=True)]
