"""Tests on vLLM itself, left out where it is not installed.

They run in ranks of the conformance suite's pools, as a trainer's rollouts do, not in pytest's own
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_fp8 import versions

LINE = versions.tested("vllm", os.environ.get("ROLLOUT_TEST_DEVICE", "cpu"))
assert LINE is not None
if versions.installed(LINE) is None:
    collect_ignore_glob = ["test_*.py"]
# `vllm_peers` is imported here and in the ranks, which take over the path.
sys.path.insert(0, str(Path(__file__).parent))
# `zoo`, whose rule judges results in bf16.
sys.path.append(str(Path(__file__).parents[4] / "tools"))


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    """Start ranks that know this folder, and none that were started before."""
    from engine_conformance.ranks import close_pools

    close_pools()
    yield
    close_pools()


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which models are written."""
    return tmp_path_factory.mktemp("vllm")
