"""A run made by hand, with a row of every status, for the tests of the reports."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_conformance.results import BAD, Outcome, Row, Setting, SuiteRun
from engine_conformance.verdict import ProfileVerdict, compute_verdicts

SUITE = {"version": "0.1.0", "contract": "1.0", "digest": "a" * 64}
LISTED = {
    "reason": "the router is bfloat16",
    "issue": "https://example.org/issues/12",
    "until": "2027-03-31",
}
WORLD_1 = Setting(model_type="language_model", device="cpu", world=1, dtype="float32")
WORLD_2 = replace(WORLD_1, world=2)
VALUE = replace(WORLD_1, model_type="value_model")


def row(case: str, status: Any = "passed", margin: float | None = None, **changes: Any) -> Row:
    told = (
        {"message": f"{case} went wrong: 2 instead of 1"}
        if status not in ("passed", "refused")
        else {}
    )
    outcome = Outcome(
        status=status,
        seconds=0.25,
        margin=margin,
        message=changes.pop("message", told.get("message", "")),
    )
    given: dict[str, Any] = {
        "must": f"{case} MUST hold.",
        "profile": "engine",
        "group": "core",
        "setting": WORLD_1,
        "outcome": outcome,
        "hints": "a sum where a mean was meant" if status in BAD else "",
        "repeat": f"engine-conformance run acme --case {case}"
        if told and status != "not-run"
        else "",
        "deviation": LISTED if status in ("deviation", "stale-deviation") else None,
    }
    return Row(case=case, **(given | changes))


GOOD = [
    row("plugin.light"),
    row("forward.logprobs", margin=0.02),
    row("forward.repeat", margin=0.0),
    row("train.steps", margin=0.4, setting=WORLD_2),
    row("lora.train", margin=0.97, group="lora"),
    row("refusal.fp8", "refused", group="undeclared"),
    row("value.outputs", margin=0.1, group="value-head", setting=VALUE),
    row("rl.ratio", margin=1e-6, profile="rl", group="rl"),
]
OTHERS = [
    row("train.norm", "failed", 82.0, setting=WORLD_2),
    row("export.names", "failed", math.inf),
    row("refusal.tp", "accepted-undeclared", group="undeclared"),
    row("train.moe", "deviation", 3.0),
    row("train.clip", "stale-deviation", 0.5),
    row(
        "parallel.four",
        "not-run",
        setting=replace(WORLD_1, world=4),
        message="needs 4 cpu devices, there are 2",
    ),
    row("faults.stall", "timeout", setting=WORLD_2),
    row(
        "memory.peak",
        "suite-error",
        message="Traceback (most recent call last):\n  here\nKeyError: 'x'",
    ),
    row("train.next", "failed", 9.0, provisional=True),
]


def made(
    rows: Sequence[Row] = (*GOOD, *OTHERS), **changes: Any
) -> tuple[SuiteRun, list[ProfileVerdict]]:
    selection = {
        "name": "acme",
        "device": "cpu",
        "worlds": [1, 2],
        "dtypes": ["float32"],
        "model_types": [],
        "profiles": [],
        "cases": [],
        "quick": False,
        "layout": {},
        "partner": None,
        "patience": 1.0,
        "plugin": None,
        "complete": True,
    } | changes.pop("selection", {})
    given: dict[str, Any] = {
        "name": "acme",
        "distribution": "acme-engine==2.1.0 (acme.plugin:PLUGIN)",
        "contract": "1.0",
        "declared": ["dp", "lora", "value-head"],
        "trace": ["cpu by acme-engine==2.1.0: accepted"],
        "command": ["run", "acme", "--world", "1,2", "--report", "my reports"],
        "certify": False,
        "environment": {
            "python": "3.11.9",
            "system": "Linux x86_64",
            "cpu": "Some CPU, 2 cores",
            "torch": "2.13.0",
            "transformers": "not installed",
            "engine-conformance": "0.1.0",
            "acme-engine": "2.1.0",
        },
        "suite": SUITE,
        "started": "2026-01-31T12:00:00+00:00",
        "seconds": 93.125,
    }
    run = SuiteRun(**(given | {"selection": selection, "rows": list(rows)} | changes))
    return run, compute_verdicts(run.rows, complete=selection["complete"], declared=run.declared)


def stored(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path
