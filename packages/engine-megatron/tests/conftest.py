"""CUDA simulated on the CPU for these tests, or with ``ENGINE_TEST_DEVICE=cuda`` a real one."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from tested_device import DEVICE

from engine_conformance.ranks import RankPool
from engine_conformance.shim import shimmed

# Ranks import their functions from here, and tests their helpers.
sys.path.append(str(Path(__file__).parent))


def with_cuda() -> AbstractContextManager[object]:
    """Return the context in which CUDA is simulated, unless the device is real."""
    return shimmed() if DEVICE == "cpu" else nullcontext()


# Megatron-core is an extra, and may not be installed.
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]

if not collect_ignore_glob:
    # It is imported once, while CUDA is simulated. It warns about libraries that are not installed.
    with with_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import engine_megatron.engine  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _cuda() -> Iterator[None]:
    with with_cuda():
        yield


@pytest.fixture(scope="module")
def pool(_cuda: None) -> Iterator[RankPool]:
    """Yield a pool of two ranks."""
    with RankPool(2, device=DEVICE, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one(_cuda: None) -> Iterator[RankPool]:
    """Yield a pool of one rank."""
    with RankPool(1, device=DEVICE, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings: Megatron warns at every step, about itself and gradients of views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
