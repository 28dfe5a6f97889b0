"""Compiled blocks, and the activations that they compute again in the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_torch.attention import VARLEN_WIDTH
from engine_torch.experts import are_experts
from engine_torch.mixers import find_mixers

__all__ = ["check_kept_activations", "compile_blocks", "recompute_in_code"]

# torch warns once in each process that such a block must not change tensors in place. Tests compare
# its gradients with those of a block that keeps everything.
_REQUEST = "context_fn is passed to torch.utils.checkpoint under torch.compile"

# Products of matrices, with the place of the second matrix among their arguments.
_PRODUCTS: dict[Any, int] = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    torch.ops.aten._scaled_mm.default: 1,  # noqa: SLF001 - the name of the operator
}


def compile_blocks(
    blocks: Iterable[nn.Module], mode: str = "default", *, rounds_casts: bool = False
) -> None:
    """Compile each block, whose parameters may be sharded by FSDP.

    Args:
        blocks: modules that are compiled in place.
        mode: mode of torch.compile.
        rounds_casts: True for the rounding between operators that FP8 with a scale for each row
            needs. Inductor leaves out casts to bfloat16 inside of a kernel. The scale of a row
            would then be that of other numbers than those that are cast (pytorch/pytorch#150859);
            torchtitan sets the same for the whole process.
    """
    # Importing the compiler takes seconds.
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(mode))
    if rounds_casts:
        options["emulate_precision_casts"] = True
    for block in blocks:
        block.compile(options=options)


def recompute_in_code(blocks: Iterable[Any], kept: float) -> list[nn.Module]:
    """Let the code of dense blocks recompute their activations, and return these blocks.

    Compiled, forward and recomputation are one program, which leaves out what the backward pass
    does not read: above all the last product of the MLP. Around the compiled code of a block, as
    transformers has it, all of it runs again. Where a block runs uncompiled, it recomputes as
    before.

    Blocks with experts, with layers that carry a state from token to token, or with attention that
    runs outside of compiled code are left as they are: they are compiled in parts, which a
    recomputation within their code excludes.

    Args:
        blocks: blocks of a transformers model that recompute as a whole
            (``model.recompute_blocks``).
        kept: share of the results of a block's linear layers, from 0 to below 1, that is kept.
    """
    found: list[nn.Module] = []
    for block in blocks:
        # Families with code of their own recompute in the loop over the blocks.
        if getattr(block, "gradient_checkpointing", False) and not _is_split(block):
            block.gradient_checkpointing = False
            block.forward = _recompute(block, kept)
            found.append(block)
    return found


def check_kept_activations(kept: float, config: EngineConfig) -> None:
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
            why="only compiled blocks that recompute keep a part of their activations",
            remedy="set memory.recompute: full and memory.compile: true, or leave "
            "kept_activations out",
        )


def _is_split(block: nn.Module) -> bool:
    """Return whether torch.compile divides a block into parts.

    Heads wider than ``VARLEN_WIDTH`` and scores with a cap run outside of compiled code, and so may
    experts and layers that carry a state.
    """
    for name, module in block.named_modules():
        capped = bool(getattr(module, "attn_logit_softcapping", None))
        width = getattr(module, "head_dim", None)
        wide = isinstance(width, int) and width > VARLEN_WIDTH
        if capped or wide or are_experts(name, module):
            return True
    return bool(find_mixers(block))


def _recompute(block: Any, kept: float) -> Callable[..., Any]:
    """Return the forward pass of a block that computes its activations again."""
    compute = block.forward
    # The trainer's estimate counts the model's own layers, and not those of adapters.
    outputs = sum(
        one.out_features
        for name, one in block.named_modules()
        if isinstance(one, nn.Linear) and ".lora_" not in name
    )
    settings: dict[str, Any] = {"use_reentrant": False}
    if kept:
        # torch.compile takes a second number for a variable, which such a function must not have.
        settings["context_fn"] = partial(_make_contexts, str(int(kept * outputs)))
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_request)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return compute(*args, **kwargs)
        return checkpoint(compute, *args, **settings, **kwargs)

    return forward


def _is_not_request(record: logging.LogRecord) -> bool:
    """Return whether a log record is anything but torch's request about checkpoints."""
    return _REQUEST not in record.getMessage()


def _make_contexts(columns: str) -> Any:
    """Return the contexts of a forward pass and its recomputation that keep some products.

    They are the first ones that fit: queries, keys and values come before the MLP. A product takes
    about the same number of operations for a byte of its result, whichever it is.

    Args:
        columns: number of columns of the results that are kept, in digits.
    """
    left = {False: int(columns), True: int(columns)}

    def choose(context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            width = args[_PRODUCTS[operator]].shape[1]
            if width <= left[context.is_recompute]:
                left[context.is_recompute] -= width
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
