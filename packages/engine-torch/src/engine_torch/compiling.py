"""Compiled blocks, and what they compute again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_torch.experts import are_experts
from engine_torch.mixers import find_mixers

__all__ = ["check_kept", "compile_blocks", "recompute_compiled"]


def compile_blocks(
    blocks: Iterable[nn.Module],
    mode: str = "default",
    *,
    rounds_casts: bool = False,
    kept: float | None = None,
) -> None:
    """Compile each block, whose parameters may be sharded by FSDP.

    Args:
        blocks: modules that are compiled in place.
        mode: mode of torch.compile.
        rounds_casts: True for the rounding between operators that FP8 with a scale for each row
            needs. Inductor leaves out casts to bfloat16 inside of a kernel. The scale of a row
            would then be that of other numbers than those that are cast (pytorch/pytorch#150859);
            torchtitan sets the same for the whole process.
        kept: share, from 0 to 1, of a block's activations that are kept for the backward pass,
            which computes the others again. None leaves it to the compiler, which keeps about all.
    """
    # Importing the compiler takes seconds.
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(mode))
    if rounds_casts:
        options["emulate_precision_casts"] = True
    how = {"options": options} if kept is None else {"backend": _Recomputing(options, kept)}
    for block in blocks:
        block.compile(**how)


def recompute_compiled(blocks: Iterable[Any]) -> list[nn.Module]:
    """Return those of a transformers model's blocks whose compiled code is to recompute itself.

    They no longer recompute as a whole, which would compute everything again: also the result of a
    block, which the backward pass does not read. A block with experts or with layers that carry a
    state from token to token goes on doing so. Its code may be compiled in parts, and what is
    between the parts would be kept.

    Args:
        blocks: blocks that recompute as a whole (``model.recompute_blocks``).
    """
    found: list[nn.Module] = []
    for block in blocks:
        is_split = find_mixers(block) or any(
            are_experts(name, module) for name, module in block.named_modules()
        )
        # Families with code of their own recompute in the loop over the blocks.
        if getattr(block, "gradient_checkpointing", False) and not is_split:
            block.gradient_checkpointing = False
            found.append(block)
    return found


def check_kept(kept: float, config: EngineConfig) -> None:
    """Raise ``ConfigError`` for a share of kept activations that no backward pass would read.

    Args:
        kept: value of ``options.kept_activations``.
        config: the engine's configuration.
    """
    memory = config.memory
    if kept and config.optimizer and not (memory.compile and memory.recompute == "full"):
        raise ConfigError(
            "options.kept_activations",
            f"expected 0 with memory.recompute: {memory.recompute} and memory.compile: "
            f"{str(memory.compile).lower()}, got {kept:g}",
            why="compiled blocks alone recompute some of their activations and keep the others",
            remedy="set memory.recompute: full and memory.compile: true, or leave it out",
        )


class _Recomputing:
    """Inductor, for code that computes its activations again in the backward pass.

    The activations that are kept are those that would take most operations for their bytes
    (activation_memory_budget of AOTAutograd). torch reads the budget from a setting of the process
    when it compiles, which is at the first call and for each new kind of shape.
    """

    def __init__(self, options: Mapping[str, Any], kept: float) -> None:
        self._options = dict(options)
        self._kept = kept

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return the compiled code of a graph."""
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=self._kept):
            return compile_fx(module, inputs, config_patches=self._options)
