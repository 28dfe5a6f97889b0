"""The number of failures in a whole run, on all replicas and before a resume.

``reward.max_failures`` and ``agent.max_failures`` bound it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine_trainer.agent import AgentError
from engine_trainer.config.sections import AgentSection, RewardSection
from engine_trainer.placement.replica import Group, ScoredCompletion, sample_of
from engine_trainer.rewards import RewardError


class Failures:
    """The failures among a run's completions, bounded by ``max_failures`` of reward and agent.

    A replica ends the run as soon as it alone has too many failures within one call; it knows
    nothing of other replicas, nor of failures before a resume. Every process of the loop counts the
    same completions, so that all of them raise together.

    Attributes:
        rewards: calls that raised or gave no finite number.
        agents: trajectories whose function raised.
    """

    def __init__(self, reward: RewardSection, agent: AgentSection | None) -> None:
        self._most_rewards = reward.max_failures
        self._most_agents = agent.max_failures if agent else 0
        self.rewards = 0
        self.agents = 0

    @property
    def state(self) -> dict[str, int]:
        """The counts for a checkpoint, as JSON.

        They are over all completions that were counted, without those that are still being
        generated.
        """
        return {"rewards": self.rewards, "agents": self.agents}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore a saved ``state``.

        A checkpoint without one is read as no failures.
        """
        self.rewards = state.get("rewards", 0)
        self.agents = state.get("agents", 0)

    def count(self, groups: Iterable[Group]) -> None:
        """Count the failures of new completions.

        Raises ``AgentError``, ``RewardError`` for one failure too many.
        """
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
