"""The held-out sets of an evaluation, from ``eval`` itself and from ``eval.sets`` by name."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.config import ModelSource
from engine_trainer.config.evaluation import EvalSection, EvalSet
from engine_trainer.config.sections import DataSection, RolloutSection
from engine_trainer.data.chat import ChatTokenizer
from engine_trainer.data.context import longest_prompt
from engine_trainer.data.datasets import PromptDataset
from engine_trainer.data.gym import gym_examples
from engine_trainer.data.layouts import Example, Need, have_responses, to_examples
from engine_trainer.data.readers import read_rows


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """Problems that are not trained on, with their sampling parameters."""

    name: str
    """Name in ``eval.sets``.

    It is empty for the set of ``eval`` itself.
    """
    problems: PromptDataset
    samples: int
    """Number of completions per problem."""
    temperature: float


def read_heldout(section: DataSection, chosen: EvalSet, need: Need) -> list[Example]:
    """Return the rows of one set, at most ``max_problems``."""
    if chosen.source is None:
        # The configurations check this.
        assert section.reasoning_gym is not None
        examples = gym_examples(section.reasoning_gym, "heldout")
    else:
        rows = read_rows(chosen.source, chosen.split)
        examples = to_examples(rows, section.columns, need, images=True)
    return examples[: chosen.max_problems]


def read_responses(section: DataSection, chosen: EvalSet) -> list[Example] | None:
    """Return the rows of one set with their responses, at most ``max_problems``.

    The result is None for rows that hold problems only, of which accuracy is to be measured.
    """
    if chosen.source is None or not chosen.samples:
        return read_heldout(section, chosen, "response")
    rows = read_rows(chosen.source, chosen.split)
    if not have_responses(rows, section.columns):
        return None
    return to_examples(rows, section.columns, "response", images=True)[: chosen.max_problems]


def heldout_sets(
    section: DataSection,
    evaluation: EvalSection | None,
    tokenizer: ChatTokenizer,
    model: ModelSource,
    rollout: RolloutSection,
) -> list[Heldout]:
    """Return every set that accuracy is measured on (``samples`` above 0).

    Raises:
        DataError: a set cannot be read, or a prompt is too long and neither dropped nor cut.
    """
    found: list[Heldout] = []
    for name, chosen in (evaluation.all_sets(section) if evaluation else {}).items():
        if chosen.samples:
            problems = PromptDataset.build(
                read_heldout(section, chosen, "prompt"),
                tokenizer,
                section,
                longest_prompt(model, rollout),
                f"eval.sets.{name}" if name else "eval",
            )
            assert chosen.temperature is not None, "all_sets fills it in"
            found.append(
                Heldout(
                    name=name,
                    problems=problems,
                    samples=chosen.samples,
                    temperature=chosen.temperature,
                )
            )
    return found
