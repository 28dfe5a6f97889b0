"""The three commands at a terminal: their version, and a reader of their output that ends early."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from waiting import DEADLINE_S

from engine_api.plugin import CONTRACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("engine_api", "list"),
        ("engine_api", "doctor"),
        ("engine_api", "--help"),
        ("engine_conformance", "list"),
        ("engine_conformance", "explain", "plugin.light"),
        ("engine_trainer", "recipes"),
        ("engine_trainer", "--help"),
    ],
    ids=" ".join,
)
def test_a_reader_that_ends_early_gets_the_status_of_a_shell_and_no_traceback(
    arguments: tuple[str, ...],
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine_api", "engine-api"),
        ("engine_conformance", "engine-conformance"),
        ("engine_trainer", "engine-train"),
    ],
)
def test_a_command_names_its_version_and_contract(module: str, name: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    package = name.replace("engine-train", "engine-trainer")
    assert said.stdout.startswith(f"{name} {version(package)} (contract {CONTRACT}, ")
