"""FP8 in the linear layers of a model's blocks (``engine_torch.float8``), and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from engine_api.config import EngineConfig, Parallelism
from engine_api.errors import ConfigError
from engine_torch.float8 import check_sides, load_settings, load_torchao, refuse_experts
from engine_torch.mixers import find_mixers

__all__ = ["gathers_float8", "quantize_blocks", "refuse_divided", "refuse_model"]

_IN_BFLOAT16 = "compute in bfloat16"

# Ends of the names of classes that hold the weights of experts or choose among them.
_EXPERTS = ("Experts", "Router", "MoE", "SparseMoeBlock")


def gathers_float8(config: EngineConfig, recipe: str, *, plain: bool) -> bool:
    """Return whether ``fully_shard`` gathers weights in FP8.

    A row's scale in the forward pass is no scale of the backward pass, which multiplies by columns,
    so that scales by row need the weight itself. Weights on the host cannot be reduced there.

    Args:
        config: the engine's configuration.
        recipe: torchao's name of the scales.
        plain: True for a model that ``fully_shard`` does not wrap.
    """
    return recipe == "tensorwise" and not plain and not config.memory.offload_params


def refuse_divided(parallelism: Parallelism) -> None:
    """Raise ``ConfigError`` for FP8 under tensor parallelism."""
    if parallelism.tp > 1:
        raise ConfigError(
            "precision.compute",
            f"expected bfloat16 with parallelism.tp {parallelism.tp}, got float8",
            why="the scales of a row would be those of a rank's part of it",
            remedy="use data or context parallelism, or compute in bfloat16",
        )


def refuse_model(lm: nn.Module, blocks: Sequence[nn.Module], config: EngineConfig) -> None:
    """Raise ``ConfigError`` for a model whose blocks have products other than linear layers'.

    They would be computed in bfloat16 without a word.

    Args:
        lm: the model before adapters and sharding.
        blocks: its repeated blocks, without those of a vision tower.
        config: the engine's configuration.
    """
    if config.lora is not None:
        raise ConfigError(
            "precision.compute",
            "expected bfloat16 with lora, got float8",
            why="the products of adapters are small, and no test has compared them over FP8",
            remedy=f"{_IN_BFLOAT16}, or train all weights",
        )
    inside = {module for block in blocks for module in block.modules()}
    if any(type(module).__name__.endswith(_EXPERTS) for module in inside):
        refuse_experts()
    if mixers := [name for name, module in find_mixers(lm).items() if module in inside]:
        raise ConfigError(
            "precision.compute",
            f"expected bfloat16 for {mixers[0]}, got float8",
            why="it computes batches of documents, whose numbers of tokens 16 does not divide",
            remedy=_IN_BFLOAT16,
        )
    for name, module in lm.named_modules():
        if module not in inside:
            continue
        if type(module) is nn.Linear:
            check_sides(name, module.in_features, module.out_features)
        elif any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            raise ConfigError(
                "precision.compute",
                f"expected bfloat16 for {name}, a {type(module).__name__}, got float8",
                why="FP8 is for products of linear layers, and it has another one",
                remedy=_IN_BFLOAT16,
            )


def quantize_blocks(
    blocks: Sequence[nn.Module],
    recipe: str,
    *,
    emulate: bool,
    ranks: int = 1,
    gather: bool = False,
) -> None:
    """Let the linear layers of blocks compute in FP8, under the same names of their weights.

    Args:
        blocks: the repeated blocks of a model that ``refuse_model`` has let pass.
        recipe: torchao's name of the scales.
        emulate: True rounds to FP8 and multiplies in another dtype, for devices without FP8.
        ranks: number of ranks that share one copy of the weights.
        gather: True gathers the weights in FP8, where all ranks have equally many rows.
    """
    plain = load_settings(recipe, emulate=emulate)
    if gather:
        # fully_shard gathers nothing but parts of one size in another dtype.
        gathered = replace(plain, enable_fsdp_float8_all_gather=True)
        _convert(blocks, gathered, lambda layer: layer.out_features % ranks == 0)
    _convert(blocks, plain, lambda _: True)


def _convert(
    blocks: Sequence[nn.Module], settings: Any, selects: Callable[[nn.Linear], bool]
) -> None:
    """Convert the selected linear layers that are not in FP8 yet."""
    for block in blocks:
        load_torchao().convert_to_float8_training(
            block,
            config=settings,
            module_filter_fn=lambda module, _: type(module) is nn.Linear and selects(module),
        )
