"""The results of a mutation campaign as tables, and the record of them in the tree.

``conformance/mutants/campaign.json`` has the counts and the survivors of the last recorded campaign
on each engine. ``conformance/mutants/triage.json`` is written by hand: a class and a reason for
each survivor. ``conformance/mutants/edits.json`` has the same of the changes that were written by
hand, whose file states class and reason.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from campaign_edits import Edit
from matrix import ROOT, table
from mutate import OPERATORS

__all__ = ["CLASSES", "KILLED", "record", "record_edits", "render", "stale", "summary", "triaged"]

CAMPAIGN = ROOT / "conformance" / "mutants" / "campaign.json"
TRIAGE = ROOT / "conformance" / "mutants" / "triage.json"
EDITS = ROOT / "conformance" / "mutants" / "edits.json"
KILLED = ("killed", "timeout", "crash")
CLASSES: Mapping[str, str] = {
    "equivalent": "no engine that fulfils the contract can be told from it by its results",
    "elsewhere": "what it breaks is no part of the contract, and is tested elsewhere or not at all",
    "setting": "it shows where the campaign does not run: on an accelerator, on four ranks, in a "
    "case that a whole run repeats in another layout, or in another engine of the same package",
    "gap": "the contract says nothing about it, and should",
    "hole": "it breaks the contract, and no case fails",
}
# Survivors of these classes break nothing that the campaign's stages could show.
_EXCUSED = ("equivalent", "elsewhere", "setting")
_KEY = ("file", "function", "operator", "before", "after")
_COUNTS: tuple[str, ...] = (
    "changes",
    "not executed",
    "invalid",
    "not decided",
    "killed by quick",
    "killed by full",
    "timeout or crash",
    "survived",
)
_SHOWN = 100
INTRODUCTION = """\
## Campaign

The mutants above measure the defects that someone thought of. The campaign changes an engine's
source by machine, at one place at a time, and runs the cases that execute the place until one
fails. `nox -s campaign -- --engine fsdp2 --budget 3600 --seed 7` runs it, `--only ID` runs one
change alone, and `--record` writes this section's numbers. An operator's changes are taken in a
seeded order, and each operator has its share of every prefix of it.

A rate is the share of the changed engines that some case fails. It leaves out changes that cannot
be imported, changes of lines that no case executes (on a CPU), and survivors that are equivalent. A
changed engine on which a case ends as *suite-error*, and none fails, counts as a survivor.
"""


INTRODUCTION_OF_EDITS = """\
## Edits by hand

