"""The check that a recorded configuration fits the engine that a replay names for it.

A run's ``config.yaml`` has settings of its own engine and device. A command that names a different
engine must override the settings that this engine lacks, and one error names all of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from engine_api.capabilities import REQUESTS, Capability
from engine_api.errors import ConfigError
from engine_api.registry import EngineRegistry
from engine_trainer.config import RLConfig
from engine_trainer.config.secrets import masked
from engine_trainer.config.sections import AUTO, KEPT_ACTIVATIONS, EngineSection
from engine_trainer.utils.plugins import list_options

_OFF: Mapping[Capability, str] = {
    Capability.HSDP: "engine.parallelism.dp_replicate=1",
    Capability.TP: "engine.parallelism.tp=1",
    Capability.PP: "engine.parallelism.pp=1",
    Capability.CP: "engine.parallelism.cp=1",
    Capability.EP: "engine.parallelism.ep=1",
    Capability.ULYSSES: "engine.parallelism.ulysses=1",
    Capability.OFFLOAD: "engine.memory.offload_params=false engine.memory.offload_optimizer=false",
    Capability.RECOMPUTE: "engine.memory.recompute=none",
    Capability.COMPILE: "engine.memory.compile=false",
    Capability.SHARED_PREFIXES: "engine.memory.share_prefixes=false",
    Capability.ASYNC_CHECKPOINT: "engine.checkpoint.async_save=false",
}
"""Overrides that turn a capability off and change a step by rounding alone."""

_DTYPES = {
    Capability.BF16: "bfloat16",
    Capability.FP16: "float16",
    Capability.FP8: "float8",
}


def check_engine(config: RLConfig) -> None:
    """Raise ``ConfigError`` for settings that the engine does not have, with overrides for all.

    Settings that no override can replace, such as an adapter, are left to the engine's own check.
    """
    section = config.engine
    found = EngineRegistry.resolve(
        model_type=section.model_type, backend=section.backend, device=section.device
    )
    # A share is looked at below, with what it needs.
    memory = replace(section.memory, kept_activations=0.0)
    asked = replace(section, memory=memory).build(seed=0, total_steps=1)
    overrides: dict[str, str] = {}
    for capability, is_requested in REQUESTS.items():
        if is_requested(asked) and capability not in found.plugin.capabilities:
            if capability in _OFF:
                overrides[str(capability)] = _OFF[capability]
            elif capability in _DTYPES:
                overrides[str(capability)] = _without(section, _DTYPES[capability])
    kept = section.memory.kept_activations
    known = list_options(found.plugin, found.source)
    compiles = not overrides.keys() & {Capability.RECOMPUTE, Capability.COMPILE}
    if kept not in (AUTO, 0) and not (compiles and KEPT_ACTIVATIONS in known):
        overrides["kept activations"] = f"engine.memory.{KEPT_ACTIVATIONS}=0"
    if unknown := sorted(section.options.keys() - known):
        overrides[f"the options {', '.join(unknown)}"] = _without_options(section, unknown)
    if overrides:
        raise ConfigError(
            "engine",
            f"{section.backend} does not have all that the run's configuration asks for",
            why=f"it lacks {'; '.join(overrides)}",
            remedy=f"add to the command: {' '.join(overrides.values())}",
        )


def _without(section: EngineSection, dtype: str) -> str:
    """Return the overrides that replace a dtype by float32."""
    names = [name for name, value in asdict(section.precision).items() if value == dtype]
    return " ".join(f"engine.precision.{name}=float32" for name in names)


def _without_options(section: EngineSection, unknown: Sequence[str]) -> str:
    """Return the overrides that remove options and keep the others, as a shell reads them."""
    kept = [
        shlex.quote(f"engine.options.{name}={json.dumps(value)}")
        for name, value in masked(dict(section.options)).items()
        if name not in unknown
    ]
    return " ".join(["engine.options={}", *kept])
