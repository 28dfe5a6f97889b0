"""Copies of a server's weights that its kernels keep, and that syncs into place would not reach.

A kernel may be given a weight once, when it is made, and not look it up in its layer again. Where
that is another tensor than the layer's own, syncs and the audit see the layer, and the kernel goes
on with what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# What a module has in them is found by name, and is no copy.
_REGISTRIES = ("_parameters", "_buffers", "_modules")
# Smaller tensors may be equal by chance.
_SMALLEST = 8


def kept_copies(model: nn.Module, saved: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the module that keeps a copy of a tensor of ``saved``, and the tensor's name.

    All content must be random: equal tensors in other memory are copies then.
    """
    alike: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    own: set[int] = set()
    for name, tensor in saved.items():
        own.add(_storage(tensor))
        if tensor.numel() >= _SMALLEST:
            alike.setdefault(_kind(tensor), []).append((name, tensor))
    # The values are kept, so that no other one gets the number of one that was seen.
    seen: dict[int, Any] = {}
    for at, module in model.named_modules():
        for tensor in _tensors(module, seen):
            if _kind(tensor) not in alike or _storage(tensor) in own:
                continue
            for name, known in alike[_kind(tensor)]:
                if torch.equal(_bytes(tensor), _bytes(known)):
                    yield at, name


def _tensors(module: nn.Module, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a module's own objects refer to, apart from its registries."""
    rest: list[Any] = [one for name, one in vars(module).items() if name not in _REGISTRIES]
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        # No other subclass: those that a compiler traces with have no memory.
        if type(value) is Tensor or issubclass(type(value), nn.Parameter):
            yield value
        else:
            rest += _referents(value)


def _referents(value: Any) -> list[Any]:
    """Return the objects of an object, as far as they may be its own."""
    if isinstance(value, nn.Module | Tensor | type | FunctionType | MethodType | ModuleType):
        return []
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, partial):
        return [*value.args, *value.keywords.values()]
    # Some objects answer for any attribute, so this asks their type.
    own: Any = vars(value) if type(value).__dictoffset__ else None
    return [*own.values()] if isinstance(own, dict) else []


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
