"""Accuracy on held-out problems, in one set or several by name."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_api.comm import together
from engine_api.errors import ConfigError
from engine_api.manifest import MANIFEST
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import to_plain
from engine_trainer.data import Heldout, heldout_sets, load_tokenizer
from engine_trainer.rewards import failure_figures
from engine_trainer.run.run import EVALUATION, Evaluated, Run
from engine_trainer.sampling.pass_at_k import Vote, figures_at_k
from engine_trainer.sampling.pictured import check_pictured
from engine_trainer.sampling.sampler import Group, Sampler, require_groups
from engine_trainer.telemetry.samples import ShownSample, spread

Metrics = dict[str, float]


class Evaluator:
    """Measurements of the policy on every held-out set.

    The completions are kept in ``output_dir/eval`` (``folder``), and ``run.show_samples`` of each
    set are shown. The same seed draws with the same
    random numbers whatever the weights, so that two evaluations differ by what was learned more
    than by chance.
    """

    def __init__(
        self, run: Run, sampler: Sampler, sets: Sequence[Heldout], folder: str = "eval"
    ) -> None:
        self.run = run
        self.sampler = sampler
        self.sets = list(sets)
        self.folder = folder

    def measure(self, step: int) -> Metrics:
        """Return the figures after ``step``, the same on all ranks.

        They are ``eval/…`` for the set without a name and ``eval/NAME/…`` for named sets:
        ``accuracy`` (fraction of correct completions; correct: the first reward gives 1),
        ``accuracy_stderr`` (over problems), ``reward``, ``response_length`` (tokens), ``truncated``
        (fraction), ``timeouts`` and ``failures`` (of rewards), ``problems``, ``bad_images``
        (problems that were left out for them, if any), and for several samples a problem those of
        ``pass_at_k``.

        Raises ``RolloutError``, ``RewardError``: all ranks together.
        """
        if not self.sets:
            return {}
        with self.run.timers.phase("eval"), self.sampler.serving():
            figures: Metrics = {}
            for heldout in self.sets:
                prefix = f"eval/{heldout.name}" if heldout.name else "eval"
                found = self._measure(heldout, step)
                figures |= {f"{prefix}/{key}": value for key, value in found.items()}
            return figures

    def _measure(self, heldout: Heldout, step: int) -> Metrics:
        groups = self.sampler.sample(
            heldout.problems.prompts,
            n=heldout.samples,
            temperature=heldout.temperature,
            seed=self.run.config.run.seed,
        )
        require_groups(groups, f"the held-out set {heldout.name}".rstrip())
        self.sampler.failures.count(groups)
        path = self.run.folder / self.folder / heldout.name / f"step-{step:06d}.jsonl"
        comm = self.sampler.comm
        together(comm, lambda: write_completions(path, groups) if comm.rank == 0 else None)
        name = f"eval/{heldout.name}" if heldout.name else "eval"
        self.run.log.show_samples(name, step, samples_of(groups, self.run.config.run.show_samples))
        bad_images = len(heldout.problems) - len(groups)
        return summary(groups) | ({"bad_images": float(bad_images)} if bad_images else {})


def evaluate_model(config: RLConfig) -> Metrics:
    """Measure a model on the held-out sets of ``eval``, without training.

    It is ``engine.model``, or the checkpoint that ``run.resume`` names.
    This is ``engine-train eval``. The figures are also written to ``output_dir/evaluation.json``,
    whole or not at all, and the completions to ``output_dir/evaluation``; files of a training run
    in that folder stay.

    Raises ``ConfigError`` without held-out problems, on Ray, or while another run writes to the
    folder, and the errors of ``Evaluator.measure``.
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
            why="there are no problems to evaluate",
            remedy="name a file of problems",
        )
    check_pictured(config, [prompt for one in sets for prompt in one.problems.prompts])
    only = replace(
        config,
        engine=replace(config.engine, optimizer=None),
        run=replace(config.run, save_hf=False, push_to_hub=None),
    )
    with Run(only, kind="eval", total_steps=1, saves=False) as run:
        run.start()
        evaluated = run.load_evaluated()
        # The pictures are shown as those that the checkpoint was trained on.
        tokenizer.keep_image_settings(evaluated.state)
        chosen = run.config
        assert isinstance(chosen, RLConfig)
        sampler = Sampler.create(run, tokenizer, chosen.rollout, config.reward, config.agent)
        figures = Evaluator(run, sampler, sets, "evaluation").measure(evaluated.step)
        write_evaluation(run, evaluated, figures)
        sampler.close()
    return figures


def write_evaluation(run: Run, evaluated: Evaluated, figures: Metrics) -> None:
    """Write ``evaluation.json``, whole or not at all. Called on all ranks together.

    It has the figures, and everything that they depend on: the model, the checkpoint with the
    SHA-256 of its manifest (which has those of all weights), the number of updates behind the
    weights, the data with their templates, the held-out sets, the sampling, the seed and the
    version of this package.
    """
    config = to_plain(run.config)
    checkpoint = evaluated.checkpoint
    content = {
        "model": evaluated.model,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "checkpoint_sha256": None
        if checkpoint is None
        else hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest(),
        "step": evaluated.step,
        "figures": figures,
        "seed": run.config.run.seed,
        "engine": config["engine"],
        "data": config["data"],
        "eval": config["eval"],
        "rollout": config["rollout"],
        "reward": config["reward"],
        "engine_trainer": importlib.metadata.version("engine-trainer"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }

    def write() -> None:
        if run.is_main:
            _write(run.folder / EVALUATION, json.dumps(content, indent=1))

    together(run.comm, write)


def summary(groups: Sequence[Group]) -> Metrics:
    """Return the figures of one set (see ``Evaluator.measure``)."""
    completions = [completion for group in groups for completion in group.completions]
    by_problem = [fmean(a.score.correct for a in group.completions) for group in groups]
    mean = fmean(by_problem)
    variance = math.fsum((x - mean) ** 2 for x in by_problem) / max(1, len(by_problem) - 1)
    wrong = failure_figures([c.score for c in completions])
    return {
        "accuracy": mean,
        "accuracy_stderr": math.sqrt(variance / len(by_problem)),
        "reward": fmean(c.score.total for c in completions),
        "response_length": fmean(len(c.tokens) for c in completions),
        "truncated": fmean(not c.finished for c in completions),
        "timeouts": wrong["reward/timeouts"],
        "failures": wrong["reward/failures"],
        "problems": float(len(groups)),
    } | figures_at_k(
        [
            [Vote(answer=a.score.answer, correct=a.score.correct) for a in g.completions]
            for g in groups
        ]
    )


def samples_of(groups: Sequence[Group], count: int) -> list[ShownSample]:
    """Return the first completion of at most ``count`` problems, in equal distances."""
    samples: list[ShownSample] = []
    for problem in spread(len(groups), count):
        group = groups[problem]
        first = group.completions[0]
        samples.append(
            ShownSample(
                problem=problem,
                question=group.prompt.text,
                answer=group.prompt.answer,
                completion=first.text,
                reward=first.score.total,
                correct=first.score.correct,
                tokens=len(first.tokens),
                finished=first.finished,
            )
        )
    return samples


def write_completions(path: Path, groups: Sequence[Group]) -> None:
    """Write a JSONL file with one row per problem, whole or not at all."""
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
    completions = [
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
        "completions": completions,
    }
