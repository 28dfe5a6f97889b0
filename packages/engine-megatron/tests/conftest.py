"""CUDA simulated on the CPU for this package's tests."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_conformance.ranks import RankPool
from engine_conformance.shim import shimmed

sys.path.append(str(Path(__file__).parent))  # ranks import their functions from here

collect_ignore_glob = (
    [] if importlib.util.find_spec("megatron") else ["test_*.py"]
)  # an extra that is not installed

if not collect_ignore_glob:
    # Imported once, while CUDA is simulated. Its warnings are about libraries that are not here.
    with shimmed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import engine_megatron.engine  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _cuda() -> Iterator[None]:
    with shimmed():
        yield


@pytest.fixture(scope="module")
def pool(_cuda: None) -> Iterator[RankPool]:
    """Two ranks."""
    with RankPool(2, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one(_cuda: None) -> Iterator[RankPool]:
    """One rank alone."""
    with RankPool(1, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Megatron warns at every step: about itself, and about gradients of views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
