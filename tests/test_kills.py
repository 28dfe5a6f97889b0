"""Runs that are killed at random moments and started again end like unbroken runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from layout import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_four_kills_leave_no_process_and_change_no_bit(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/kills.py",
        "--count",
        "4",
        "--lanes",
        "2",
        "--tasks",
        "sft",
        "rl",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (total,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"]]
    runs, equal, _, kills = map(int, total[1:5])
    assert runs == equal > 0
    assert kills >= 4
