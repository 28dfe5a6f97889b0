"""Copies of the weights in the dtype of computation, on a rank that shares no weight.

``fully_shard`` casts every weight in every pass, on one rank too, and copies it into a buffer and
out of it. A copy that is made once a step gives the same bits for 2 bytes a weight, and 2 more for
its gradient in each backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from engine_torch.weights import ShardedParam

# torch has no public names for these operations on many tensors at once.
_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["add_gradients", "clear_gradients", "keep_copies", "move_masters", "refresh_copies"]


def keep_copies(
    root: nn.Module, table: Iterable[ShardedParam], blocks: Iterable[nn.Module], dtype: torch.dtype
) -> None:
    """Let the modules below ``root`` compute with copies of their parameters in ``dtype``.

    The table keeps the masters, which get the gradients of the copies by ``add_gradients``. Blocks
    get their floating-point arguments in ``dtype``, as ``fully_shard`` gives them.
    """
    copies: dict[Tensor, nn.Parameter] = {}
    for entry in table:
        if entry.owner is None:
            master = entry.param
            entry.copy = nn.Parameter(master.detach().to(dtype), requires_grad=entry.trainable)
            copies[master] = entry.copy
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, copies[parameter])
    for block in blocks:
        block.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)


def add_gradients(table: Collection[ShardedParam]) -> None:
    """Move the gradients of the copies to their masters, added in the masters' dtype.

    It is called behind each backward pass: a hook for each weight would cost more of the host's
    time than the GPU takes for a small block.
    """
    fresh: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    for entry in table:
        gradient = None if entry.copy is None else entry.copy.grad
        # A weight that only selects has no gradient.
        if gradient is None:
            continue
        if entry.param.grad is None:
            entry.param.grad = torch.empty_like(entry.param, requires_grad=False)
            fresh.append((entry.param.grad, gradient))
        else:
            added.append((entry.param.grad, gradient))
    if fresh:
        _copy(*zip(*fresh, strict=True))
    if added:
        _add(*zip(*added, strict=True))
    clear_gradients(table)


def _cast_arguments(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the arguments of a block with floating-point tensors in ``dtype``."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return tree_map(cast, args), tree_map(cast, kwargs)


@torch.no_grad()
def refresh_copies(table: Iterable[ShardedParam]) -> None:
    """Give the copies the values of their masters, all of them in a few launches."""
    copied = [(entry.live, entry.param) for entry in table if entry.copy is not None]
    if copied:
        _copy(*zip(*copied, strict=True))


def clear_gradients(table: Iterable[ShardedParam]) -> None:
    """Drop the gradients of copies that an interrupted backward pass has left."""
    for entry in table:
        if entry.copy is not None:
            entry.copy.grad = None


def move_masters(table: Iterable[ShardedParam], device: str, *, away: bool) -> None:
    """Move the masters and their gradients to ``device``.

    Free the copies' memory if ``away``; make them again if not.
    """
    for entry in table:
        if entry.copy is None:
            continue
        entry.param.data = entry.param.data.to(device)
        if entry.param.grad is not None:
            entry.param.grad.data = entry.param.grad.data.to(device)
        dtype = entry.copy.dtype
        entry.copy.data = entry.copy.data.new_empty(0) if away else entry.param.data.to(dtype)
