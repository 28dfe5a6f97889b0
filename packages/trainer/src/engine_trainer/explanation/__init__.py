"""``engine-train explain``: where a recorded step's log-probs part from a float64 oracle, and why.

The oracle is that of engine-conformance, which is not a dependency of the trainer: ``oracle.py``
imports it when it is asked for.
"""

from __future__ import annotations

from engine_trainer.explanation.command import explain_step as explain_step
