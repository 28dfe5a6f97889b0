"""The independent float64 reference: model, losses, optimizer, training steps."""

from __future__ import annotations

from engine_conformance.oracle.config import ModelConfig, MoEConfig, UnsupportedModel, read_config
from engine_conformance.oracle.model import OracleModel, OracleOutputs, load_oracle
from engine_conformance.oracle.names import expected_shapes
from engine_conformance.oracle.weights import (
    Adapter,
    WeightMismatch,
    load_adapter,
    merge_adapter,
    read_safetensors,
)

__all__ = [
    "Adapter",
    "MoEConfig",
    "ModelConfig",
    "OracleModel",
    "OracleOutputs",
    "UnsupportedModel",
    "WeightMismatch",
    "expected_shapes",
    "load_adapter",
    "load_oracle",
    "merge_adapter",
    "read_config",
    "read_safetensors",
]
