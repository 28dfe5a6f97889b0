"""Functions that run what a test starts on one rank or more, and return what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from waiting import DEADLINE_S


def run_on_ranks(ranks: int, *arguments: str) -> str:
    """Run ``python ARGUMENTS``, under torchrun if there is more than one rank.

    A run that ends with another code than 0 fails the test with what it printed.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def run_on_two_ranks(folder: Path, commands: list[list[str]], *, before: str = "") -> str:
    """Run commands of ``engine-train`` one after another in the same two ranks.

    ``before`` is code that each rank runs first.
    """
    script = f"{before}import json, sys; from engine_trainer.cli import main\n"
    script += "sys.exit(any(main(argv) for argv in json.loads(sys.argv[1])))"
    (folder / "main.py").write_text(script)
    return run_on_ranks(2, str(folder / "main.py"), json.dumps(commands))
