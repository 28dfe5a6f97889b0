"""The rows for NPUs, on the simulated device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.distributed
@pytest.mark.slow
def test_they_compute_what_the_oracle_does_on_the_simulated_device() -> None:
    cases = "forward.qwen3,train.policy"
    arguments = ("veomni", "--device", "npu", "--shim", "--world", "2", "--case", cases)
    done = subprocess.run(
        [sys.executable, "-m", "engine_conformance", "run", *arguments, "--patience", "10"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("passed ")]
    assert len([line for line in rows if "language_model, simulated, world 2" in line]) == 2
