"""Completions that a report shows: the best, the worst, and those that changed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_trainer.telemetry.pages.evaluations import Completion, Problem
from engine_trainer.telemetry.rollouts import FOLDER, files_of, read_rollouts
from engine_trainer.telemetry.samples import spread

SHOWN = 3
"""Number of samples of each kind."""
LONGEST = 3000
"""Largest number of characters of a text, whose middle is left out."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of problems by what became of their fraction of correct completions."""

    better: int
    worse: int
    same: int


def count_changes(problems: Sequence[Problem], first: int, last: int) -> Counts:
    """Count the problems that both evaluations have."""
    changes = [p.correct[last] - p.correct[first] for p in _in_both(problems, first, last)]
    better = sum(change > 0 for change in changes)
    worse = sum(change < 0 for change in changes)
    return Counts(better=better, worse=worse, same=len(changes) - better - worse)


def evaluation_samples(problems: Sequence[Problem], first: int, last: int) -> str:
    """Return samples of the evaluation after step ``last`` and of changes since ``first``.

    The problems have the completions of both steps.
    """
    parts = [_extremes(problems, last, f"after step {last}")]
    if first != last:
        both = _in_both(problems, first, last)
        ways = {
            "Learned": [p for p in both if p.correct[last] > p.correct[first]],
            "Lost": [p for p in both if p.correct[last] < p.correct[first]],
        }
        for title, found in ways.items():
            # The largest changes come first.
            found.sort(key=lambda p: -abs(p.correct[last] - p.correct[first]))
            cards = [_change(p, first, last, learned=title == "Learned") for p in found[:SHOWN]]
            parts.append(_section(f"{title} between steps {first} and {last}", cards))
    return "".join(parts)


def training_samples(run: Path) -> str:
    """Return samples of the last step whose completions the run has kept."""
    files = files_of(run / FOLDER)
    if not files:
        return ""
    names = ["step", "group", "question", "answer", "text", "reward", "correct", "tokens"]
    rows = read_rollouts(files[-1], [*names, "finish_reason"]).to_pylist()
    problems: dict[int, Problem] = {}
    for row in rows:
        number = row["group"]
        problem = problems.setdefault(
            number, Problem(number=number, question=row["question"], answer=row["answer"])
        )
        problem.completions.setdefault(row["step"], []).append(
            Completion(
                text=row["text"],
                reward=row["reward"],
                correct=row["correct"],
                tokens=len(row["tokens"]),
                finished=row["finish_reason"] == "stop",
            )
        )
    step = rows[0]["step"] if rows else 0
    return _extremes(list(problems.values()), step, f"of training in step {step}")


def card(heading: str, texts: Sequence[tuple[str, str]], *, kind: str = "") -> str:
    """Return a card with texts, each under its title."""
    rows = "".join(
        f"<h5>{html.escape(title)}</h5><pre>{html.escape(shorten(text))}</pre>"
        for title, text in texts
    )
    return f'<article class="card {kind}"><h4>{html.escape(heading)}</h4>{rows}</article>'


def shorten(text: str) -> str:
    """Return a text of at most about ``LONGEST`` characters, without the middle of a longer one."""
    text = text.strip("\n")
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _extremes(problems: Sequence[Problem], step: int, when: str) -> str:
    """Return the best and, where they differ, the worst completions of a step."""
    pairs = [(p, c) for p in problems for c in p.completions.get(step, [])]
    ranked = sorted(pairs, key=lambda pair: -pair[1].reward)
    highest, lowest = (ranked[0][1].reward, ranked[-1][1].reward) if ranked else (0.0, 0.0)
    if highest == lowest:
        cards = [_one(p, c) for p, c in _equal_first(ranked)]
        return _section(f"Completions {when}, all with the same reward", cards)
    best = _equal_first([pair for pair in ranked if pair[1].reward > lowest])
    worst = _equal_first([pair for pair in ranked[::-1] if pair[1].reward < highest])
    return _section(f"Best {when}", [_one(p, c) for p, c in best]) + _section(
        f"Worst {when}", [_one(p, c) for p, c in worst]
    )


def _in_both(problems: Sequence[Problem], first: int, last: int) -> list[Problem]:
    return [p for p in problems if first in p.correct and last in p.correct]


def _equal_first(
    ranked: Sequence[tuple[Problem, Completion]],
) -> list[tuple[Problem, Completion]]:
    """Return the first samples.

    Of those with the first one's reward it takes some in equal distances.
    """
    equal = [pair for pair in ranked if pair[1].reward == ranked[0][1].reward]
    if len(equal) <= SHOWN:
        return list(ranked[:SHOWN])
    return [equal[i] for i in spread(len(equal), SHOWN)]


def _section(title: str, cards: Sequence[str]) -> str:
    if not cards:
        return ""
    return f'<h3>{html.escape(title)}</h3><div class="cards">{"".join(cards)}</div>'


def _one(problem: Problem, completion: Completion) -> str:
    heading = f"problem {problem.number}: {_describe(completion)}"
    kind = "good" if completion.correct else "bad"
    return card(heading, [*_asked(problem), ("completion", completion.text)], kind=kind)


def _change(problem: Problem, first: int, last: int, *, learned: bool) -> str:
    """Return a card with a completion before and one after that differ in correctness."""
    texts = _asked(problem)
    for step, wanted in ((first, not learned), (last, learned)):
        given = problem.completions.get(step, [])
        chosen = next((c for c in given if c.correct is wanted), None)
        if chosen is not None:
            texts.append((f"after step {step}: {_describe(chosen)}", chosen.text))
    before, after = (f"{problem.correct[step]:.0%}" for step in (first, last))
    heading = f"problem {problem.number}: {before} → {after} correct"
    return card(heading, texts, kind="good" if learned else "bad")


def _asked(problem: Problem) -> list[tuple[str, str]]:
    answer = [] if problem.answer is None else [("expected answer", problem.answer)]
    return [("question", problem.question), *answer]


def _describe(completion: Completion) -> str:
    parts = [
        "correct" if completion.correct else "not correct",
        f"reward {completion.reward:.4g}",
        f"{completion.tokens} tokens",
    ]
    return ", ".join([*parts, *([] if completion.finished else ["cut off"])])
