"""How long each phase of an RL step takes, by calculation: from the model, the GPUs and the lengths.

``shapes``: what a model costs a token. ``hardware``: a GPU's limits, and the shares of them that were measured. ``phases``: the
seconds of generation, reward, log-probs, update and sync, and what limits each. ``step``: a whole step. ``python -m
engine_trainer.scaling`` prints one; docs/scaling.md states the assumptions and how far measurements are off.
"""

from __future__ import annotations

from engine_trainer.scaling.hardware import H200 as H200
from engine_trainer.scaling.hardware import Hardware as Hardware
from engine_trainer.scaling.phases import Phase as Phase
from engine_trainer.scaling.shapes import SHAPES as SHAPES
from engine_trainer.scaling.shapes import Shape as Shape
from engine_trainer.scaling.step import Job as Job
from engine_trainer.scaling.step import Step as Step
from engine_trainer.scaling.step import step_of as step_of
