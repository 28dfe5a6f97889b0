"""Search for the references that keep an object alive."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from vllm.device_allocator import cumem

MOST = 300  # objects whose holders are looked for: each look walks all of memory


def holders(thing: Any, *, chains: int = 3, depth: int = 14) -> list[str]:
    """Return the shortest chains of references from a module to ``thing``, outermost last.

    It gives up after ``MOST`` objects: none found says only that no chain is short.
    """
    gc.unfreeze()  # vLLM and the ranks freeze what they have, and frozen objects refer to nothing
    found, looks = list[str](), 0
    seen, waiting = {id(thing)}, deque([(thing, "")])
    while waiting and len(found) < chains and looks < MOST:
        held, chain = waiting.popleft()
        looks += 1
        for holder in gc.get_referrers(held):
            if id(holder) in seen or holder is waiting or isinstance(holder, FrameType):
                continue
            seen.add(id(holder))
            longer = f"{chain} <- {_name(holder, held)}"
            if isinstance(holder, ModuleType) or (
                isinstance(holder, dict) and "__builtins__" in holder
            ):
                found.append(longer)
            elif longer.count("<-") < depth:
                waiting.append((holder, longer))
    return found


def _name(holder: Any, held: Any) -> str:
    if isinstance(holder, dict):
        keys = [str(key)[:60] for key, value in list(holder.items()) if value is held][:2]
        return f"dict{keys} of {holder.get('__name__', '?')}"
    if isinstance(holder, FunctionType | type):
        return f"{holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, ModuleType):
        return holder.__name__
    return f"{type(holder).__module__}.{type(holder).__qualname__}({sys.getrefcount(holder)})"


def compiled_functions() -> set[str]:
    """Return Dynamo's compiled functions among the globals of models."""
    models = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.model_executor.models.")
    ]
    return {key for module in models for key in vars(module) if key.startswith("__compiled_fn")}


def sleepable() -> list[str]:
    """Return the records of vLLM's allocator of memory that can sleep.

    With the holders of tensors in that memory.
    """
    allocator = cumem.CuMemAllocator.instance
    records = {} if allocator is None else dict(allocator.pointer_to_data)
    if not records:
        return []
    spans = [range(address, address + data.handle[1]) for address, data in records.items()]
    gc.unfreeze()
    tensors = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor)
        and one.is_cuda
        and not isinstance(one, FakeTensor)
        and any(one.data_ptr() in span for span in spans)
    ]
    return [
        f"{sum(map(len, spans))} bytes, {len(tensors)} tensors",
        *(holders(tensors[0]) if tensors else []),
    ]
