"""Copies of a server's weights that its kernels keep, and that syncs into place would not reach.

A kernel may be given a weight once, when it is made, and not look it up in its layer again. Where
that is another tensor than the layer's own, syncs and the audit see the layer, and the kernel goes
on with what it has.

Found are copies in a weight's shape, dtype and device, to which a module refers by its attributes
and buffers, and by the attributes, slots and items of what it refers to: containers, objects,
partial functions, objects of bound methods, and modules that are not in the model. Not found are
copies in another form (transposed, flattened, fused, packed or in another dtype), those of fewer
than 8 elements, and those that only a function's closure, a module's or a class's variables, an
attribute of a tensor or an extension's memory refer to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rollout_fp8.install.places import list_saved, raw_bytes

# Smaller tensors may be equal by chance.
_SMALLEST = 8
# Elements at the beginning and at the end of a tensor that are looked up.
_SAMPLE = 8


def kept_copies(model: nn.Module, written: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the module that keeps a copy of a tensor of ``written``, and the tensor's name.

    All content must be random: equal tensors in other memory are copies then. Most tensors are
    compared by a sample, because each comparison waits for the device.
    """
    known: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for name, tensor in written.items():
        if tensor.numel() >= _SMALLEST:
            known.setdefault(_kind(tensor), []).append((name, tensor))
    own = {_storage(tensor) for tensor in list_saved(model).values()}
    foreign: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for at, tensor in _referred_tensors(model):
        kind = _kind(tensor)
        if kind in known and _storage(tensor) not in own:
            foreign.setdefault(kind, []).append((at, tensor))
    for kind, candidates in foreign.items():
        alike: dict[bytes, list[tuple[str, Tensor]]] = {}
        for sample, weight in zip(_samples(known[kind]), known[kind], strict=True):
            alike.setdefault(sample, []).append(weight)
        for sample, (at, tensor) in zip(_samples(candidates), candidates, strict=True):
            for name, weight in alike.get(sample, ()):
                if torch.equal(raw_bytes(tensor), raw_bytes(weight)):
                    yield at, name


def _referred_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the objects of each module of a model refer to, each tensor once."""
    # The values are kept, so that no other one gets the number of one that was seen.
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    for at, module in model.named_modules():
        rest: list[Any] = [*vars(module).values()]
        while rest:
            value = rest.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            kind = type(value)
            # No other subclass: those that a compiler traces with have no memory.
            if kind is Tensor or (issubclass(kind, nn.Parameter) and not is_lazy(value)):
                yield at, value
            else:
                rest += _referents(value)


def _referents(value: Any) -> list[Any]:
    """Return the objects of an object, as far as they may be its own.

    It asks for the type alone, and runs no code of it: some objects answer for any attribute, or
    stand for others that are gone.
    """
    kind = type(value)
    if issubclass(kind, Tensor | type | FunctionType | ModuleType):
        return []
    if issubclass(kind, MethodType | BuiltinMethodType):
        return [value.__self__]
    if issubclass(kind, dict):
        # The variables of a module, which functions refer to, are no object's own.
        return [] if dict.__contains__(value, "__builtins__") else [*dict.values(value)]
    for container in (list, tuple, set, frozenset, deque):
        if issubclass(kind, container):
            return [*container.__iter__(value)]
    if issubclass(kind, partial):
        return [value.func, *value.args, *value.keywords.values()]
    own: Any = vars(value) if kind.__dictoffset__ else None
    attributes: list[Any] = [*own.values()] if type(own) is dict else []
    return attributes + _in_slots(value)


def _in_slots(value: Any) -> list[Any]:
    """Return the objects in an object's slots."""
    found: list[Any] = []
    for variables in map(vars, type(value).__mro__):
        if "__slots__" not in variables:
            continue
        for member in variables.values():
            if isinstance(member, MemberDescriptorType):
                # A slot may be unset.
                with suppress(AttributeError):
                    found.append(member.__get__(value))
    return found


def _samples(named: Sequence[tuple[str, Tensor]]) -> list[bytes]:
    """Return the first and last elements of tensors of one kind, by one transfer to the host."""
    parts: list[Tensor] = []
    for _, tensor in named:
        # Along the last axis, since a tensor that is not contiguous is copied to be flattened.
        first = tensor.detach()
        last = first
        while first.dim() > 1:
            first = first[0]
            last = last[-1]
        parts += [raw_bytes(first[:_SAMPLE]), raw_bytes(last[-_SAMPLE:])]
    return [row.tobytes() for row in torch.cat(parts).view(len(named), -1).cpu().numpy()]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
