"""Changes of an engine that were written by hand, from a file, as the campaign runs them.

A file of edits is TOML with a table ``[[edit]]`` for each wrong engine:

``name``
    its name, unique in the file.
``group``
    the kind of defect, by which results are counted.
``defect``
    the defect, in a sentence.
``clause``
    the clause of docs/contract.md that it breaks, by its anchor.
``world``
    the number of ranks at which it shows, 1 if it is left out.
``file``
    the changed file, below the folder of the engine's source.
``before``, ``after``
    the text that is replaced, which occurs once in the file, and its replacement.
``why``
    for an edit that no case fails: one of `campaign_record.CLASSES`, a colon and the reason.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutate import Mutation, own_lines

__all__ = ["Edit", "mutation_of", "read_edits"]

_NEEDED = ("name", "group", "defect", "clause", "file", "before", "after")
_OPTIONAL = ("world", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One wrong engine (see the module for its fields)."""

    name: str
    group: str
    defect: str
    clause: str
    file: str
    before: str
    after: str
    world: int = 1
    why: str = ""


def read_edits(path: Path) -> list[Edit]:
    """Return the edits of a file.

    Raises:
        ValueError: if a field is missing or unknown, or a name comes twice.
    """
    edits: list[Edit] = []
    for number, table in enumerate(tomllib.loads(path.read_text()).get("edit", ()), start=1):
        where = f"{path}, edit {number} ({table.get('name', 'without a name')})"
        if missing := [name for name in _NEEDED if name not in table]:
            raise ValueError(
                f"{where}: expected the fields {', '.join(_NEEDED)}, got no {missing[0]}"
            )
        if unknown := sorted(table.keys() - {*_NEEDED, *_OPTIONAL}):
            raise ValueError(
                f"{where}: expected fields of {', '.join((*_NEEDED, *_OPTIONAL))}, "
                f"got {unknown[0]!r}"
            )
        if any(table["name"] == other.name for other in edits):
            raise ValueError(f"{where}: expected a name of its own, got that of another edit")
        edits.append(Edit(**table))
    return edits


def mutation_of(edit: Edit, files: Mapping[str, str]) -> Mutation:
    """Return the change of an engine with these files.

    Raises:
        ValueError: if the text to replace is not there, or is there more than once.
    """
    source = files.get(edit.file, "")
    if (count := source.count(edit.before)) != 1:
        raise ValueError(
            f"edit {edit.name}: expected its text once in {edit.file}, got it {count} times; "
            "bring the edit up to date with the file"
        )
    start = source.index(edit.before)
    lines = _changed_lines(source, start, edit)
    return Mutation(
        file=edit.file,
        line=lines[0],
        column=0,
        operator=edit.group,
        ordinal=0,
        function=_scope(source, lines[0]),
        imported=False,
        lines=lines,
        start=len(source[:start].encode()),
        end=len(source[: start + len(edit.before)].encode()),
        text=edit.after,
        before=" ".join(edit.before.split()),
        after=" ".join(edit.after.split()),
        name=edit.name,
        world=edit.world,
    )


def _changed_lines(source: str, start: int, edit: Edit) -> tuple[int, int]:
    """Return the first and the last line of the statements that a change touches.

    If lines are only added, it is the last line before them and the first after them.
    """
    before = edit.before.splitlines()
    after = edit.after.splitlines()
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    tail = 0
    while tail < min(len(before), len(after)) - same and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    line = source.count("\n", 0, start) + 1
    first = line + same
    last = line + len(before) - tail - 1
    if last < first:
        first, last = max(line, first - 1), first
    touched = [
        own
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
        for own in [own_lines(node)]
        if own[0] <= last and first <= own[1]
    ]
    return min([first, *(a for a, _ in touched)]), max([last, *(b for _, b in touched)])


def _scope(source: str, line: int) -> str:
    """Return the qualified name of the function or class around a line, or "" at module level."""
    names: list[str] = []
    body: list[Any] = ast.parse(source).body
    while found := [
        node
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]:
        names.append(found[0].name)
        body = found[0].body
    return ".".join(names)
