"""The module that each process of a run of test_trainer imports first.

It installs the simulated device where the environment requests it, and registers a reward.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_api.devices import npu_is_simulated
from engine_trainer.rewards import Sample, register

if npu_is_simulated():
    from engine_conformance import stand_in

    stand_in.install()


@register("sevens")
def sevens() -> Callable[[Sample], float]:
    """Build a reward that returns the fraction of sevens in four digits."""
    return lambda sample: sample.completion.count("7") / 4
