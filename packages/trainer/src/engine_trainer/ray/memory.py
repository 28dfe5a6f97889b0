"""Whether a placement fits, estimated before anything is loaded.

An engine in mixed precision keeps for each parameter: the master weight, its gradient, Adam's two moments (all in the master's
dtype), and a copy in the dtype of computation; all divided over the ranks that shard it. A rollout keeps the weights in its dtype.
Activations, caches and workspaces come on top, and are not estimated: what does not fit by this count cannot fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.replica import rollout_dtype
from engine_trainer.sections import RolloutSection

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 2}  # float8 is computed from bf16 weights


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of one device (a GPU, or a node's main memory); workers with the same ``device`` share it."""

    device: str
    free: int  # bytes


def room(device: str) -> Room:
    """Of this process."""
    import socket

    import torch

    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return Room(device=f"{socket.gethostname()}:{torch.cuda.get_device_properties(0).uuid}", free=free)
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return Room(device=socket.gethostname(), free=available * 1024)


def check(
    engines: Sequence[Room], rollouts: Sequence[Room], config: RLConfig, engine: EngineConfig, device: str
) -> None:  # fmt: skip
    """Raise ``ConfigError`` that shows the count for the first device on which the workers do not fit.

    Args:
        engines, rollouts: the room of every rank and of every replica.
        engine: what each rank is told, on ``device``.
    """
    source = engine.model
    parameters = _parameters(
        source.path, source.revision, source.trust_remote_code, tuple(source.config_overrides.items())
    )
    train, serve = (
        _engine_bytes(config, engine, parameters, len(engines)),
        _rollout_bytes(config.rollout, engine, parameters),
    )
    by_turns = config.rollout.sleep and config.rollout.offload_engine and device != "cpu"
    for place in dict.fromkeys(r.device for r in [*engines, *rollouts]):
        free = min(r.free for r in [*engines, *rollouts] if r.device == place)
        trained, served = ([r.device for r in rooms].count(place) for rooms in (engines, rollouts))
        need = max(trained * train, served * serve) if by_turns else trained * train + served * serve
        if need > free:
            raise ConfigError(
                "ray", f"what is placed on {place} needs {need / GIB:.1f} GiB at least, {free / GIB:.1f} GiB are free",
                why=f"{parameters / 1e9:.2f} B parameters; {trained} engine rank(s) of {train / GIB:.1f} GiB and {served} "
                    f"replica(s) of {serve / GIB:.1f} GiB" + (", by turns" if by_turns else ""),
                remedy="more ranks (ray.engines), rollouts elsewhere (ray.rollouts), rollout.offload_engine, or engine.memory's offload",
            )  # fmt: skip


def _engine_bytes(config: RLConfig, engine: EngineConfig, parameters: int, ranks: int) -> int:
    precision, memory = engine.precision, engine.memory
    master, compute = BYTES[precision.master], BYTES[precision.compute]
    frozen = engine.lora is not None  # an adapter's share is small
    weights = master + (compute if compute != master else 0)
    state = 0 if frozen else master * (1 + 2 * (not memory.offload_optimizer))
    reference = weights if config.algorithm.kl.coefficient and not frozen else 0
    kept = (weights + reference) * (not memory.offload_params) + state
    return parameters * kept * engine.parallelism.dp_replicate // ranks


def _rollout_bytes(section: RolloutSection, engine: EngineConfig, parameters: int) -> int:
    width = 1 if section.quantization == "fp8" else BYTES[rollout_dtype(section, engine)]
    return parameters * width // int(section.options.get("tensor_parallel_size", 1))


@lru_cache(maxsize=4)
def _parameters(path: str, revision: str | None, trusted: bool, overrides: tuple[tuple[str, object], ...]) -> int:
    """Of the model without memory: only shapes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trusted, **dict(overrides))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    return sum(p.numel() for p in model.parameters())
