"""Figures over a step's completions."""

from __future__ import annotations

from engine_api.rollout import Completion
from engine_trainer.data import Prompt
from engine_trainer.placement.ray.partial_rollouts import _joined
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards.scorer import Score
from engine_trainer.rl.experience import completion_figures

PROMPT = Prompt(tokens=[1], rendered="", text="", answer=None)


def scored(tokens: int, passes: int, tools: int = 0) -> ScoredCompletion:
    """Build a completion of which a tool made the last ``tools`` tokens."""
    return ScoredCompletion(
        tokens=[5] * (tokens + tools),
        log_probs=[-1.0] * (tokens + tools),
        text="",
        finished=True,
        score=Score(total=1.0, parts={"r": 1.0}, correct=True),
        loss_weights=[1.0] * tokens + [0.0] * tools,
        passes=passes,
    )


def figures_of(*completions: ScoredCompletion) -> dict[str, float]:
    return completion_figures([Group(prompt=PROMPT, completions=[*completions])])


def test_the_accepted_length_is_the_models_tokens_over_all_forward_passes() -> None:
    figures = figures_of(scored(10, 4), scored(2, 2, tools=7))
    assert figures["rollout/accepted_length"] == 12 / 6


def test_a_rollout_that_counts_no_passes_has_no_accepted_length() -> None:
    assert "rollout/accepted_length" not in figures_of(scored(10, 0))


def test_parts_of_one_completion_add_their_passes() -> None:
    first, rest = (
        Completion(
            prompt_index=0,
            tokens=[5] * tokens,
            log_probs=[-1.0] * tokens,
            weight_versions=[0] * tokens,
            finish_reason="length",
            passes=passes,
        )
        for tokens, passes in ((4, 2), (3, 3))
    )
    assert _joined(first, rest).passes == 5
