"""Conversations of several turns with tools: a user's plain async function, one call a trajectory.

::

    async def solve(episode: Episode) -> Trajectory:
        turn = await episode.generate()
        while turn.text.endswith("="):
            turn = await episode.generate(calculate(turn.text))
        return episode.end()

``episode`` is what the function talks to, ``generators`` turn its calls into those of a rollout, ``runner`` runs many
trajectories at once (``engine_trainer.placement.ray.agent_rollouts`` beside training). Tokens go in and out as they are: what the model said is never tokenized again.
"""

from __future__ import annotations

from engine_trainer.agent.episode import AgentError as AgentError
from engine_trainer.agent.episode import Episode as Episode
from engine_trainer.agent.episode import Trajectory as Trajectory
from engine_trainer.agent.episode import Turn as Turn
from engine_trainer.agent.runner import AgentLoop as AgentLoop
