"""The held-out problems of a run over its evaluations, read from ``output_dir/eval``."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_trainer.errors import DataError
from engine_trainer.telemetry.samples import spread

FOLDER = "eval"
MOST_PROBLEMS = 1000
MOST_EVALUATIONS = 25
"""Columns of the table of problems: these evaluations, in equal distances, and the last one."""
LONGEST = 160
"""Largest number of characters of a question in the table."""
_STEP = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion to a held-out problem."""

    text: str
    reward: float
    correct: bool
    tokens: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A held-out problem with the fraction of correct completions at each evaluation."""

    number: int
    question: str
    answer: str | None
    correct: dict[int, float] = field(default_factory=dict[int, float])
    """Fractions by step."""
    completions: dict[int, list[Completion]] = field(default_factory=dict[int, list[Completion]])
    """Completions by step, of the steps that were asked for."""


def evaluation_files(run: Path) -> dict[str, dict[int, Path]]:
    """Return the files of each held-out set by step.

    A set has its files in a folder of its own, and the set without a name (``""``) in ``eval``
    itself.
    """
    folder = run / FOLDER
    if not folder.is_dir():
        return {}
    places = {"": folder} | {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
    found = {name: _steps(place) for name, place in places.items()}
    return {name: files for name, files in found.items() if files}


def forget_evaluations(run: Path, step: int) -> None:
    """Remove the files of evaluations after ``step``, which a resumed run measures again.

    A new run (``step == 0``) removes all of them.
    """
    for files in evaluation_files(run).values():
        for at, path in files.items():
            if at > step or step == 0:
                path.unlink()


def read_problems(files: Mapping[int, Path], keep: Collection[int] = ()) -> list[Problem]:
    """Return the problems of a held-out set, with completions of the steps in ``keep``.

    Raises ``DataError`` for a line that is not a row of an evaluation.
    """
    problems: dict[int, Problem] = {}
    for step, path in sorted(files.items()):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                _add(problems, json.loads(line), step, keep=step in keep)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    "it is not a row of an evaluation",
                    file=str(path),
                    row=number,
                    why=f"{type(error).__name__}: {error}",
                    remedy="remove the file",
                ) from error
    return [problems[number] for number in sorted(problems)]


def problem_table(problems: list[Problem]) -> str:
    """Return the problems with their fractions of correct completions as an HTML table."""
    every = sorted({step for problem in problems for step in problem.correct})
    steps = [every[i] for i in spread(len(every) - 1, MOST_EVALUATIONS - 1)] + every[-1:]
    head = "".join(f"<th>step {step}</th>" for step in steps)
    rows = "".join(
        f'<tr><th scope="row">{problem.number}</th>'
        f"{''.join(_fraction(problem.correct.get(step)) for step in steps)}"
        f'<td class="text">{html.escape(_shortened(problem.answer or ""))}</td>'
        f'<td class="text question">{html.escape(_shortened(problem.question))}</td></tr>'
        for problem in problems[:MOST_PROBLEMS]
    )
    left = len(problems) - MOST_PROBLEMS
    more = f"<p>{left} more problems are in the files of the run.</p>" if left > 0 else ""
    return (
        "<p>The fraction of correct completions at each evaluation.</p>"
        '<div class="table" tabindex="0"><table><thead><tr><th>#</th>'
        f'{head}<th class="text">answer</th><th class="text">question</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>{more}"
    )


def _steps(folder: Path) -> dict[int, Path]:
    found = {path: _STEP.fullmatch(path.name) for path in folder.iterdir()}
    steps = {int(match[1]): path for path, match in found.items() if match is not None}
    return dict(sorted(steps.items()))


def _add(problems: dict[int, Problem], row: Mapping[str, Any], step: int, *, keep: bool) -> None:
    number = int(row["problem"])
    problem = problems.setdefault(
        number, Problem(number=number, question=row["question"], answer=row["answer"])
    )
    verdicts = [bool(given["correct"]) for given in row["completions"]]
    problem.correct[step] = sum(verdicts) / max(1, len(verdicts))
    if keep:
        problem.completions[step] = [
            Completion(
                text=given["text"],
                reward=float(given["reward"]),
                correct=bool(given["correct"]),
                tokens=int(given["tokens"]),
                finished=bool(given["finished"]),
            )
            for given in row["completions"]
        ]


def _fraction(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    return f'<td class="f{round(value * 10)}">{value:.0%}</td>'


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
