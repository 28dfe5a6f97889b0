"""CUDA simulated by the CPU, so that an engine that knows only CUDA can be tested without a device.

The shim answers what Megatron-core 0.16.1 asks of ``torch.cuda`` in the course of a
step: the current device is the CPU, streams and synchronization do nothing,
``device="cuda"`` makes a CPU tensor, and a CPU tensor whose type Megatron asks for says
that it is a CUDA tensor. It changes the whole process and is a fixture of tests, never
part of an engine. It shows arithmetic and the order of collectives, nothing about a
device. A report made with it says ``cpu (shimmed)``.
"""

# The replaced functions are torch's own, with torch's arguments.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from engine_api.devices import SIMULATED_CUDA

__all__ = ["install", "shimmed"]

_CPU = torch.device("cpu")
# Only for this package's code are CPU tensors called CUDA tensors.
_CALLERS = "megatron"


class _Nothing:
    """A stream or an event of a device that has none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Self:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _silent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _silent() -> Callable[..., None]:
    """Return a new function that does nothing.

    It is new each time because torch.compile's tables refuse one object under several
    of torch's names.
    """
    return lambda *_, **__: None


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.partition(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _OnCPU(TorchFunctionMode):
    """A mode in which ``device="cuda"`` means the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if _is_cuda(given.get("device")):
            given["device"] = _CPU
        if given.get("pin_memory"):
            given["pin_memory"] = False
        return func(*(_CPU if _is_cuda(value) else value for value in args), **given)


class _Generators:
    """A list of generators that has the same one for every device."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - depends on the caller
        asks = not args and not kwargs and caller.partition(".")[0] == _CALLERS
        if asks and ".cuda." not in answer:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_of


def _integer_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_to_all_single so that sizes of splits are integers, as Gloo needs them.

    Megatron passes tensors, which only NCCL's binding accepts.
    """

    def sizes(value: Any) -> list[int] | None:
        return None if value is None else [int(size) for size in value]

    def all_to_all_single(
        output: Any,
        input: Any,  # noqa: A002 - torch's name, callers pass it by keyword
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return original(
            output, input, sizes(output_split_sizes), sizes(input_split_sizes), **kwargs
        )

    return all_to_all_single


def _uneven_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_gather so that tensors of several lengths are padded.

    NCCL gathers them as they are; Gloo's binding does not.
    """

    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        rows = [len(part) if part.dim() else 0 for part in tensor_list]
        if len(set(rows)) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        _waited_for("all_gather", async_op)
        padded = [part.new_zeros(max(rows), *part.shape[1:]) for part in tensor_list]
        own = torch.cat([tensor, tensor.new_zeros(max(rows) - len(tensor), *tensor.shape[1:])])
        original(padded, own, group=group)
        for part, found in zip(tensor_list, padded, strict=True):
            part.copy_(found[: len(part)])
        return None

    return all_gather


def _uneven_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap reduce_scatter for several lengths: each rank sums all and keeps its own part."""

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in input_list}) == 1:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        _waited_for("reduce_scatter", async_op)
        whole = torch.cat(input_list)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(part) for part in input_list])[dist.get_rank(group)])
        return None

    return reduce_scatter


def _waited_for(called: str, async_op: bool) -> None:
    """Raise for an asynchronous call, because the result is copied after the collective."""
    if async_op:
        raise NotImplementedError(
            f"{called} of tensors of several lengths with async_op: the shim copies them afterwards"
        )


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return (object, attribute, replacement) for everything that the shim replaces."""
    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", _silent()),
        (cuda, "synchronize", _silent()),
        (cuda, "empty_cache", _silent()),
        (cuda, "manual_seed", functools.partial(torch.manual_seed)),
        (cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (cuda, "current_stream", lambda *_: _Nothing()),
        (cuda, "default_stream", lambda *_: _Nothing()),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "Stream", _Nothing),
        (cuda, "Event", _Nothing),
        (cuda, "default_generators", _Generators()),
        (cuda, "_lazy_call", lambda call, **_: call()),
        (cuda, "_lazy_init", _silent()),
        (torch.Tensor, "cuda", lambda x, *_, **__: x),
        (torch.nn.Module, "cuda", lambda x, *_: x),
        (torch.Tensor, "type", _typed(torch.Tensor.type)),
        (dist, "all_to_all_single", _integer_splits(dist.all_to_all_single)),
        (dist, "all_gather", _uneven_gather(dist.all_gather)),
        (dist, "reduce_scatter", _uneven_scatter(dist.reduce_scatter)),
    ]


@contextlib.contextmanager
def shimmed() -> Iterator[None]:
    """Simulate CUDA inside the context, for a test in one process.

    Modules imported inside keep the replaced functions that they took from torch.
    """
    with contextlib.ExitStack() as stack:
        for where, name, value in _replacements():
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)
        before = os.environ.get(SIMULATED_CUDA)
        os.environ[SIMULATED_CUDA] = "1"
        stack.callback(_restore, before)
        stack.enter_context(_OnCPU())
        yield


def _restore(before: str | None) -> None:
    if before is None:
        del os.environ[SIMULATED_CUDA]
    else:
        os.environ[SIMULATED_CUDA] = before


def install() -> None:
    """Simulate CUDA for the rest of this process, before an engine is imported."""
    context = shimmed()
    # Kept, because an abandoned context would undo itself.
    _installed.append(context)
    context.__enter__()


_installed: list[contextlib.AbstractContextManager[None]] = []
