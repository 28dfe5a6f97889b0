"""Accuracy on held-out problems: one set, or several by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_api.comm import together
from engine_trainer.at_k import Vote, figures_at_k
from engine_trainer.data import Heldout
from engine_trainer.rewards import failure_figures
from engine_trainer.runtime import Run
from engine_trainer.sampler import Group, Sampler

Metrics = dict[str, float]


class Evaluator:
    """Measures the policy on every held-out set; ``output_dir/eval`` keeps the completions.

    The same seed draws with the same random numbers whatever the weights, so that two evaluations differ by
    what was learned more than by luck.
    """

    def __init__(self, run: Run, sampler: Sampler, sets: Sequence[Heldout]) -> None:
        self.run, self.sampler, self.sets = run, sampler, list(sets)

    def measure(self, step: int) -> Metrics:
        """The figures after ``step``: ``eval/…`` of the set without a name, ``eval/NAME/…`` of the others; the same on all ranks.

        ``accuracy`` (share of correct completions; correct: the first reward gives 1), ``accuracy_stderr`` (over problems),
        ``reward``, ``response_length`` (tokens), ``truncated`` (share), ``timeouts`` and ``failures`` (of rewards),
        ``problems``, and for several samples a problem those of ``at_k``.

        Raises ``RolloutError``, ``RewardError``: all ranks together.
        """
        if not self.sets:
            return {}
        with self.run.timers.phase("eval"), self.sampler.serving():
            figures: Metrics = {}
            for one in self.sets:
                found = self._measure(one, step)
                figures |= {f"eval/{one.name}/{key}" if one.name else f"eval/{key}": v for key, v in found.items()}
            return figures

    def _measure(self, one: Heldout, step: int) -> Metrics:
        groups = self.sampler.sample(
            one.problems.prompts, n=one.samples, temperature=one.temperature, seed=self.run.config.run.seed
        )
        path = self.run.folder / "eval" / one.name / f"step-{step:06d}.jsonl"
        comm = self.sampler.comm
        together(comm, lambda: write_completions(path, groups) if comm.rank == 0 else None)
        return summary(groups)


def summary(groups: Sequence[Group]) -> Metrics:
    """What ``Evaluator.measure`` says of one set."""
    answers = [answer for group in groups for answer in group.answers]
    by_problem = [fmean(a.score.correct for a in group.answers) for group in groups]
    mean = fmean(by_problem)
    variance = math.fsum((x - mean) ** 2 for x in by_problem) / max(1, len(by_problem) - 1)
    wrong = failure_figures([a.score for a in answers])
    return {
        "accuracy": mean,
        "accuracy_stderr": math.sqrt(variance / len(by_problem)),
        "reward": fmean(a.score.total for a in answers),
        "response_length": fmean(len(a.tokens) for a in answers),
        "truncated": fmean(not a.finished for a in answers),
        "timeouts": wrong["reward/timeouts"],
        "failures": wrong["reward/failures"],
        "problems": float(len(groups)),
    } | figures_at_k([[Vote(answer=a.score.answer, correct=a.score.correct) for a in g.answers] for g in groups])


def write_completions(path: Path, groups: Sequence[Group]) -> None:
    """A JSONL file with one row a problem, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        "".join(json.dumps(_row(i, g), ensure_ascii=False) + "\n" for i, g in enumerate(groups)), encoding="utf-8"
    )
    partial.replace(path)


def _row(index: int, group: Group) -> dict[str, Any]:
    answers = [
        {
            "text": a.text,
            "reward": a.score.total,
            "correct": a.score.correct,
            "answer": a.score.answer,
            "tokens": len(a.tokens),
            "finished": a.finished,
        }
        for a in group.answers
    ]
    return {"problem": index, "question": group.prompt.text, "answer": group.prompt.answer, "completions": answers}
