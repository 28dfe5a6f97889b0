"""Rewards: functions by name that judge a completion.

``registry`` finds them (entry-point group ``engine_trainer.rewards``, or ``register`` in
process), ``scorer`` runs and combines them, ``calls`` keeps the time, ``workers`` are processes that judge. A reward's name
stands for a factory: ``factory(**kwargs)`` returns a function of one ``Sample``. One's own function (``file.py:name``) is that
function itself.
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
