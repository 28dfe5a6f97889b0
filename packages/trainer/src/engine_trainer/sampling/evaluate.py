"""Accuracy on held-out problems: one set, or several by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_api.comm import together
from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.data import Heldout, heldout_sets, load_tokenizer
from engine_trainer.rewards import failure_figures
from engine_trainer.run.run import Run
from engine_trainer.sampling.pass_at_k import Vote, figures_at_k
from engine_trainer.sampling.sampler import Group, Sampler

Metrics = dict[str, float]


class Evaluator:
    """Measures the policy on every held-out set; ``output_dir/eval`` (``folder``) keeps the completions.

    The same seed draws with the same random numbers whatever the weights, so that two evaluations differ by
    what was learned more than by luck.
    """

    def __init__(
        self, run: Run, sampler: Sampler, sets: Sequence[Heldout], folder: str = "eval"
    ) -> None:
        self.run, self.sampler, self.sets, self.folder = run, sampler, list(sets), folder

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
                figures |= {
                    f"eval/{one.name}/{key}" if one.name else f"eval/{key}": v
                    for key, v in found.items()
                }
            return figures

    def _measure(self, one: Heldout, step: int) -> Metrics:
        groups = self.sampler.sample(
            one.problems.prompts,
            n=one.samples,
            temperature=one.temperature,
            seed=self.run.config.run.seed,
        )
        self.sampler.failures.count(groups)
        path = self.run.folder / self.folder / one.name / f"step-{step:06d}.jsonl"
        comm = self.sampler.comm
        together(comm, lambda: write_completions(path, groups) if comm.rank == 0 else None)
        return summary(groups)


def evaluate_model(config: RLConfig) -> Metrics:
    """Measure ``engine.model`` as it is, on the held-out sets of ``eval``: ``engine-train eval``. Nothing is trained.

    The figures go to ``output_dir/evaluation.json`` too, whole or not at all, and the completions to
    ``output_dir/evaluation``; what a training run left in that folder stays.

    Raises ``ConfigError`` without held-out problems, on Ray, or while another run writes to the folder, and what ``Evaluator.measure`` raises.
    """
    if config.launcher != "none":
        raise ConfigError(
            "launcher",
            f"{config.launcher!r} only trains",
            remedy="launcher: none, alone or under torchrun",
        )
    tokenizer = load_tokenizer(config.data, config.engine.model)
    sets = heldout_sets(config.data, config.eval, tokenizer, config.engine.model, config.rollout)
    if not sets:
        raise ConfigError(
            "eval.source",
            "missing",
            why="there is nothing to measure on",
            remedy="name a file of problems",
        )
    only = replace(
        config,
        engine=replace(config.engine, optimizer=None),
        run=replace(config.run, save_hf=False),
    )
    with Run(only, kind="eval", total_steps=1) as run:
        run.start()
        sampler = Sampler.create(run, tokenizer, config.rollout, config.reward, config.agent)
        figures = Evaluator(run, sampler, sets, "evaluation").measure(0)
        together(
            run.comm,
            lambda: (
                _write(run.folder / "evaluation.json", json.dumps(figures, indent=1))
                if run.is_main
                else None
            ),
        )
        sampler.close()
    return figures


def summary(groups: Sequence[Group]) -> Metrics:
    """What ``Evaluator.measure`` says of one set."""
    answers = [answer for group in groups for answer in group.completions]
    by_problem = [fmean(a.score.correct for a in group.completions) for group in groups]
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
    } | figures_at_k(
        [
            [Vote(answer=a.score.answer, correct=a.score.correct) for a in g.completions]
            for g in groups
        ]
    )


def write_completions(path: Path, groups: Sequence[Group]) -> None:
    """A JSONL file with one row a problem, whole or not at all."""
    _write(
        path,
        "".join(json.dumps(_row(i, g), ensure_ascii=False) + "\n" for i, g in enumerate(groups)),
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
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
        for a in group.completions
    ]
    return {
        "problem": index,
        "question": group.prompt.text,
        "answer": group.prompt.answer,
        "completions": answers,
    }
