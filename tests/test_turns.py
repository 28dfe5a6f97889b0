"""Tests of the plugin that runs a part of the tests marked ``slow``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = 3
TESTS = """
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_of_many(number):
    pass


def test_alone():
    pass
"""


def collect(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tools.turns", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-q", "-W", "ignore", *arguments, "-c", "/dev/null", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_each_test_has_one_turn_and_the_others_run_in_all(tmp_path: Path) -> None:
    file = tmp_path / "test_many.py"
    file.write_text(TESTS)

    def names(*arguments: str) -> list[str]:
        said = collect(file, *arguments).stdout
        return [line.partition("::")[2] for line in said.splitlines() if "::" in line]

    parts = [names("--turn", f"{number}/{PARTS}") for number in range(1, PARTS + 1)]
    assert all("test_alone" in part for part in parts)
    many = [name for part in parts for name in part if name != "test_alone"]
    assert sorted(many) == sorted(names()[:-1])
    assert len(set(many)) == 9


def test_a_turn_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = collect(tmp_path, "--turn", "4/3")
    assert done.returncode == 4
    assert "expected N/M with N from 1 to M, got 4/3" in done.stderr
