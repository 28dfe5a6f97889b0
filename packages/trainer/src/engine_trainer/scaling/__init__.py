"""A calculation of the time of each phase of an RL step, from the model, the GPUs and the lengths.

``shapes`` has the cost of a model per token. ``hardware`` has a GPU's limits, and the shares of
them that were measured. ``phases`` has the seconds of generation, reward, log-probs, update and
sync, and the limit of each. ``step`` has a whole step. ``python -m engine_trainer.scaling`` prints
steps. docs/scaling.md states the assumptions, and how far measurements are off.
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
