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

# Ranks import their functions from here, and tests their helpers.
sys.path.append(str(Path(__file__).parent))

# Megatron-core is an extra, and may not be installed.
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]

if not collect_ignore_glob:
    # It is imported once, while CUDA is simulated. It warns about libraries that are not installed.
    with shimmed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import engine_megatron.engine  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _cuda() -> Iterator[None]:
    with shimmed():
        yield


@pytest.fixture(scope="module")
def pool(_cuda: None) -> Iterator[RankPool]:
    """Yield a pool of two ranks."""
    with RankPool(2, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one(_cuda: None) -> Iterator[RankPool]:
    """Yield a pool of one rank."""
    with RankPool(1, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings: Megatron warns at every step, about itself and gradients of views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
