"""Signs in the figures of a run that it does not learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

# Number of logged steps in a row for which a sign must hold.
PATIENCE = 5
# A collapse: the reward is below this fraction of the best one, and the norm of the gradient is
# this many times as large as usual.
_FALLEN = 0.1
_HUGE = 10.0

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Sign:
    holds: Callable[[Figures], bool]
    meaning: str
    remedy: str


def _has_no_update(figures: Figures) -> bool:
    if "train/updates" in figures:
        return figures["train/updates"] == 0
    return figures.get("train/skipped") == 1


_SIGNS = (
    _Sign(
        lambda f: _has_no_update(f) and f.get("rollout/uninformative_groups") == 1,
        "nothing was learned: in every group all completions had the same reward",
        "look at some (engine-train view RUN), try the reward on a right answer, and then easier "
        "prompts, a larger rollout.n, or algorithm.dynamic_sampling",
    ),
    _Sign(
        lambda f: _has_no_update(f) and f.get("rollout/uninformative_groups", 0) < 1,
        "nothing was learned: no update was applied",
        "the lines about skipped updates say why; a lower engine.optimizer.lr, or rows without "
        "extreme values",
    ),
    _Sign(
        lambda f: f.get("agent/timeout") == 1,
        "every conversation ended at agent.timeout_s",
        "raise it, or see what takes the time (a tool, or the generation itself)",
    ),
    _Sign(
        lambda f: f.get("rollout/truncated") == 1,
        "every completion was cut off at rollout.max_new_tokens",
        "raise it, or train with a template whose turns end in a stop token of the tokenizer",
    ),
)


class LearningWatch:
    """A watch on the figures of the steps, which says once when a sign has held for some steps."""

    def __init__(self) -> None:
        self._counts = [0] * len(_SIGNS)
        self._fallen = 0
        self._best = 0.0
        self._norms: list[float] = []

    def note(self, step: int, figures: Figures) -> list[str]:
        """Note the figures of a step, and return what to tell the user about them."""
        messages: list[str] = []
        for index, sign in enumerate(_SIGNS):
            self._counts[index] = self._counts[index] + 1 if sign.holds(figures) else 0
            if self._counts[index] == PATIENCE:
                messages.append(f"step {step}: in {PATIENCE} steps {sign.meaning}; {sign.remedy}")
        if self._is_collapse(figures):
            messages.append(
                f"step {step}: the reward has fallen to {figures['train/reward']:.3g}, from "
                f"{self._best:.3g}, and train/grad_norm is {figures['train/grad_norm']:.3g}, "
                f"{_HUGE:.0f} times the median or more; continue from an earlier checkpoint "
                "(run.resume) with a lower engine.optimizer.lr or a smaller engine.optimizer."
                "clip_norm"
            )
        return messages

    def _is_collapse(self, figures: Figures) -> bool:
        """Return whether this step completes ``PATIENCE`` steps of a collapse."""
        reward, norm = figures.get("train/reward"), figures.get("train/grad_norm")
        if reward is None or norm is None:
            return False
        usual = median(self._norms) if self._norms else norm
        fallen = self._best > 0 and reward <= _FALLEN * self._best and norm >= _HUGE * usual
        self._fallen = self._fallen + 1 if fallen else 0
        if not fallen:
            self._norms.append(norm)
        self._best = max(self._best, reward)
        return self._fallen == PATIENCE
