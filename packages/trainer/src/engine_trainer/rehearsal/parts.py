"""The parts of a rehearsal that train: processes that are started, killed and continued."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine_api.errors import EngineError
from engine_trainer.rehearsal.plan import STEPS, Plan
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.telemetry.logs import METRICS, read_metrics

FILE = "rehearsal.yaml"
SWITCHED = "switched.yaml"
TAIL = 12
"""Number of lines of a failed part's output that are shown."""
_LOOK_S = 0.05
Figures = dict[str, float]


class PartFailed(EngineError):
    """A part of the rehearsal that ended as the real run would end."""


def train_until_killed(plan: Plan, folder: Path) -> str:
    """Train until the first checkpoint is complete, and kill all processes.

    Returns a line about it. Raises ``PartFailed`` where the run ends by itself before.
    """
    checkpoints = Checkpoints(folder / "run" / "checkpoints", keep=0)
    started = _start(plan, folder, "first", FILE, plan.ranks)
    try:
        killed = _wait(started, lambda: bool(checkpoints.steps()))
    finally:
        _kill(started)
    if not killed:
        _require_success(started.returncode, folder, "first")
        return f"step {STEPS} was complete before the processes could be killed"
    newest = max(checkpoints.steps())
    return f"killed by SIGKILL with the checkpoint of step {newest}"


def resume(plan: Plan, folder: Path) -> tuple[str, Figures]:
    """Continue with the same command to the last step, and return the figures of all steps."""
    before = max(Checkpoints(folder / "run" / "checkpoints", keep=0).steps())
    _run(plan, folder, "second", FILE, plan.ranks)
    figures = _read_figures(folder, STEPS)
    return f"continued after step {before} to step {STEPS}", figures


def switch(plan: Plan, folder: Path) -> str:
    """Continue for a step with another engine, or on another number of ranks."""
    plan.write_switched(folder / SWITCHED)
    _run(plan, folder, "third", SWITCHED, plan.ranks_after)
    _read_figures(folder, STEPS + 1)
    return (
        f"{plan.other} on {_ranks(plan.ranks_after)} continued from the checkpoint of "
        f"{plan.backend} on {_ranks(plan.ranks)}"
    )


def command_of(plan: Plan, file: Path, ranks: int) -> list[str]:
    """Return the arguments of ``engine-train`` for a part."""
    count = [] if plan.on_ray or ranks == 1 else ["--ranks", str(ranks)]
    return [plan.task, str(file), *count]


def _run(plan: Plan, folder: Path, name: str, file: str, ranks: int) -> None:
    started = _start(plan, folder, name, file, ranks)
    try:
        started.wait()
    finally:
        _kill(started)
    _require_success(started.returncode, folder, name)


def _start(plan: Plan, folder: Path, name: str, file: str, ranks: int) -> subprocess.Popen[bytes]:
    with _log(folder, name).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "engine_trainer", *command_of(plan, folder / file, ranks)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # One group for the launcher and its ranks, which one signal ends.
            start_new_session=True,
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _wait(started: subprocess.Popen[bytes], is_due: Callable[[], bool]) -> bool:
    """Wait until ``is_due``, and return False where the process ends before."""
    while started.poll() is None:
        if is_due():
            return True
        time.sleep(_LOOK_S)
    return False


def _kill(started: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, of which some may be left after its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def _require_success(status: int | None, folder: Path, name: str) -> None:
    if status == 0:
        return
    output = _log(folder, name).read_text(encoding="utf-8", errors="replace").splitlines()
    begin = next((i for i, line in enumerate(output) if "error: " in line), -TAIL)
    shown = output[begin:][:TAIL]
    raise PartFailed(
        f"the run ended with status {status}",
        where=str(_log(folder, name)),
        why="\n".join(["it said:", *shown]),
        remedy="correct it as the message says: the real run would end here too",
    )


def _read_figures(folder: Path, step: int) -> Figures:
    """Return the last figure of each name up to ``step``. Raises ``PartFailed`` for a NaN."""
    found: Figures = {}
    for row in read_metrics(folder / "run" / METRICS):
        found |= row
    if found.get("step") != step:
        raise PartFailed(
            f"expected figures up to step {step}, got {found.get('step', 0):g}",
            where=str(folder / "run" / METRICS),
            remedy="see the logs of the parts beside it",
        )
    lost = [name for name, value in found.items() if not math.isfinite(value)]
    if lost:
        raise PartFailed(
            f"{', '.join(lost)}: not finite",
            where=str(folder / "run" / METRICS),
            why="the model is small and its weights are drawn, so that the cause is in the "
            "configuration, the data or the reward",
            remedy="see the learning rate, the precision and the reward",
        )
    return found


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
