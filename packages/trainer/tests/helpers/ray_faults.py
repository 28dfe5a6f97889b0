"""A reward and planned faults, which the tests' workers import (``ray.imports``).

``RAY_FAULTS`` is a file with a JSON list of ``{"worker", "method", "nth", "when", "do"}``. The
fault occurs at the nth call of the method by that worker (counted in each process), before or after
its work. It is ``kill`` (this process), ``hang``, or a process id to kill.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from engine_trainer.placement.ray.actor import Worker
from engine_trainer.placement.ray.channel import Channel, WholeWire
from engine_trainer.placement.ray.partial_rollouts import PartialRollouts
from engine_trainer.placement.ray.streams import StreamWire
from engine_trainer.placement.replica import Replica
from engine_trainer.placement.spmd import SpmdEngines, SpmdRollouts
from engine_trainer.rewards import register


@register("sevens")
def sevens():
    return lambda sample: sample.completion.count("7") / 4


@register("deadly")
def deadly():
    return lambda sample: os.kill(os.getpid(), signal.SIGKILL)


@register("broken")
def broken():
    return lambda sample: {}["key"]


PLAN = Path(os.environ.get("RAY_FAULTS", "/nonexistent"))
_counts: dict[str, int] = {}


def _worker() -> str:
    """The name of the worker that imports this."""
    frame = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Worker):
        frame = frame.f_back
    return frame.f_locals["self"].name if frame is not None else ""


NAME = _worker()


def _strike(method: str, when: str) -> None:
    fault = _taken((NAME, method, _counts[method], when))
    if fault is None:
        return
    if fault["do"] == "hang":
        time.sleep(10_000)
    os.kill(os.getpid() if fault["do"] == "kill" else fault["do"], signal.SIGKILL)


def _taken(place: tuple[str, str, int, str]) -> dict | None:
    """Return the fault of this place, and remove it from the plan, so that it occurs only once."""
    if not PLAN.is_file():
        return None
    with PLAN.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers may be struck at the same time
        plan = json.loads(PLAN.read_text())
        found = [f for f in plan if (f["worker"], f["method"], f["nth"], f["when"]) == place]
        if found:
            PLAN.write_text(json.dumps([f for f in plan if f not in found]))
    return found[0] if found else None


def _with_faults(method, work):
    def wrapped(*arguments, **named):
        _counts[method] = _counts.get(method, 0) + 1
        _strike(method, "before")
        value = work(*arguments, **named)
        _strike(method, "after")
        return value

    return wrapped


# Below the actors: Ray has taken their methods before this is imported.
PHASES = {
    "load": (SpmdEngines, "load_checkpoint"),
    "save": (SpmdEngines, "save_checkpoint"),
    "infer": (SpmdEngines, "infer"),
    "train": (SpmdEngines, "train"),
    "sync": (SpmdRollouts, "sync"),
    "generate_and_score": (Replica, "generate_and_score"),
    "send": (Channel, "send"),
    "receive": (WholeWire, "receive"),
    "connect": (StreamWire, "receive"),
    "write": (StreamWire, "_write"),
    "read": (StreamWire, "_read"),
    "advance": (PartialRollouts, "advance"),
}
if NAME:
    for _method, (_cls, _name) in PHASES.items():
        setattr(_cls, _name, _with_faults(_method, getattr(_cls, _name)))