These changes of an engine were written by someone who had read the contract and looked for
plausible defects, not for what the cases look at (`conformance/mutants/edits`). `nox -s campaign --
--engine fsdp2 --edits conformance/mutants/edits/fsdp2.toml` runs them. A rate is the share of the
changed engines that some case fails, without survivors that are equivalent.
"""


def summary(rows: Sequence[Mapping[str, Any]], stages: Sequence[object]) -> str:
    """Return the tables of a campaign by operator and by file."""
    names = list(map(str, stages))
    parts = []
    for name in ("operator", "file"):
        counts = {key: _counts(rows, names, name, key) for key in _keys(rows, name)}
        parts.append(_table(name, counts, {}, full=_is_full(names)))
    return "\n".join(parts)


def _keys(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    found = {row[name] for row in rows}
    if name != "operator":
        return sorted(found)
    # Changes that were written by hand have groups of their own.
    return [key for key in OPERATORS if key in found] + sorted(found - OPERATORS.keys())


def _counts(
    rows: Sequence[Mapping[str, Any]], stages: Sequence[str], name: str, key: str
) -> dict[str, int]:
    counts = dict.fromkeys(_COUNTS, 0)
    for row in rows:
        if row[name] == key:
            counts["changes"] += 1
            for column in _columns(row, stages):
                counts[column] += 1
    return counts


def _columns(row: Mapping[str, Any], stages: Sequence[str]) -> list[str]:
    """Return the columns in which a changed engine counts."""
    verdict = row["verdict"]
    if verdict in KILLED:
        how = ["timeout or crash"] if verdict != "killed" else []
        return [f"killed by {row['tier']}", *how]
    if verdict == "invalid":
        return ["invalid"]
    if not set(stages) <= set(row["passed"]):
        return ["not decided"]
    return ["not executed" if verdict == "not-executed" else "survived"]


def _is_full(stages: Sequence[str]) -> bool:
    """Return whether the full tier ran."""
    return any(stage.startswith("full") for stage in stages)


def _table(
    name: str,
    counts: Mapping[str, Mapping[str, int]],
    equivalent: Mapping[str, int],
    *,
    full: bool,
) -> str:
    total = {column: sum(one[column] for one in counts.values()) for column in _COUNTS}
    equal = sum(equivalent.values())
    rows = [_line(key, one, equivalent.get(key, 0), full=full) for key, one in counts.items()]
    head = (name, *_COUNTS, "equivalent", "rate, quick", "rate, full")
    return table(head, [*rows, _line("all", total, equal, full=full)])


def _line(key: str, counts: Mapping[str, int], equivalent: int, *, full: bool) -> tuple[str, ...]:
    quick = counts["killed by quick"]
    killed = quick + counts["killed by full"]
    of = killed + counts["survived"] - equivalent
    numbers = (str(counts[column]) for column in _COUNTS)
    rates = [f"{100 * some / of:.0f} %" if of else "-" for some in (quick, killed)]
    return (key, *numbers, str(equivalent), rates[0], rates[1] if full else "-")


# --- the record -----------------------------------------------------------------------------------


def record(
    engine: str, rows: Sequence[Mapping[str, Any]], *, seed: int, stages: Sequence[str]
) -> None:
    """Write an engine's results into ``campaign.json``."""
    recorded: dict[str, Any] = json.loads(CAMPAIGN.read_text()) if CAMPAIGN.exists() else {}
    survivors = [row for row in rows if _columns(row, stages) == ["survived"]]
    recorded[engine] = {
        "seed": seed,
        "commit": _commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "stages": list(stages),
        "operators": {
            key: _counts(rows, stages, "operator", key) for key in _keys(rows, "operator")
        },
        "survivors": [{name: row[name] for name in _KEY} for row in survivors],
    }
    CAMPAIGN.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


def record_edits(
    engine: str, rows: Sequence[Mapping[str, Any]], edits: Sequence[Edit], *, stages: Sequence[str]
) -> None:
    """Write the results of an engine's edits into ``edits.json``.

    Raises:
        ValueError: if the reason that an edit states for its survival has an unknown class.
    """
    recorded: dict[str, Any] = json.loads(EDITS.read_text()) if EDITS.exists() else {}
    names = {row["id"].partition(":")[2] for row in rows if _survives(row)}
    recorded[engine] = {
        "commit": _commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "stages": list(stages),
        "groups": {key: _counts(rows, stages, "operator", key) for key in _keys(rows, "operator")},
        "survivors": [
            {"name": one.name, "group": one.group, "defect": one.defect, "clause": one.clause}
            | dict(zip(("class", "why"), _reason(one), strict=True))
            for one in edits
            if one.name in names
        ],
    }
    EDITS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


def _survives(row: Mapping[str, Any]) -> bool:
    return row["verdict"] not in (*KILLED, "invalid")


def _reason(edit: Edit) -> tuple[str, str]:
    """Return the class and the reason that an edit states for its survival."""
    if not edit.why:
        return "not looked at", ""
    kind, _, why = edit.why.partition(":")
    if kind not in CLASSES or not why.strip():
        raise ValueError(
            f"edit {edit.name}: expected a class of {', '.join(CLASSES)}, a colon and a reason, "
            f"got {edit.why!r}"
        )
    return kind, why.strip()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(
        [*command, "--exclude", "*"], capture_output=True, text=True, check=True
    ).stdout.strip()


