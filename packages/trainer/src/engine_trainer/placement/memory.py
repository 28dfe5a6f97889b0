"""An estimate, before anything is loaded, of whether a placement fits.

An engine that learns (policy, critic) keeps for each parameter the master weight, its gradient and
Adam's two moments, all in the master's dtype and divided over the ranks that shard it; a reference
model keeps the weight alone, and so does a part that ``engine.model.freeze`` names. A rollout keeps
the weights in its dtype; one that sleeps while the engine trains has the memory of the gradients.
With ``rollout.offload_engine`` engine and rollout are time-shared, except for a sync, which brings
the policy's weights to a rollout that is awake; reference and critic are offloaded then.
Activations, copies in the dtype of computation (an engine may make them layer by layer), caches and
workspaces come on top, and are not estimated: a placement that does not fit by this count cannot
fit.
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
from engine_api.hf_vision import find_auto_class, has_vision
from engine_trainer.config import Config, DPOConfig, KTOConfig, RLConfig
from engine_trainer.config.engine_keys import named_below
from engine_trainer.config.sections import EngineSection, RolloutSection, positive_option
from engine_trainer.placement.replica import rollout_device, rollout_dtype
from engine_trainer.utils.hf_models import MODEL_KEY, hf_config

GIB = 1 << 30
# float8 is computed from bf16 weights.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 2}

WITH_MOMENTS = (
    "adamw",
    *(f"torch.optim.{name}" for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
)


@register
@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """The free memory of one device (a GPU, or a node's main memory).

    Workers with the same ``device`` share it.
    """

    device: str
    free: int
    """Free bytes."""


def free_memory(device: str) -> FreeMemory:
    """Return this process's device and the bytes free on it."""
    # Without its local rank every rank would measure the first device.
    device_of(device).adopt_local_rank()
    name, free = device_of(device).room()
    return FreeMemory(
        device=f"{socket.gethostname()}:{name}" if name else socket.gethostname(), free=free
    )


def check(
    engines: Sequence[FreeMemory],
    rollouts: Sequence[FreeMemory],
    config: RLConfig,
    engine: EngineConfig,
    device: str,
) -> None:
    """Raise ``ConfigError`` for the first device on which the workers do not fit.

    The error shows the count.

    Args:
        engines, rollouts: free memory of every rank and of every replica.
        engine: configuration of each rank of the policy, on ``device``.
    """
    counts = engines_bytes(config, engine, device)
    # Bytes of a rank while it trains, by engine.
    per_rank = {name: (kept + gradient) / len(engines) for name, (kept, gradient) in counts.items()}
    train = fsum(per_rank.values())
    serve = rollout_bytes(config.rollout, engine)
    sleeps = config.rollout.sleep and device != "cpu"
    time_shared = sleeps and config.rollout.offload_engine
    # Bytes that a rank keeps while the rollout is awake.
    if time_shared:
        stays = counts["policy"][0] / len(engines)
    elif sleeps:
        stays = fsum(kept for kept, _ in counts.values()) / len(engines)
    else:
        stays = train
    for name in dict.fromkeys(r.device for r in [*engines, *rollouts]):
        free = min(r.free for r in [*engines, *rollouts] if r.device == name)
        trained, served = (
            [r.device for r in memories].count(name) for memories in (engines, rollouts)
        )
        need = max(trained * train, trained * stays + served * serve)
        if need > free:
            parts = ", ".join(f"{name} {count / GIB:.1f}" for name, count in per_rank.items())
            names = ", ".join([*(per_rank if trained else ()), *(["rollout"] if served else ())])
            raise ConfigError(
                "engine.memory",
                f"{name} has {free / GIB:.1f} GiB free; {names} placed there need at least "
                f"{need / GIB:.1f} GiB",
                why=f"{count_parameters(engine.model) / 1e9:.2f} B parameters; {trained} engine "
                f"rank(s) of {train / GIB:.1f} GiB ({parts}) and {served} replica(s) of "
                f"{serve / GIB:.1f} GiB" + (", time-shared" if time_shared else ""),
                remedy="more ranks, rollouts elsewhere (launcher: ray, ray.rollouts), "
                "rollout.offload_engine, or engine.memory's offload",
            )


def engines_bytes(config: Config, policy: EngineConfig, device: str) -> dict[str, tuple[int, int]]:
    """Return for every engine, over all ranks, the bytes that it keeps and those of its gradients.

    It keeps the first from step to step.
    """
    trunk = config.engine.model_type == "value_model"
    parameters = count_parameters(policy.model, trunk=trunk)
    frozen = count_frozen(policy.model, trunk=trunk)
    found = {"policy": engine_bytes(policy, parameters, device, learns=True, frozen=frozen)}
    # Without an optimizer the policy is only evaluated, and has no other engine next to it.
    if policy.optimizer is None:
        return found
    # With an adapter the reference is the policy without its adapter.
    if _infers_reference(config) and policy.lora is None:
        found["reference"] = engine_bytes(policy, parameters, device, learns=False)
    if not isinstance(config, RLConfig):
        return found
    algorithm = config.algorithm
    if algorithm.critic is not None:
        critic = algorithm.critic.engine(config.engine)
        with named_below("algorithm.critic"):
            parameters = count_parameters(critic.model, trunk=True)
            frozen = count_frozen(critic.model, trunk=True)
        found["critic"] = engine_bytes(critic, parameters, device, learns=True, frozen=frozen)
    if algorithm.teacher is not None and algorithm.teacher.engine is not None:
        teacher = algorithm.teacher.engine.engine(config.engine)
        with named_below("algorithm.teacher.engine"):
            parameters = count_parameters(teacher.model)
        found["teacher"] = engine_bytes(teacher, parameters, device, learns=False)
    return found


def _infers_reference(config: Config) -> bool:
    """Return whether a run computes log-probs of its reference model in each step."""
    match config:
        case RLConfig():
            return config.algorithm.reads_reference
        case DPOConfig():
            return config.dpo.reads_reference and config.dpo.reference == "engine"
        case KTOConfig():
            return config.kto.reference == "engine"
        case _:
            return False


def engine_bytes(
    engine: EngineConfig | EngineSection,
    parameters: int,
    device: str,
    *,
    learns: bool,
    frozen: int = 0,
) -> tuple[int, int]:
    """Return for an engine, over all ranks, the bytes that it keeps and those of its gradients.

    Args:
        engine: the engine.
        parameters: number of its weights.
        device: type of the device that it computes on.
        learns: True for an engine with an optimizer.
        frozen: number of its weights that have neither gradient nor moments.
    """
    memory = engine.memory
    optimizer = engine.optimizer
    # Offloading goes to the host's memory, which does not help where the device is the host.
    can_offload = device != "cpu"
    weight = 0 if can_offload and memory.offload_params else 1
    gradient = 0
    moments = 0
    # An adapter's gradients and moments are small and not counted.
    if learns and optimizer is not None and engine.lora is None:
        gradient = weight
        offloaded = can_offload and (memory.offload_params or memory.offload_optimizer)
        # The state of optimizers that are not listed is unknown: one in 8 bit keeps less.
        if optimizer.name in WITH_MOMENTS and not offloaded:
            moments = 2
    each = BYTES[engine.precision.master] * engine.parallelism.dp_replicate
    trained = parameters - frozen
    return (weight * parameters + moments * trained) * each, gradient * trained * each


def rollout_bytes(section: RolloutSection, engine: EngineConfig) -> float:
    """Return the bytes of the weights in each process of a rollout."""
    width = 1 if section.quantization == "fp8" else BYTES[rollout_dtype(section, engine)]
    return count_parameters(engine.model) * width / positive_option(section, "tensor_parallel_size")


def check_here(comm: Comm, config: RLConfig, engine: EngineConfig, device: str) -> None:
    """Call ``check`` for an engine rank and a replica in each process of ``comm``.

    All processes raise together.
    """
    served = rollout_device(config.rollout, device)

    found = together(comm, lambda: (free_memory(device), free_memory(served)))
    # With a url the rollout is a server that runs already.
    elsewhere = "url" in config.rollout.options
    check(
        [own for own, _ in found],
        [] if elsewhere else [other for _, other in found],
        config,
        engine,
        device,
    )


def count_parameters(source: ModelSource, *, trunk: bool = False) -> int:
    """Count a model's parameters.

    ``trunk``: without its head, as a value model has it.
    """
    return _count_of(source, trunk).whole


def count_frozen(source: ModelSource, *, trunk: bool = False) -> int:
    """Count the parameters of the parts that ``freeze`` names, which are not trained.

    ``trunk`` is that of ``count_parameters``.
    """
    return _count_of(source, trunk).tower if "vision" in source.freeze else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Count:
    """The number of a model's parameters."""

    whole: int
    tower: int
    """Those of the vision tower and its projector."""


def _count_of(source: ModelSource, trunk: bool) -> _Count:
    overrides = json.dumps(dict(source.config_overrides))
    return _count(source.path, source.revision, source.trust_remote_code, overrides, trunk)


@lru_cache(maxsize=4)
def _count(path: str, revision: str | None, trusted: bool, overrides: str, trunk: bool) -> _Count:
    """Count parameters from shapes alone, without memory."""
    import torch
    from transformers import AutoModel

    source = ModelSource(
        path=path,
        revision=revision,
        trust_remote_code=trusted,
        config_overrides=json.loads(overrides),
    )
    config = hf_config(source)
    cls: Any = AutoModel if trunk else find_auto_class(config)
    try:
        with torch.device("meta"):
            model = cls.from_config(config, trust_remote_code=trusted)
    except Exception as error:
        # Each family's own code reads the configuration, and may not know an activation or a RoPE.
        raise unbuildable(config, path, error, field=MODEL_KEY) from error
    whole = _sum_parameters(model)
    tower = 0
    if has_vision(config):
        # All of the base model but its language model is tower or projector.
        parts = dict(model.base_model.named_children())
        parts.pop("language_model", None)
        tower = sum(map(_sum_parameters, parts.values()))
    return _Count(whole=whole, tower=tower)


def _sum_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
