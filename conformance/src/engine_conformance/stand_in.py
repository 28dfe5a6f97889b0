"""A device called npu made of CPU tensors, so that an engine for NPUs can be tested without one.

A tensor on it wraps a tensor of the CPU and hands every operator to it, so forward,
backward, optimizers, copies and gloo's collectives are those of the CPU. It shows that
an engine's code works on a device other than cpu and cuda, nothing about Ascend's
kernels, HCCL, streams or memory. It is made of torch's private Python backends, changes
the whole process, and is a fixture of tests. A report made with it says ``simulated``,
and gives no certificate.
"""

# The replaced functions are torch's own, with torch's arguments.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["GROUPS", "NAME", "SimulatedTensor", "install"]

NAME = "npu"
GROUPS = "cpu:gloo,npu:gloo"
_HOST = torch.device("cpu")
# The operators that Tensor.to and Tensor.item end in.
_TO_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001 - torch has no public name for it
_TO_NUMBER = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - nor for this one
_MIXING = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten.set_,
)
# Kept, because the operators that a library registers disappear with it.
_libraries: list[torch.library.Library] = []


class _Queue:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Self:
        """Return the event itself, since everything before it is done."""
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class SimulatedTensor(torch.Tensor):
    """A tensor on the device.

    ``host`` holds its values.
    """

    host: torch.Tensor

    @staticmethod
    def __new__(  # noqa: PYI034 - a static method has no Self
        cls: type[SimulatedTensor], host: torch.Tensor, requires_grad: bool = False
    ) -> SimulatedTensor:
        """Make a tensor of the same shape, strides and dtype as ``host``."""
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - how torch documents it
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, host: torch.Tensor, requires_grad: bool = False) -> None:
        self.host = host

    def __repr__(self) -> str:
        return f"{NAME}:{self.host!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        copied = SimulatedTensor(self.host.clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values, which FSDP frees and allocates again."""
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        """Return the values as numbers, which torch refuses for a subclass."""
        return self.host.tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.host.data_ptr()

    @property
    def data(self) -> Any:
        """The tensor without its history, as in torch."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: SimulatedTensor) -> None:
        # Sets size and strides, but no attribute of a subclass.
        torch.Tensor.data.__set__(self, value)
        self.host = value.host

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


def _is_ours(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == NAME


def _to_host(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.host
    return _HOST if isinstance(value, torch.device) and value.type == NAME else value


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU and put its result on the device, unless it copies to another."""
    # In inference mode this operator arrives undecomposed.
    if func.overloadpacket is torch.ops.aten.to:
        return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    leaves = func is _TO_COPY and device is not None and not _is_ours(device)
    if func is torch.ops.aten.copy_.default:
        return _copy(args[0], args[1])
    if func is _TO_NUMBER:
        return args[0].host.item()
    _refuse_mixture(func, args, kwargs)
    given, named = tree_map(_to_host, (args, dict(kwargs)))
    if func is torch.ops.aten.histc.default and not given[0].is_floating_point():
        # The CPU counts floats only.
        counts = func(given[0].float(), *given[1:], **named)
        return _wrap(counts.to(given[0].dtype))
    result = func(*given, **named)
    if leaves:
        return result
    # A tensor changed in place is returned as the same object that came in.
    own = {id(x.host): x for x in tree_iter((args, dict(kwargs))) if isinstance(x, SimulatedTensor)}
    for x in own.values():
        # An operator may resize its argument: torch.arange fills an empty tensor.
        if x.shape != x.host.shape or x.stride() != x.host.stride():
            x.data = SimulatedTensor(x.host)
    return tree_map(lambda x: own.get(id(x), _wrap(x)), result)


def _refuse_mixture(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise, as a device does, unless all operands but numbers and indices are on one device."""
    tensors = [x for x in tree_iter((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    foreign = [
        x
        for x in tensors
        if not isinstance(x, SimulatedTensor) and x.dim() and x.device.type != "meta"
    ]
    mixed = bool(foreign) and len(foreign) < len(tensors)
    if mixed and func.namespace == "aten" and func.overloadpacket not in _MIXING:
        raise RuntimeError(
            f"{func}: expected all tensors on {NAME}, found one on {foreign[0].device}"
        )


def _wrap(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, SimulatedTensor)
    return SimulatedTensor(value) if plain else value


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
    _to_host(target).copy_(_to_host(source))
    return target


def _copy_from(
    source: torch.Tensor,
    target: torch.Tensor,
    non_blocking: bool = False,  # noqa: ARG001 - torch's signature
) -> torch.Tensor:
    return _copy(target, source)


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> SimulatedTensor:
    return SimulatedTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any
) -> SimulatedTensor:
    return SimulatedTensor(
        torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    )


def _module() -> ModuleType:
    """Build ``torch.npu``: eight devices without memory of their own, with the CPU's generator."""
    module = ModuleType(f"torch.{NAME}")

    def silent(*_: Any, **__: Any) -> None:
        pass

    facts: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 8,
        "get_device_name": lambda *_: "simulated NPU",
        "current_device": lambda: 0,
        "set_device": silent,
        "synchronize": silent,
        "empty_cache": silent,
        "reset_peak_memory_stats": silent,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": _Queue,
        "Event": _Queue,
        "current_stream": lambda *_: _Queue(),
        "stream": lambda _: contextlib.nullcontext(),
        "manual_seed_all": torch.default_generator.manual_seed,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    vars(module).update(facts)
    return module


def install() -> None:
    """Make the device known to torch for the rest of this process.

    A second call does nothing.
    """
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    # Without this a module that is moved would put a CPU tensor into a parameter of the device.
    torch.__future__.set_swap_module_params_on_conversion(True)
    aten = torch.library.Library("aten", "IMPL")
    everything = torch.library.Library("_", "IMPL")
    _libraries.extend((aten, everything))
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    everything.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    # Autocast changes nothing.
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
