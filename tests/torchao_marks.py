"""The marks of tests of FP8 with torchao, which a session of its own has: ``nox -s float8``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from engine_torch.versions import has_torchao

Test = TypeVar("Test", bound=Callable[..., Any])

NEEDS_TORCHAO = (
    pytest.mark.slow,
    pytest.mark.skipif(not has_torchao(), reason="torchao is not installed"),
)


def needs_torchao(test: Test) -> Test:
    """Mark a test that is skipped without torchao, and that CI runs in its turn."""
    for mark in NEEDS_TORCHAO:
        mark(test)
    return test
