"""Messages between a rollout's server and its clients, as JSON.

Nothing that comes over HTTP is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast

from engine_api import errors
from engine_api.codec import CodecError, decode, encode
from engine_api.errors import EngineError, RolloutError
from engine_api.rollout import Completion, PromptImages, SamplingParams, SyncResult

# Environment variable that holds a server's ``--config``, which may hold secrets.
CONFIG = "ROLLOUT_FP8_CONFIG"
T = TypeVar("T", Completion, SamplingParams, SyncResult)


def dumps(value: Any) -> bytes:
    """Return a value as JSON, from which floats are read back exactly."""
    return json.dumps(value, default=str).encode()


def to_json(value: Completion | SamplingParams | SyncResult) -> dict[str, Any]:
    """Return a dataclass of the contract as a mapping, without the fields that are None."""
    return {name: part for name, part in asdict(value).items() if part is not None}


def from_json(cls: type[T], given: Mapping[str, Any]) -> T:
    """Return the dataclass of ``to_json``, or raise ``RolloutError`` for wrong fields."""
    tuples = {field.name for field in fields(cls) if str(field.type).startswith("tuple")}
    values: dict[str, Any] = {
        name: tuple(value) if name in tuples else value for name, value in given.items()
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise RolloutError(
            f"expected the fields of {cls.__name__}: {error}",
            where="server",
            remedy="see engine_api.rollout",
        ) from error


def images_to_json(images: Sequence[PromptImages | None] | None) -> str | None:
    """Return the images of prompts as text: base64 of ``engine_api.codec``."""
    return None if images is None else base64.b64encode(encode(list(images))).decode("ascii")


def images_from_json(given: str | None) -> list[PromptImages | None] | None:
    """Return the images of ``images_to_json``, or raise ``RolloutError`` for anything else."""
    if given is None:
        return None
    why = ""
    try:
        found: object = decode(base64.b64decode(given, validate=True))
    except (binascii.Error, TypeError, ValueError, CodecError) as error:
        found = None
        why = f"{type(error).__name__}: {error}"
    rows = cast("list[object]", found) if isinstance(found, list) else [found]
    if not all(row is None or isinstance(row, PromptImages) for row in rows) or found is None:
        raise RolloutError(
            "expected the images of prompts as base64 of a list of PromptImages or None",
            where="server",
            why=why,
            remedy="see rollout_fp8.remote.messages",
        )
    return cast("list[PromptImages | None]", rows)


def error_to_json(error: Exception) -> dict[str, Any]:
    """Return an error's class in ``engine_api.errors``, and its fields.

    Any other error is given as a ``RolloutError``.
    """
    if not isinstance(error, EngineError):
        error = RolloutError(
            "the rollout failed",
            where="server",
            why=f"{type(error).__name__}: {error}",
            remedy="the server's log has the traceback",
        )
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return {"class": known.__name__, **error.__dict__}


def error_from_json(given: Mapping[str, Any]) -> EngineError:
    """Return the error of ``error_to_json``, in its own class."""
    cls = getattr(errors, str(given.get("class")), None)
    if not isinstance(cls, type) or not issubclass(cls, EngineError):
        return RolloutError("the response is not that of a rollout's server", why=str(given))
    parts = {name: str(given.get(name, "")) for name in ("what", "where", "why", "remedy")}
    error = cls.__new__(cls, *parts.values())
    error.args = tuple(parts.values())
    error.__dict__.update(
        {name: value for name, value in given.items() if name != "class"}, **parts
    )
    return error
