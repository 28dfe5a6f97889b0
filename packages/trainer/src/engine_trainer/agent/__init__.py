"""Conversations of several turns with tools, by a user's async function called per trajectory.

::

    async def solve(episode: Episode) -> Trajectory:
        turn = await episode.generate()
        while turn.text.endswith("="):
            turn = await episode.generate(calculate(turn.text))
        return episode.end()

``episode`` is the interface of the function, ``generators`` turn its calls into those of a rollout,
and ``runner`` runs many trajectories at once (``engine_trainer.placement.ray.agent_rollouts`` while
training goes on). Tokens go in and out as they are: the model's text is never tokenized again.
"""

from __future__ import annotations

from engine_trainer.agent.episode import AgentError as AgentError
from engine_trainer.agent.episode import Episode as Episode
from engine_trainer.agent.episode import Trajectory as Trajectory
from engine_trainer.agent.episode import Turn as Turn
from engine_trainer.agent.runner import AgentLoop as AgentLoop