def triaged(path: Path = TRIAGE) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Return the class and the reason of each survivor that someone has looked at.

    Raises:
        ValueError: if an entry has an unknown class or no reason.
    """
    found: dict[tuple[str, ...], Mapping[str, str]] = {}
    for entry in json.loads(path.read_text()) if path.exists() else ():
        if entry["class"] not in CLASSES or not entry["why"].strip():
            raise ValueError(
                f"{path.name}: {entry['file']}, {entry['before']!r}: expected a class of "
                f"{', '.join(CLASSES)} and a reason, got {entry['class']!r} and {entry['why']!r}"
            )
        found[tuple(entry[name] for name in _KEY)] = entry
    return found


def stale() -> list[str]:
    """Return a line for each entry of ``triage.json`` that is about no recorded survivor."""
    recorded: dict[str, Any] = json.loads(CAMPAIGN.read_text()) if CAMPAIGN.exists() else {}
    survivors = {_key(one) for campaign in recorded.values() for one in campaign["survivors"]}
    return [f"{key[0]}, {key[1]}: {key[3]}" for key in triaged() if key not in survivors]


def _key(survivor: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(survivor[name] for name in _KEY)


def render() -> str:
    """Return the sections of docs/mutants.md, or "" without a recorded campaign."""
    recorded: dict[str, Any] = json.loads(CAMPAIGN.read_text()) if CAMPAIGN.exists() else {}
    parts = list[str]()
    if recorded:
        operators = [(f"`{name}`", text) for name, text in OPERATORS.items()]
        parts += [INTRODUCTION, table(("operator", "change"), operators)]
        parts += [_section(engine, one) for engine, one in recorded.items()]
    edited: dict[str, Any] = json.loads(EDITS.read_text()) if EDITS.exists() else {}
    if edited:
        parts += [INTRODUCTION_OF_EDITS]
        parts += [_section_of_edits(engine, one) for engine, one in edited.items()]
    return "\n".join(parts)


def _section_of_edits(engine: str, campaign: Mapping[str, Any]) -> str:
    equivalent: dict[str, int] = {}
    rows: list[tuple[str, ...]] = []
    for one in campaign["survivors"]:
        if one["class"] == "equivalent":
            equivalent[one["group"]] = equivalent.get(one["group"], 0) + 1
        clause = f"[{one['clause']}](contract.md#{one['clause']})"
        rows.append((f"`{one['name']}`", _cell(one["defect"]), clause, one["class"], one["why"]))
    about = (
        f"Commit `{campaign['commit']}`, {campaign['date']}; "
        f"stages: {'; '.join(campaign['stages'])}."
    )
    counts = _table("group", campaign["groups"], equivalent, full=_is_full(campaign["stages"]))
    head = ("edit", "defect", "clause", "class", "why")
    return f"### Edits of {engine}\n\n{about}\n\n{counts}\nSurvivors:\n\n{table(head, rows)}"


def _section(engine: str, campaign: Mapping[str, Any]) -> str:
    known = triaged()
    equivalent: dict[str, int] = {}
    rows: list[tuple[str, ...]] = []
    for one in campaign["survivors"]:
        entry = known.get(_key(one), {"class": "not looked at", "why": ""})
        if entry["class"] == "equivalent":
            equivalent[one["operator"]] = equivalent.get(one["operator"], 0) + 1
        place = f"{one['file']}, `{one['function'] or 'module'}`"
        change = f"{_code(one['before'])} → {_code(one['after'])}"
        rows.append((place, one["operator"], change, entry["class"], _cell(entry["why"])))
    about = (
        f"Seed {campaign['seed']}, commit `{campaign['commit']}`, {campaign['date']}; "
        f"stages: {'; '.join(campaign['stages'])}."
    )
    full = _is_full(campaign["stages"])
    counts = _table("operator", campaign["operators"], equivalent, full=full)
    if not full:
        rest = "The full tier has not run: which of the survivors it kills is not known.\n"
        return f"### {engine}\n\n{about}\n\n{counts}\n{rest}"
    head = ("place", "operator", "change", "class", "why")
    legend = "".join(f"- *{name}*: {text}.\n" for name, text in CLASSES.items())
    of_class = Counter(row[3] for row in rows)
    totals = campaign["operators"].values()
    killed = sum(one[f"killed by {tier}"] for one in totals for tier in ("quick", "full"))
    shares = _describe(killed, of_class)
    return (
        f"### {engine}\n\n{about}\n\n{counts}\n{shares}\n\nSurvivors:\n\n{legend}\n"
        f"{table(head, sorted(rows))}"
    )


def _describe(killed: int, of_class: Mapping[str, int]) -> str:
    """Return how many survivors are of each class, and the rate for what these stages can show."""
    named = [f"{count} *{name}*" for name, count in sorted(of_class.items())]
    escaped = sum(count for name, count in of_class.items() if name not in _EXCUSED)
    return (
        f"The survivors are {', '.join(named) or 'none'}. Of the {killed + escaped} changes that "
        f"break what the contract says or should say, and that show in these stages, the cases "
        f"kill {killed / max(1, killed + escaped):.0%}."
    )


def _code(text: str) -> str:
    short = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    return f"`{_cell(short.replace('`', chr(39)))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
