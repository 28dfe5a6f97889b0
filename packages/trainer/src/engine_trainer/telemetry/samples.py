"""Samples of an evaluation's completions, as texts for the terminal and for tables.

A completion is text, whatever it holds: it cannot move a terminal's cursor, and a page that renders
Markdown or HTML shows it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = (
    "step",
    "problem",
    "question",
    "answer",
    "completion",
    "reward",
    "correct",
    "tokens",
    "finished",
)
"""Columns of the tables."""
LONGEST = 600
"""Largest number of characters of a text in the terminal."""
_MARGIN = "    "


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """One completion of an evaluation."""

    problem: int
    """Number of its problem in the held-out set, as in the files of ``output_dir/eval``."""
    question: str
    answer: str | None
    """Expected answer, None if the data has none."""
    completion: str
    reward: float
    correct: bool
    tokens: int
    finished: bool
    """True if the completion stopped by itself."""

    def row(self, step: int) -> list[object]:
        """Return the values of ``COLUMNS``."""
        return [
            step,
            self.problem,
            self.question,
            self.answer,
            self.completion,
            self.reward,
            self.correct,
            self.tokens,
            self.finished,
        ]


def spread(total: int, count: int) -> list[int]:
    """Return at most ``count`` of the numbers below ``total``, in equal distances."""
    count = min(total, count)
    return [i * total // count for i in range(count)]


def terminal_text(name: str, step: int, samples: Sequence[ShownSample]) -> str:
    """Return samples for the terminal, with long texts shortened in their middle."""
    lines = [f"samples of {name} after step {step}:"]
    for sample in samples:
        lines.append(f"  {_headline(sample)}")
        for title, text in _texts(sample):
            first, *rest = _shortened(text).split("\n")
            lines.append(f"    {title:<11}{first}")
            lines += [f"{'':<15}{line}" for line in rest]
    return "\n".join(_printable(line) for line in lines)


def markdown(samples: Sequence[ShownSample]) -> str:
    """Return samples for a page that renders Markdown."""
    parts: list[str] = []
    for sample in samples:
        parts.append(_headline(sample))
        for title, text in _texts(sample):
            parts += [f"{title}:", code_block(text)]
    return "\n\n".join(parts)


def code_block(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, however it looks."""
    return "\n".join(_MARGIN + line for line in text.splitlines() or [""])


def _headline(sample: ShownSample) -> str:
    result = "correct" if sample.correct else "not correct"
    end = "" if sample.finished else ", cut off"
    return (
        f"problem {sample.problem}: reward {sample.reward:.4g}, {result}, "
        f"{sample.tokens} tokens{end}"
    )


def _texts(sample: ShownSample) -> list[tuple[str, str]]:
    answer = [] if sample.answer is None else [("answer", sample.answer)]
    return [("question", sample.question), *answer, ("completion", sample.completion)]


def _shortened(text: str) -> str:
    text = text.strip("\n")
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


def _printable(line: str) -> str:
    """Return a line with escapes in place of characters that control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
