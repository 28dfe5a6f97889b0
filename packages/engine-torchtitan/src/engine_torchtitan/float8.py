"""FP8 in the matrix products of a model's blocks, by torchao's linear layers, as torchtitan has it.

Inputs, weights and gradients are cast to FP8 before each of the three products of a linear layer,
with a scale for each row or for each matrix (``options.float8_recipe``). Weights, gradients, norms,
attention and the head stay in the dtypes of a computation in bfloat16.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_torchtitan.library import Decoder, Linear, load_float8_linear
from engine_torchtitan.plugin import TESTED_TORCHAO

__all__ = ["check_float8", "compile_blocks", "quantize_blocks", "round_up", "takes_float8"]

# Each side of an FP8 matrix is a multiple of it for cuBLAS, and so is a rank's number of tokens.
_UNIT = 16

# The first devices with products of FP8.
_LEAST_CAPABILITY = (8, 9)


def takes_float8(config: EngineConfig) -> bool:
    """Return whether a configuration asks for FP8 in matrix products."""
    return config.precision.compute == "float8"


def check_float8(config: EngineConfig, device_type: str) -> None:
    """Raise ``ConfigError`` where FP8 is asked for but not possible."""
    precision = config.precision
    for name in ("master", "reduce"):
        if getattr(precision, name) == "float8":
            raise ConfigError(
                f"precision.{name}",
                "expected another dtype, got float8",
                why="float8 is a precision of matrix products only",
                remedy="use float32; for FP8 training set precision.compute",
            )
    if not takes_float8(config):
        return
    if config.parallelism.tp > 1:
        raise ConfigError(
            "precision.compute",
            f"expected bfloat16 with parallelism.tp {config.parallelism.tp}, got float8",
            why="the scales of a row would be those of a rank's part of it",
            remedy="use data or context parallelism, or compute in bfloat16",
        )
    if device_type != "cuda" or torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        raise ConfigError(
            "precision.compute",
            f"expected another dtype on this device ({device_type}), got float8",
            why="products of FP8 need CUDA's compute capability 8.9 or newer",
            remedy="use an Ada, Hopper or newer GPU, or compute in bfloat16",
        )


def quantize_blocks(tree: Decoder.Config, recipe: str, *, emulate: bool = False) -> None:
    """Let the linear layers of a tree's blocks compute in FP8.

    Raises ``ConfigError`` for a block with experts, whose products would stay in bfloat16, and for
    sizes that FP8 does not take.

    Args:
        tree: configuration of the model, which is changed.
        recipe: torchao's name of the scales.
        emulate: True rounds to FP8 and multiplies in float32, for devices without FP8.
    """
    linear_class, settings = _load(recipe, emulate)
    for index, block in enumerate(tree.layers):
        if block.moe is not None:
            raise ConfigError(
                "precision.compute",
                "expected bfloat16 for a model with experts, got float8",
                why="this engine's experts have no products of FP8",
                remedy="compute in bfloat16",
            )
        for name, found, parent, key in list(block.traverse(Linear.Config)):
            sizes = (found.in_features, found.out_features)
            if any(size % _UNIT for size in sizes):
                raise ConfigError(
                    "precision.compute",
                    f"expected bfloat16 for layers.{index}.{name} of {sizes[0]} x {sizes[1]}, got "
                    "float8",
                    why=f"FP8 matrices have sides that {_UNIT} divides",
                    remedy="compute in bfloat16",
                )
            own = linear_class.Config(
                in_features=found.in_features,
                out_features=found.out_features,
                bias=found.bias,
                param_init=found.param_init,
                sharding_config=found.sharding_config,
                _torchao_config=settings,
            )
            if isinstance(parent, list):
                parent[key] = own
            else:
                setattr(parent, key, own)


def compile_blocks(blocks: Iterable[nn.Module], recipe: str) -> None:
    """Compile each block, with the rounding between operators that scales by row need.

    Inductor leaves out casts to bfloat16 inside of a kernel. The scale of a row would then be that
    of other numbers than those that are cast (pytorch/pytorch#150859); torchtitan sets the same
    for the whole process.
    """
    options = {"emulate_precision_casts": True} if recipe == "rowwise" else {}
    for block in blocks:
        block.compile(options=options)


def round_up(multiple: int) -> int:
    """Return the least multiple of a number of tokens that FP8 takes."""
    return math.lcm(multiple, _UNIT)


def _load(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """Return torchtitan's linear layer in FP8, and torchao's settings of it.

    Raises ``ConfigError`` without the tested torchao.
    """
    try:
        found = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != TESTED_TORCHAO:
        raise ConfigError(
            "precision.compute",
            f"float8 needs torchao {TESTED_TORCHAO}, got {found}",
            why="torchao's linear layers compute in FP8",
            remedy="pip install 'engine-torchtitan[core,float8]', or compute in bfloat16",
        )
    # An extra that the environment of the type checker does not have.
    torchao: Any = importlib.import_module("torchao.float8")
    settings: Any = torchao.Float8LinearConfig.from_recipe_name(recipe)
    return load_float8_linear(), replace(settings, emulate=emulate)
