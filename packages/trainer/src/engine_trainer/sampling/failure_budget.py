"""How much has failed in a whole run: on all replicas, and before a resume too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine_trainer.agent import AgentError
from engine_trainer.config.sections import AgentSection, RewardSection
from engine_trainer.placement.replica import Group, ScoredCompletion, sample_of
from engine_trainer.rewards import RewardError


class Failures:
    """Counts what the answers of a run say, against ``reward.max_failures`` and ``agent.max_failures``.

    A replica ends the run as soon as it has too many by itself, within its call; it knows nothing of the others, nor of what was
    before a resume. Every process of the loop counts the same answers, so that all of them raise together.

    Attributes:
        rewards: calls that raised or gave no finite number.
        agents: trajectories whose function raised.
    """

    def __init__(self, reward: RewardSection, agent: AgentSection | None) -> None:
        self._most_rewards, self._most_agents = (
            reward.max_failures,
            agent.max_failures if agent else 0,
        )
        self.rewards = self.agents = 0

    @property
    def state(self) -> dict[str, int]:
        """JSON for a checkpoint: of all answers that were counted, none that are still under way."""
        return {"rewards": self.rewards, "agents": self.agents}

    def restore(self, state: Mapping[str, int]) -> None:
        """``state`` as it was saved; of a checkpoint from before there was one: nothing had failed."""
        self.rewards, self.agents = state.get("rewards", 0), state.get("agents", 0)

    def count(self, groups: Iterable[Group]) -> None:
        """Add what failed in new answers. Raises ``AgentError``, ``RewardError``: one failure too many."""
        for group in groups:
            for completion in group.completions:
                self._count(group, completion)

    def _count(self, group: Group, completion: ScoredCompletion) -> None:
        if completion.problem:
            self.agents += 1
            if self.agents > self._most_agents:
                raise AgentError.failed(
                    completion.problem, group.prompt, self.agents, self._most_agents
                )
        for name, problem in zip(completion.score.failed, completion.score.problems, strict=True):
            self.rewards += 1
            if self.rewards > self._most_rewards:
                raise RewardError.failed(
                    name,
                    sample_of(group.prompt, completion),
                    problem,
                    self.rewards,
                    self._most_rewards,
                )
