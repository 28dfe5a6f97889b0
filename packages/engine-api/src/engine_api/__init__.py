"""The contract between training loops and engines.

Importing it imports no torch. Names are looked up on first use, so that ``import engine_api`` stays
light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_api.base import BaseEngine as BaseEngine
    from engine_api.batch import Batch as Batch
    from engine_api.capabilities import Capability as Capability
    from engine_api.config import CheckpointConfig as CheckpointConfig
    from engine_api.config import EngineConfig as EngineConfig
    from engine_api.config import LoraConfig as LoraConfig
    from engine_api.config import Memory as Memory
    from engine_api.config import ModelSource as ModelSource
    from engine_api.config import OptimizerConfig as OptimizerConfig
    from engine_api.config import Parallelism as Parallelism
    from engine_api.config import Precision as Precision
    from engine_api.config import ScheduleConfig as ScheduleConfig
    from engine_api.contract import Engine as Engine
    from engine_api.losses import LossFn as LossFn
    from engine_api.losses import sft_loss as sft_loss
    from engine_api.losses import token_weights as token_weights
    from engine_api.plugin import CONTRACT as CONTRACT
    from engine_api.plugin import EnginePlugin as EnginePlugin
    from engine_api.plugin import ProbeResult as ProbeResult
    from engine_api.plugin import Row as Row
    from engine_api.plugin import Variant as Variant
    from engine_api.registry import EngineRegistry as EngineRegistry
    from engine_api.registry import RolloutRegistry as RolloutRegistry
    from engine_api.results import LossOutput as LossOutput
    from engine_api.results import TokenOutputs as TokenOutputs
    from engine_api.results import Topology as Topology
    from engine_api.results import TrainOutput as TrainOutput
    from engine_api.rollout import Completion as Completion
    from engine_api.rollout import Rollout as Rollout
    from engine_api.rollout import SamplingParams as SamplingParams
    from engine_api.rollout import SyncResult as SyncResult
    from engine_api.rollout import WeightExporter as WeightExporter
    from engine_api.rollout import WeightWire as WeightWire
    from engine_api.weights import ShardSpec as ShardSpec

_HOMES = {
    "base": ("BaseEngine",),
    "batch": ("Batch",),
    "capabilities": ("Capability",),
    "config": (
        "CheckpointConfig",
        "EngineConfig",
        "LoraConfig",
        "Memory",
        "ModelSource",
        "OptimizerConfig",
        "Parallelism",
        "Precision",
        "ScheduleConfig",
    ),
    "contract": ("Engine",),
    "losses": ("LossFn", "sft_loss", "token_weights"),
    "plugin": ("CONTRACT", "EnginePlugin", "ProbeResult", "Row", "Variant"),
    "registry": ("EngineRegistry", "RolloutRegistry"),
    "results": ("LossOutput", "TokenOutputs", "Topology", "TrainOutput"),
    "rollout": (
        "Completion",
        "Rollout",
        "SamplingParams",
        "SyncResult",
        "WeightExporter",
        "WeightWire",
    ),
    "weights": ("ShardSpec",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "errors"])  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll] - the table is the list


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("engine_api.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'engine_api' has no attribute {name!r}")
    return getattr(import_module(f"engine_api.{_HOME[name]}"), name)
