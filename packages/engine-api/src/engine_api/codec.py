"""Python values as bytes, for messages between the processes of a run.

Nothing is unpickled. Bytes from a socket or a store decode to data, no matter which process wrote
them: JSON, with a tag where JSON has no type (tuples, paths, dtypes, …), followed by the buffers of
tensors, arrays and long lists of numbers. The only classes that decoding calls are those that their
own modules registered with ``register``.

::

    b"EHC1" | length of the JSON, 8 bytes | JSON | buffers

These values can be encoded: None, bool, int, float (NaN and infinities too), str, bytes, list,
tuple, dict, set, frozenset, ``Path``, ``torch.dtype``, ``torch.Size``, dense tensors (they decode
on the CPU, without a gradient), NumPy's numeric arrays and scalars, and registered dataclasses,
named tuples and enumerations. A value decodes to an equal one of the same type. Everything else
(subclasses of these, functions, exceptions) is a ``CodecError`` that names its place in the value.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from engine_api.errors import EngineError

MAGIC = b"EHC1"
WHERE = "message between processes"
_TAG = "$"
_LENGTH = 8  # bytes
# A list of at least this many floats or integers becomes a buffer.
_PACKED = 16
_PLAIN = {int, str, bool, type(None)}
_INT64 = 1 << 63

T = TypeVar("T")


class CodecError(EngineError):
    """A value cannot be sent, or bytes are not a message of this codec."""


@dataclass(frozen=True)
class _Known:
    """A registered class."""

    name: str
    parts: Callable[[Any], Any]
    """Function from an instance to its parts."""
    make: Callable[[Any], Any]
    """Function from such parts to an instance."""


_BY_CLASS: dict[type, _Known] = {}
_BY_NAME: dict[str, _Known] = {}


def register(cls: type[T]) -> type[T]:
    """Register a dataclass, a named tuple or an enumeration, so that its instances can be sent.

    It is a decorator, or is called in the class's module. A dataclass is made by its constructor
    from its fields, so values that ``__post_init__`` refuses are refused on arrival.
    """
    make: Any = cls
    if issubclass(cls, Enum):
        _add(cls, _value_of, make)
    elif is_dataclass(cls):
        names = [f.name for f in fields(cls) if f.init]
        _add(cls, lambda value: {n: getattr(value, n) for n in names}, lambda parts: make(**parts))
    elif issubclass(cls, tuple) and hasattr(make, "_fields"):
        _add(cls, list, lambda parts: make(*parts))
    else:
        raise TypeError(f"{cls.__qualname__} is not a dataclass, named tuple or enumeration")
    return cls


def _value_of(member: Enum) -> Any:
    return member.value


def _add(cls: type, parts: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    known = _Known(f"{cls.__module__}.{cls.__qualname__}", parts, make)
    _BY_CLASS[cls] = known
    _BY_NAME[known.name] = known


def encode(value: Any) -> bytes:
    """Return ``value`` as a message.

    Raises ``CodecError`` for a value that cannot be encoded.
    """
    buffers: list[bytes | memoryview] = []
    try:
        tree = _Encoder(buffers).node(value, "value")
        head = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise _cannot("value", "it contains itself, or is nested too deeply") from error
    # An integer may exceed Python's limit on digits.
    except ValueError as error:
        raise _cannot("value", str(error)) from error
    return b"".join((MAGIC, len(head).to_bytes(_LENGTH, "little"), head, *buffers))


def decode(message: bytes | bytearray | memoryview) -> Any:
    """Return the value of a message.

    Raises ``CodecError`` for bytes that ``encode`` did not make.
    """
    view = memoryview(message)
    start = len(MAGIC) + _LENGTH
    if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < start:
        raise _foreign(f"it begins with {bytes(view[:16])!r}, not with {MAGIC!r}")
    end = start + int.from_bytes(view[len(MAGIC) : start], "little")
    if end > len(view):
        raise _foreign(f"expected {end} bytes at least, got {len(view)}")
    try:
        return json.loads(
            bytes(view[start:end]), object_hook=_Decoder(view[end:]), parse_constant=_no_constant
        )
    except CodecError:
        raise
    # Bytes from outside may be invalid JSON, or have parts of a wrong type, or fields that a class
    # lacks or refuses.
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
        RuntimeError,
        EngineError,
    ) as error:
        raise _foreign(f"{type(error).__name__}: {error}") from error


def _no_constant(text: str) -> Any:
    raise _foreign(f"{text} is not JSON")


def _cannot(path: str, why: str) -> CodecError:
    return CodecError(
        f"{path} cannot be sent",
        where=WHERE,
        why=why,
        remedy="send numbers, text, lists, dicts, tensors or a class that "
        "engine_api.codec.register knows",
    )


def _foreign(why: str) -> CodecError:
    return CodecError(
        "the bytes are not a message of this run",
        where=WHERE,
        why=why,
        remedy="check which other processes can reach this run's store and ports, and that all "
        "processes have the same packages",
    )


class _Encoder:
    """A builder of the JSON tree of a value and of its list of buffers."""

    def __init__(self, buffers: list[bytes | memoryview]) -> None:
        self._buffers = buffers
        self._end = 0

    def node(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
        if kind is list:
            return self._list(value, path)
        if kind is tuple:
            return {_TAG: "tuple", "v": self._list(list(value), path)}
        if kind is dict or kind is MappingProxyType:
            return self._dict(value, path)
        known = _BY_CLASS.get(kind)
        if known is not None:
            return {_TAG: "class", "c": known.name, "v": self.node(known.parts(value), path)}
        return self._rare(value, path)

    def _list(self, value: list[Any], path: str) -> Any:
        kinds = set(map(type, value))
        if len(value) >= _PACKED and len(kinds) == 1:
            kind = kinds.pop()
            if kind is float:
                return {_TAG: "floats", "b": self._buffer(array("d", value).tobytes())}
            if kind is int and min(value) >= -_INT64 and max(value) < _INT64:
                return {_TAG: "ints", "b": self._buffer(array("q", value).tobytes())}
            kinds = {kind}
        if kinds <= _PLAIN:
            return value
        return [self.node(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _dict(self, value: Mapping[Any, Any], path: str) -> Any:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: self.node(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [
            [self.node(key, f"a key of {path}"), self.node(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "v": pairs}

    def _rare(self, value: Any, path: str) -> Any:
        if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
            items = sorted(
                (self.node(item, f"an item of {path}") for item in value), key=json.dumps
            )
            return {_TAG: type(value).__name__, "v": items}
        if type(value) is bytes:
            return {_TAG: "bytes", "b": self._buffer(value)}
        if isinstance(value, Path):
            return {_TAG: "path", "v": str(value)}
        packed = self._of_torch(value, path) or self._of_numpy(value)
        if packed is None:
            kind = type(value)
            raise _cannot(path, f"it is a {kind.__module__}.{kind.__qualname__}")
        return packed

    def _of_torch(self, value: Any, path: str) -> dict[str, Any] | None:
        import torch

        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Size):
            return {_TAG: "size", "v": list(value)}
        if not isinstance(value, torch.Tensor):
            return None
        if (
            value.layout is not torch.strided
            or value.is_meta
            or value.is_nested
            or value.is_quantized
        ):
            raise _cannot(
                path,
                f"it is a tensor of layout {value.layout} on {value.device}, "
                "not a dense one with values",
            )
        host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if host.numel():
            flat = host.reshape(-1).view(torch.uint8)
        else:
            flat = host.new_empty(0, dtype=torch.uint8)
        about = {"d": str(host.dtype).removeprefix("torch."), "s": list(host.shape)}
        return {_TAG: "tensor", **about, "b": self._buffer(flat.numpy().tobytes())}

    def _of_numpy(self, value: Any) -> dict[str, Any] | None:
        import numpy as np

        if (
            not (type(value) is np.ndarray or isinstance(value, np.generic))
            or value.dtype.kind not in "biufc"
        ):
            return None
        about = {"d": value.dtype.str, "s": list(value.shape)}
        kind = "array" if type(value) is np.ndarray else "scalar"
        return {_TAG: kind, **about, "b": self._buffer(value.tobytes())}

    def _buffer(self, data: bytes) -> list[int]:
        place = [self._end, len(data)]
        self._buffers.append(data)
        self._end += len(data)
        return place


class _Decoder:
    """A function from tagged JSON objects to values, called for inner objects first."""

    def __init__(self, buffers: memoryview) -> None:
        self._buffers = buffers

    def __call__(self, node: dict[str, Any]) -> Any:
        tag = node.get(_TAG)
        if tag is None and _TAG not in node:
            return node
        if tag not in _MAKERS:
            raise _foreign(f"unknown tag {tag!r}")
        return _MAKERS[tag](self, node)

    def buffer(self, node: dict[str, Any]) -> memoryview:
        start, size = node["b"]
        if type(start) is not int or type(size) is not int or start < 0 or size < 0:
            raise _foreign(f"a buffer at {start!r} of {size!r} bytes")
        found = self._buffers[start : start + size]
        if len(found) != size:
            raise _foreign(f"expected a buffer of {size} bytes at {start}, got {len(found)}")
        return found

    def floats(self, node: dict[str, Any]) -> list[float]:
        return array("d", self.buffer(node).tobytes()).tolist()

    def ints(self, node: dict[str, Any]) -> list[int]:
        return array("q", self.buffer(node).tobytes()).tolist()

    def bytes(self, node: dict[str, Any]) -> bytes:
        return self.buffer(node).tobytes()

    def instance(self, node: dict[str, Any]) -> Any:
        known = _BY_NAME.get(node["c"])
        if known is None:
            raise _foreign(f"it names {node['c']!r}, which is not registered in this process")
        return known.make(node["v"])

    def tensor(self, node: dict[str, Any]) -> Any:
        import torch

        kind = _dtype(node["d"])
        data = bytearray(self.buffer(node))
        if data:
            flat = torch.frombuffer(data, dtype=torch.uint8).view(kind)
        else:
            flat = torch.empty(0, dtype=kind)
        return flat.reshape(node["s"])

    def array(self, node: dict[str, Any]) -> Any:
        import numpy as np

        kind = np.dtype(node["d"])
        if kind.kind not in "biufc":
            raise _foreign(f"dtype {node['d']!r} is not numeric")
        return np.frombuffer(bytearray(self.buffer(node)), dtype=kind).reshape(node["s"])

    def scalar(self, node: dict[str, Any]) -> Any:
        return self.array(node)[()]


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise _foreign(f"torch.{name} is not a dtype")
    return found


def _size(node: dict[str, Any]) -> Any:
    import torch

    return torch.Size(node["v"])


def _float(node: dict[str, Any]) -> float:
    if node["v"] not in ("nan", "inf", "-inf"):
        raise _foreign(f"{node['v']!r} is not a float that needs a tag")
    return float(node["v"])


_MAKERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "float": lambda _, node: _float(node),
    "floats": _Decoder.floats,
    "ints": _Decoder.ints,
    "tuple": lambda _, node: tuple(node["v"]),
    "dict": lambda _, node: dict(cast("list[list[Any]]", node["v"])),
    "set": lambda _, node: set(node["v"]),
    "frozenset": lambda _, node: frozenset(node["v"]),
    "bytes": _Decoder.bytes,
    "path": lambda _, node: Path(node["v"]),
    "dtype": lambda _, node: _dtype(node["v"]),
    "size": lambda _, node: _size(node),
    "tensor": _Decoder.tensor,
    "array": _Decoder.array,
    "scalar": _Decoder.scalar,
    "class": _Decoder.instance,
}
