"""The benchmarks, most of which run on GPUs alone, can be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from layout import ROOT

MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.slow
def test_every_benchmark_is_imported_with_the_packages_of_today() -> None:
    lines = "".join(f"import benchmarks.{name}\n" for name in MODULES if name != "__init__")
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
