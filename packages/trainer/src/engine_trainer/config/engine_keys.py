"""The keys of an engine in errors, as the configuration file has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError

POLICY = "engine"
"""Key of the policy's engine."""

# Keys that an engine may name. The first three are arguments of the registry.
_NAMES = {"backend", "device", "model_type", *(one.name for one in fields(EngineConfig))}


@contextmanager
def named_below(key: str) -> Iterator[None]:
    """Name the keys of an engine in errors below ``key``, its section in the configuration.

    An engine names them as ``EngineConfig`` does, and code that knows only the policy names them
    below ``engine``. Errors of other keys are raised as they are.
    """
    try:
        yield
    except ConfigError as error:
        name = error.field.removeprefix(f"{POLICY}.")
        found = f"{key}.{name}"
        if name.partition(".")[0] not in _NAMES or found == error.field:
            raise
        # A copy keeps the mark that every rank raises the error (`heartbeat.mark_as_agreed`).
        renamed = copy.copy(error)
        ConfigError.__init__(renamed, found, error.what, why=error.why, remedy=error.remedy)
        raise renamed from error
