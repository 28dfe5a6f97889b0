"""FP8 in the matrix products of a model's blocks, by torchao's linear layers.

Inputs, weights and gradients are cast to FP8 before each of the three products of a linear layer,
with a scale for each row or for each matrix (``options.float8_recipe``). Weights, gradients, norms,
attention and the head stay in the dtypes of a computation in bfloat16.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torch.versions import TESTED_TORCHAO, find_torchao_problem

__all__ = [
    "GatherScales",
    "check_float8",
    "check_sides",
    "compute_in_bfloat16",
    "in_bfloat16",
    "load_settings",
    "load_torchao",
    "refuse_experts",
    "refuse_without_torchao",
    "round_up",
    "takes_float8",
    "warn_uncompiled",
]

# Each side of an FP8 matrix is a multiple of it for cuBLAS, and so is a rank's number of tokens.
_UNIT = 16

# The first devices with products of FP8.
_LEAST_CAPABILITY = (8, 9)
_WHY_DEVICE = "products of FP8 need CUDA's compute capability 8.9 or newer"
_OTHER_DEVICE = "use an Ada, Hopper or newer GPU"


def takes_float8(config: EngineConfig) -> bool:
    """Return whether a configuration asks for FP8 in matrix products."""
    return config.precision.compute == "float8"


def compute_in_bfloat16(config: EngineConfig) -> EngineConfig:
    """Return the configuration of everything but the products in FP8."""
    return replace(config, precision=replace(config.precision, compute="bfloat16"))


def check_float8(config: EngineConfig, device_type: str, *, emulate: bool) -> None:
    """Raise ``ConfigError`` where FP8 is asked for but not possible.

    Args:
        config: the engine's configuration.
        device_type: device that will compute.
        emulate: True for products that are computed in another dtype (``options.float8_emulate``).
    """
    precision = config.precision
    for name in ("master", "reduce"):
        if getattr(precision, name) == "float8":
            raise ConfigError(
                f"precision.{name}",
                "expected another dtype, got float8",
                why="float8 is a precision of matrix products only",
                remedy="use float32; for FP8 training set precision.compute",
            )
    if not takes_float8(config) or emulate:
        return
    if not _has_products(device_type):
        raise ConfigError(
            "precision.compute",
            f"expected another dtype on this device ({device_type}), got float8",
            why=_WHY_DEVICE,
            remedy=f"{_OTHER_DEVICE}, or compute in bfloat16",
        )


def _has_products(device_type: str) -> bool:
    """Return whether a device multiplies in FP8."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def check_sides(name: str, inputs: int, outputs: int) -> None:
    """Raise ``ConfigError`` for a linear layer whose sides FP8 does not take."""
    if inputs % _UNIT or outputs % _UNIT:
        raise ConfigError(
            "precision.compute",
            f"expected bfloat16 for {name} of {inputs} x {outputs}, got float8",
            why=f"FP8 matrices have sides that {_UNIT} divides",
            remedy="compute in bfloat16",
        )


def refuse_experts() -> None:
    """Raise ``ConfigError`` for a model with experts, whose products would stay in bfloat16."""
    raise ConfigError(
        "precision.compute",
        "expected bfloat16 for a model with experts, got float8",
        why="this engine's experts have no products of FP8",
        remedy="compute in bfloat16",
    )


def round_up(multiple: int) -> int:
    """Return the least multiple of a number of tokens that FP8 takes."""
    return math.lcm(multiple, _UNIT)


def refuse_without_torchao(
    config: EngineConfig, device_type: str, engine: str, install: str, *, emulate: bool
) -> None:
    """Raise ``UnsupportedCapability`` where FP8 is asked for without the tested torchao.

    It names a device that has no FP8 first: torchao would not help there.

    Args:
        config: the engine's configuration.
        device_type: device that will compute.
        engine: name of the engine, which declares no FP8 then.
        install: command that installs the tested torchao.
        emulate: True for products that are computed in another dtype (``options.float8_emulate``).
    """
    problem = find_torchao_problem() if takes_float8(config) else ""
    if not problem:
        return
    why = f"{problem}; torchao {TESTED_TORCHAO} computes its products in FP8"
    remedy = install
    if not emulate and not _has_products(device_type):
        why = f"{_WHY_DEVICE}, and this device is {device_type}; {why}"
        remedy = f"{_OTHER_DEVICE} with torchao ({install})"
    raise UnsupportedCapability(
        Capability.FP8, where=engine, why=why, remedy=f"{remedy}, or compute in bfloat16"
    )


def load_settings(recipe: str, *, emulate: bool) -> Any:
    """Return torchao's settings of a linear layer in FP8.

    Args:
        recipe: torchao's name of the scales.
        emulate: True rounds to FP8 and multiplies in another dtype, for devices without FP8.
    """
    settings: Any = load_torchao().Float8LinearConfig.from_recipe_name(recipe)
    return replace(settings, emulate=emulate)


def load_torchao() -> Any:
    """Return torchao's module of FP8, an extra that not every environment has."""
    return importlib.import_module("torchao.float8")


def warn_uncompiled(log: logging.Logger) -> None:
    """Warn that products in FP8 lose time where blocks are not compiled."""
    log.warning(
        "float8 is slower than bfloat16 without memory.compile, because each cast to FP8 is a "
        "kernel of its own: set memory.compile: true"
    )


@contextmanager
def in_bfloat16(root: nn.Module) -> Iterator[None]:
    """Let the linear layers in FP8 multiply in bfloat16 inside the block.

    A weight that was gathered in FP8 is multiplied as it was rounded. Compiled blocks must not run
    inside.
    """
    linear: Any = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    layers = [one for one in root.modules() if isinstance(one, linear)]
    for layer in layers:
        layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    weight: Any = layer.weight
    if hasattr(weight, "to_original_precision"):
        weight = weight.to_original_precision()
    return nn.functional.linear(x, weight, layer.bias)


class GatherScales:
    """The scales of the weights that ``fully_shard`` gathers in FP8.

    A scale is that of a whole weight, of which each rank has a part. All scales are computed with
    one reduction in the first forward pass after a change of the weights. A stale scale would cut
    off weights that have grown, so whatever changes weights must call ``expire``.
    """

    def __init__(self, root: nn.Module) -> None:
        self._fresh = False
        # Before the hook of fully_shard, which gathers.
        root.register_forward_pre_hook(self._refresh, prepend=True)

    def expire(self) -> None:
        """Let the next forward pass compute the scales again."""
        self._fresh = False

    def _refresh(self, root: nn.Module, _: Any) -> None:
        if not self._fresh:
            load_torchao().precompute_float8_dynamic_scale_for_fsdp(root)
            self._fresh = True
