"""Reward functions that score a completion, by name.

``registry`` finds them (entry-point group ``engine_trainer.rewards``, or ``register`` in process),
``scorer`` runs and combines them, ``calls`` keeps their time limits, and ``worker_pool`` runs them
in other processes. A reward's name refers to a factory: ``factory(**kwargs)`` returns a function of
one ``Sample``. A user's own function (``file.py:name``) is called directly, without a factory.
"""

from __future__ import annotations

from engine_trainer.rewards.registry import REWARD_GROUP as REWARD_GROUP
from engine_trainer.rewards.registry import create as create
from engine_trainer.rewards.registry import known as known
from engine_trainer.rewards.registry import register as register
from engine_trainer.rewards.sample import RewardError as RewardError
from engine_trainer.rewards.sample import RewardFn as RewardFn
from engine_trainer.rewards.sample import Sample as Sample
from engine_trainer.rewards.sample import Verdict as Verdict
from engine_trainer.rewards.scorer import Score as Score
from engine_trainer.rewards.scorer import Scorer as Scorer
from engine_trainer.rewards.scorer import WeightedReward as WeightedReward
from engine_trainer.rewards.scorer import failure_figures as failure_figures
