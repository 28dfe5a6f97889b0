"""Accuracy on held-out problems."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_api.comm import together
from engine_api.errors import ConfigError
from engine_trainer.data import Prompt
from engine_trainer.sampler import Group, Sampler


def evaluate(
    sampler: Sampler, problems: Sequence[Prompt], *, samples: int = 1, temperature: float = 1.0, seed: int = 0,
    greedy: bool = False, path: Path | None = None,
) -> dict[str, float]:  # fmt: skip
    """How well the policy's weights of now answer ``problems``; the same dict on all ranks, and each time.

    The same seed draws with the same random numbers whatever the weights, so that two evaluations differ by
    what was learned more than by luck.

    Args:
        samples: completions a problem, k; with temperature 0 they would be equal, so that it must be 1.
        temperature: of these completions.
        greedy: in addition the accuracy of the likeliest completion (when temperature is not 0 already).
        path: a JSONL file with one row a problem, written by rank 0, whole or not at all.

    Returns:
        ``accuracy`` (mean@k: share of correct completions; correct: the first reward gives 1), ``accuracy_stderr`` (over
        problems), ``best@k`` (share of problems with a correct one, for k > 1), ``reward``, ``response_length`` (tokens),
        ``truncated`` (share), ``timeouts`` (of rewards), ``problems`` and, if asked for, ``greedy_accuracy``.

    Raises:
        ConfigError: no problems, or k that makes no sense.
        RolloutError, RewardError: all ranks together.
    """
    if not problems or samples < 1 or (temperature == 0 and samples != 1):
        raise ConfigError("eval.samples", f"{samples} at temperature {temperature} for {len(problems)} problems",
                          remedy="give problems, at least 1 sample, and exactly 1 at temperature 0")  # fmt: skip
    with sampler.serving():
        groups = sampler.sample(problems, n=samples, temperature=temperature, seed=seed)
        likeliest = sampler.sample(problems, n=1, temperature=0.0, seed=seed) if greedy and temperature > 0 else []
    if path is not None:
        together(sampler.comm, lambda: _write(path, groups) if sampler.comm.rank == 0 else None)
    figures = _summary(groups)
    if likeliest:
        figures["greedy_accuracy"] = fmean(g.answers[0].score.correct for g in likeliest)
    return figures


def _summary(groups: Sequence[Group]) -> dict[str, float]:
    answers = [answer for group in groups for answer in group.answers]
    by_problem = [fmean(a.score.correct for a in group.answers) for group in groups]
    mean = fmean(by_problem)
    variance = math.fsum((x - mean) ** 2 for x in by_problem) / max(1, len(by_problem) - 1)
    figures = {
        "accuracy": mean,
        "accuracy_stderr": math.sqrt(variance / len(by_problem)),
        "reward": fmean(a.score.total for a in answers),
        "response_length": fmean(len(a.tokens) for a in answers),
        "truncated": fmean(not a.finished for a in answers),
        "timeouts": float(sum(a.score.timeouts for a in answers)),
        "problems": float(len(groups)),
    }
    k = len(groups[0].answers)
    return figures | ({f"best@{k}": fmean(x > 0 for x in by_problem)} if k > 1 else {})


def _write(path: Path, groups: Sequence[Group]) -> None:
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
            "tokens": len(a.tokens),
            "finished": a.finished,
        }
        for a in group.answers
    ]
    return {"problem": index, "question": group.prompt.text, "answer": group.prompt.answer, "completions": answers}
