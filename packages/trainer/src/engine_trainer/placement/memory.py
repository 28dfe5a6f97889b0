"""Whether a placement fits, estimated before anything is loaded.

An engine that learns (policy, critic) keeps for each parameter: the master weight, its gradient, Adam's two moments, all in the
master's dtype and divided over the ranks that shard it; a reference model keeps the weight alone. A rollout keeps the weights in its
dtype; one that sleeps while the engine trains has the gradients' place. With ``rollout.offload_engine`` they take turns, but for a sync,
which brings the policy's weights to a rollout that is awake; reference and critic are away then. Activations, copies in the dtype of computation (an engine
may make them layer by layer), caches and workspaces come on top, and are not estimated: what does not fit by this count cannot fit.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import Any

from engine_api.codec import register
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_api.hf_config import unbuildable
from engine_trainer.config import RLConfig
from engine_trainer.config.sections import EngineSection, RolloutSection, positive_option
from engine_trainer.placement.replica import rollout_device, rollout_dtype
from engine_trainer.utils.hf_models import MODEL_KEY, hf_config

GIB = 1 << 30
BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 2,
}  # float8 is computed from bf16 weights

WITH_MOMENTS = (
    "adamw",
    *(f"torch.optim.{name}" for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
)


@register
@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of one device (a GPU, or a node's main memory); workers with the same ``device`` share it."""

    device: str
    free: int  # bytes


def room(device: str) -> Room:
    """Of this process."""
    name, free = device_of(device).room()
    return Room(
        device=f"{socket.gethostname()}:{name}" if name else socket.gethostname(), free=free
    )


def check(
    engines: Sequence[Room],
    rollouts: Sequence[Room],
    config: RLConfig,
    engine: EngineConfig,
    device: str,
) -> None:
    """Raise ``ConfigError`` that shows the count for the first device on which the workers do not fit.

    Args:
        engines, rollouts: the room of every rank and of every replica.
        engine: what each rank of the policy is told, on ``device``.
    """
    counts = _engines_bytes(config, engine, device)
    held = {name: (kept + gradient) / len(engines) for name, (kept, gradient) in counts.items()}
    train, serve = fsum(held.values()), _rollout_bytes(config.rollout, engine)
    beside = fsum(kept for kept, _ in counts.values()) / len(engines)  # an awake rollout
    sleeps = config.rollout.sleep and device != "cpu"
    by_turns = sleeps and config.rollout.offload_engine
    for place in dict.fromkeys(r.device for r in [*engines, *rollouts]):
        free = min(r.free for r in [*engines, *rollouts] if r.device == place)
        trained, served = ([r.device for r in rooms].count(place) for rooms in (engines, rollouts))
        stays = counts["policy"][0] / len(engines) if by_turns else beside if sleeps else train
        need = max(trained * train, trained * stays + served * serve)
        if need > free:
            raise ConfigError(
                "engine.memory",
                f"what is placed on {place} needs {need / GIB:.1f} GiB at least, {free / GIB:.1f} GiB are free",
                why=f"{_parameters(engine.model) / 1e9:.2f} B parameters; {trained} engine rank(s) of {train / GIB:.1f} GiB ("
                + ", ".join(f"{name} {count / GIB:.1f}" for name, count in held.items())
                + f") and {served} replica(s) of {serve / GIB:.1f} GiB"
                + (", by turns" if by_turns else ""),
                remedy="more ranks, rollouts elsewhere (launcher: ray, ray.rollouts), rollout.offload_engine, or engine.memory's offload",
            )


def _engines_bytes(
    config: RLConfig, policy: EngineConfig, device: str
) -> dict[str, tuple[int, int]]:
    """Of every engine, over all ranks: what it keeps from step to step, and its gradients."""
    algorithm = config.algorithm
    found = {"policy": _engine_bytes(policy, _parameters(policy.model), device, learns=True)}
    if policy.optimizer is None:  # it is only measured, and alone
        return found
    if algorithm.kl.coefficient and policy.lora is None:  # with an adapter: the policy without it
        found["reference"] = _engine_bytes(policy, _parameters(policy.model), device, learns=False)
    if algorithm.critic is not None:
        critic = algorithm.critic.engine(config.engine)
        found["critic"] = _engine_bytes(
            critic, _parameters(critic.model, trunk=True), device, learns=True
        )
    return found


def _engine_bytes(
    engine: EngineConfig | EngineSection, parameters: int, device: str, *, learns: bool
) -> tuple[int, int]:
    memory, optimizer = engine.memory, engine.optimizer
    away = (
        device != "cpu"
    )  # what is offloaded goes to the host, which is no relief where the device is the host
    weight, gradient, moments = 0 if away and memory.offload_params else 1, 0, 0
    if learns and optimizer is not None and engine.lora is None:  # an adapter's share is small
        gradient = weight
        if optimizer.name in WITH_MOMENTS and not (
            away and (memory.offload_params or memory.offload_optimizer)
        ):
            moments = 2  # of another optimizer nothing is known: one in 8 bit keeps less
    size = parameters * BYTES[engine.precision.master] * engine.parallelism.dp_replicate
    return (weight + moments) * size, gradient * size


def _rollout_bytes(section: RolloutSection, engine: EngineConfig) -> float:
    width = 1 if section.quantization == "fp8" else BYTES[rollout_dtype(section, engine)]
    return _parameters(engine.model) * width / positive_option(section, "tensor_parallel_size")


def check_here(comm: Comm, config: RLConfig, engine: EngineConfig, device: str) -> None:
    """``check`` for an engine rank and a replica in each process of ``comm``; all of them raise together."""
    served = rollout_device(config.rollout, device)

    def rooms() -> tuple[Room, Room]:
        device_of(device).adopt_local_rank()  # else every rank measures the first device
        return room(device), room(served)

    found = together(comm, rooms)
    elsewhere = "url" in config.rollout.options  # a server that runs already
    check(
        [own for own, _ in found],
        [] if elsewhere else [other for _, other in found],
        config,
        engine,
        device,
    )


def _parameters(source: ModelSource, *, trunk: bool = False) -> int:
    """Count a model's parameters; ``trunk``: without its head, as a value model has it."""
    overrides = json.dumps(dict(source.config_overrides))
    return _count(source.path, source.revision, source.trust_remote_code, overrides, trunk)


@lru_cache(maxsize=4)
def _count(path: str, revision: str | None, trusted: bool, overrides: str, trunk: bool) -> int:
    """Count without memory: only shapes."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    source = ModelSource(
        path=path,
        revision=revision,
        trust_remote_code=trusted,
        config_overrides=json.loads(overrides),
    )
    config = hf_config(source)
    cls: Any = AutoModel if trunk else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = cls.from_config(config, trust_remote_code=trusted)
    except Exception as error:  # each family's own code reads the configuration: an activation or a RoPE unknown to it
        raise unbuildable(config, path, error, field=MODEL_KEY) from error
    return sum(p.numel() for p in model.parameters())
