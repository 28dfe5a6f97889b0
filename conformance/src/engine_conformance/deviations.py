"""Known deviations of an engine, listed in a ``conformance.toml`` in the engine's own repository.

Imports no torch.

::

    [[deviation]]
    case = "train.moe"                          # an id
    reason = "the router's gradient is float32 only in the next release"
    issue = "https://example.org/acme/issues/12"
    until = 2027-03-31                          # a date; past it the file is refused
    world = [2]                                 # optional: world, dtype, device, model_type

A deviation that still fails is reported as ``deviation`` and makes the verdict partial.
One that passes is ``stale-deviation``, a failure: the list must shrink as defects are
fixed.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_conformance.results import Outcome, Setting

__all__ = ["Deviation", "DeviationError", "read_deviations", "with_deviations"]

_NEEDED = ("case", "reason", "issue", "until")
_NARROWING: Mapping[str, type] = {"world": int, "dtype": str, "device": str, "model_type": str}


class DeviationError(ValueError):
    """A deviations file that cannot be used.

    The text says where and why.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """One entry of the file.

    ``only`` narrows it to some settings, by field of `Setting`.
    """

    case: str
    reason: str
    issue: str
    until: datetime.date
    only: Mapping[str, Sequence[Any]]

    def covers(self, case: str, setting: Setting) -> bool:
        """Return whether the entry is about this case in this setting."""
        return case == self.case and all(
            getattr(setting, name) in values for name, values in self.only.items()
        )

    @property
    def facts(self) -> dict[str, str]:
        """The fields that a report shows."""
        return {"reason": self.reason, "issue": self.issue, "until": self.until.isoformat()}


def read_deviations(
    path: Path, *, known: Iterable[str], today: datetime.date | None = None
) -> list[Deviation]:
    """Return the entries of ``path``.

    Args:
        path: a TOML file as above.
        known: ids of all cases; any other id is an error.
        today: the current date, for tests.

    Raises:
        DeviationError: if the file is unreadable or malformed, names an unknown case, lacks a
            reason or an issue, or has an entry past its date.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeviationError(f"{path}: {error}") from error
    entries = content.get("deviation", [])
    if set(content) - {"deviation"} or not isinstance(entries, list):
        raise DeviationError(
            f"{path}: holds {sorted(content)}; only [[deviation]] tables are known"
        )
    ids = set(known)
    now = today or datetime.datetime.now(tz=datetime.UTC).date()
    return [
        _entry(f"{path}: deviation {index}", entry, ids, now)
        for index, entry in enumerate(entries, start=1)
    ]


def _entry(where: str, entry: Any, known: set[str], today: datetime.date) -> Deviation:
    if not isinstance(entry, dict):
        raise DeviationError(f"{where}: expected a table, got {entry!r}")
    missing = [name for name in _NEEDED if not entry.get(name)]
    if missing:
        raise DeviationError(f"{where} ({entry.get('case', '?')}) lacks {', '.join(missing)}")
    if unknown := set(entry) - {*_NEEDED, *_NARROWING}:
        raise DeviationError(
            f"{where} has unknown keys {sorted(unknown)}; "
            f"known: {', '.join((*_NEEDED, *_NARROWING))}"
        )
    texts = {name: entry[name] for name in _NEEDED[:3]}
    until = entry["until"]
    if not all(isinstance(text, str) for text in texts.values()):
        raise DeviationError(f"{where}: case, reason and issue are texts")
    if texts["case"] not in known:
        raise DeviationError(
            f"{where}: no case is called {texts['case']!r} (see `engine-conformance list`)"
        )
    if type(until) is not datetime.date:
        raise DeviationError(
            f"{where} ({texts['case']}): until is {until!r}; write a date, until = 2027-03-31"
        )
    if until < today:
        raise DeviationError(
            f"{where} ({texts['case']}): it ended on {until}; "
            "fix the engine, or agree on a new date"
        )
    return Deviation(**texts, until=until, only=_narrowing(where, entry))


def _narrowing(where: str, entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    only = {name: entry[name] for name in _NARROWING if name in entry}
    for name, values in only.items():
        kind = _NARROWING[name]
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise DeviationError(f"{where}: {name} is {values!r}; write a list of {kind.__name__}")
    return only


def with_deviations(outcome: Outcome, deviation: Deviation | None) -> Outcome:
    """Return the outcome with the status of a listed case, unchanged if it could not run."""
    if deviation is None or outcome.status in ("not-run", "suite-error"):
        return outcome
    if outcome.status in ("passed", "refused"):
        message = f"listed as a deviation ({deviation.issue}), but it passes: take it from the list"
        return replace(outcome, status="stale-deviation", message=message)
    return replace(outcome, status="deviation")
