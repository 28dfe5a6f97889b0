"""The conversion of plain mappings to typed dataclasses, with errors that name the dotted key.

OmegaConf's structured mode is not used, because it does not accept the ``Mapping`` and
``Sequence`` annotations of the contract's own dataclasses, and a second copy of them would drift.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.secrets import masked

T = TypeVar("T")
# Integers must be below this, since they reach torch, NumPy and other processes.
INT64 = 2**63
# OmegaConf's mark of a mandatory value that is still missing.
UNSET = "???"


def bind(cls: type[T], data: Any, key: str = "") -> T:
    """Build the dataclass ``cls`` from ``data``, without unknown keys or silent conversions.

    The only conversion is that of an integer to a float.

    Raises ``ConfigError`` that names the dotted key, which is unknown (with near matches), missing,
    or of a wrong type.
    """
    if not isinstance(data, Mapping):
        raise _wrong_type(
            key or cls.__name__, data, f"a mapping with the keys {', '.join(_names(cls))}"
        )
    _check_keys(cls, data, key)
    hints = get_type_hints(cls)
    given = {name: _value(hints[name], value, _join(key, name)) for name, value in data.items()}
    for field in fields(cls):  # pyright: ignore[reportArgumentType] - every cls here is a dataclass
        if (
            field.name not in given
            and field.default is MISSING
            and field.default_factory is MISSING
        ):
            raise ConfigError(
                _join(key, field.name), "missing", remedy=f"set it to {describe(hints[field.name])}"
            )
    return cls(**given)


def describe(hint: Any) -> str:
    """Return a description of the values of a type, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if is_dataclass(hint):
        return f"a mapping with the keys {', '.join(_names(hint))}"
    if origin is tuple:
        return f"a list of {len(args)} values ({', '.join(describe(a) for a in args)})"
    if origin in (list, Sequence):
        return f"a list ({describe(args[0])} each)"
    if origin is Mapping:
        return "a mapping"
    words = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    return words.get(hint, str(hint))


def bind_value(hint: Any, value: Any, key: str) -> Any:
    """Return ``value`` as the type ``hint`` has it.

    Raises:
        ConfigError: the value is of a different type.
        TypeError: no configuration can hold a value of this type.
    """
    return _value(hint, value, key)


def _value(hint: Any, value: Any, key: str) -> Any:
    origin = get_origin(hint)
    _check_plain(value, key)
    if isinstance(value, str) and value == UNSET:
        raise ConfigError(key, "missing", remedy=f"set it to {describe(hint)}")
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return bind(hint, value, key)
    if origin in (Union, types.UnionType):
        return _union(hint, value, key)
    if origin is Literal:
        return _literal(hint, value, key)
    if origin in (tuple, list, Sequence):
        return _sequence(hint, value, key)
    if origin is Mapping:
        return _mapping(hint, value, key)
    return _scalar(hint, value, key)


def _check_plain(value: Any, key: str) -> None:
    """Raise ``ConfigError`` for text that no file holds and integers that no tensor holds.

    The check covers every depth of a value.
    """
    if isinstance(value, str) and not _is_text(value):
        why = "a NUL, or half of a surrogate pair, is no character of a path or a prompt"
        raise ConfigError(
            key, f"{value!r:.100} is not text", why=why, remedy="write it in UTF-8, without NUL"
        )
    if isinstance(value, int) and not -INT64 <= value < INT64:
        raise ConfigError(
            key,
            "expected an integer of 64 bits",
            why=f"it has {value.bit_length()}",
            remedy="give a smaller one",
        )
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not isinstance(name, str | int) or isinstance(name, bool) or not _is_text(str(name)):
                raise ConfigError(
                    key, f"expected text as a key, got {name!r:.100}", remedy="put it into quotes"
                )
            _check_plain(part, _join(key, str(name)))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check_plain(part, f"{key}[{index}]")


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # A bool is an int in Python, but `steps: true` is a mistake.
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(key, value, describe(hint))
    return value


def _literal(hint: Any, value: Any, key: str) -> Any:
    known = get_args(hint)
    # YAML reads off as false.
    if value is False and "off" in known:
        return "off"
    if value not in known:
        raise ConfigError(
            key,
            f"expected {describe(hint)}, got {value!r}",
            remedy=near_matches(str(value), [str(k) for k in known], listed=True),
        )
    return value


def _union(hint: Any, value: Any, key: str) -> Any:
    members = get_args(hint)
    if value is None and type(None) in members:
        return None
    rest = [m for m in members if m is not type(None)]
    if len(rest) == 1:
        return _value(rest[0], value, key)
    for member in rest:
        try:
            return _value(member, value, key)
        except ConfigError:
            continue  # the next member may accept the value; if none does, the error names them all
    raise _wrong_type(key, value, describe(hint))


def _sequence(hint: Any, value: Any, key: str) -> Any:
    args = get_args(hint)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong_type(key, value, describe(hint))
    if get_origin(hint) is not tuple:
        return [_value(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if len(value) != len(args):
        raise _wrong_type(key, value, describe(hint))
    return tuple(
        _value(a, item, f"{key}[{i}]") for i, (a, item) in enumerate(zip(args, value, strict=True))
    )


def _mapping(hint: Any, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong_type(key, value, describe(hint))
    if len({str(name) for name in value}) < len(value):
        raise ConfigError(
            key,
            "two keys that are equal as text",
            why=", ".join(map(repr, value))[:200],
            remedy="remove one",
        )
    return {str(k): _value(get_args(hint)[1], v, _join(key, str(k))) for k, v in value.items()}


def _check_keys(cls: type, data: Mapping[Any, Any], key: str) -> None:
    known = _names(cls)
    for name in data:
        if name not in known:
            if not isinstance(name, str):
                raise ConfigError(
                    key or cls.__name__,
                    f"expected text as a key, got {name!r:.100}",
                    remedy="put it into quotes",
                )
            raise ConfigError(
                _join(key, name) or "the empty key",
                "unknown key",
                remedy=_find_below(cls, key, name) or near_matches(str(name), known),
            )


def _find_below(cls: type, key: str, name: str) -> str:
    """Return a remedy for a name that belongs into a section of ``cls``.

    ``key`` is the one of ``cls``. It is nothing where no section, or more than one, has the name.
    """
    hints = get_type_hints(cls)
    found = [
        field.name
        for field in fields(cls)
        for one in (hints[field.name], *get_args(hints[field.name]))
        if isinstance(one, type) and is_dataclass(one) and name in _names(one)
    ]
    if len(found) != 1:
        return ""
    return f"did you mean {_join(_join(key, found[0]), name)}?"


def _names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _wrong_type(key: str, value: Any, expected: str) -> ConfigError:
    remedy = "correct the value"
    # YAML reads {prompt} as a mapping.
    if isinstance(value, Mapping) and expected.startswith("text"):
        remedy += (
            """; a text that begins with a brace goes into quotes, on a command line '"{prompt}"'"""
        )
    got = _describe_value(masked(value, key.rpartition(".")[2]))
    return ConfigError(key, f"expected {expected}, got {got}", remedy=remedy)


def _describe_value(value: Any) -> str:
    """Return the YAML type of a value, and the value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    names = {int: "the integer", float: "the number", str: "the text"}
    name = names.get(type(value), "the list" if isinstance(value, Sequence) else "the mapping")
    return f"{name} {value!r:.200}"
