"""Independent float64 reference: model, losses, optimizer, training steps."""

from __future__ import annotations

from engine_conformance.oracle.adamw import AdamWConfig, AdamWState, adamw_step, global_norm
from engine_conformance.oracle.config import ModelConfig, MoEConfig, UnsupportedModel, read_config
from engine_conformance.oracle.model import OracleModel, OracleOutputs, load_oracle
from engine_conformance.oracle.names import expected_shapes
from engine_conformance.oracle.schedule import Schedule
from engine_conformance.oracle.train import (
    Errors,
    StepResult,
    TrainResult,
    loss_and_grads,
    sft,
    spread,
    spreads,
    train_steps,
)
from engine_conformance.oracle.weights import (
    Adapter,
    WeightMismatch,
    load_adapter,
    merge_adapter,
    read_safetensors,
)

__all__ = [
    "AdamWConfig",
    "AdamWState",
    "Adapter",
    "Errors",
    "MoEConfig",
    "ModelConfig",
    "OracleModel",
    "OracleOutputs",
    "Schedule",
    "StepResult",
    "TrainResult",
    "UnsupportedModel",
    "WeightMismatch",
    "adamw_step",
    "expected_shapes",
    "global_norm",
    "load_adapter",
    "load_oracle",
    "loss_and_grads",
    "merge_adapter",
    "read_config",
    "read_safetensors",
    "sft",
    "spread",
    "spreads",
    "train_steps",
]
