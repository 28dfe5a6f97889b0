"""What each process of a run of test_trainer imports first: the simulated device, where it is asked for, and a reward."""

from __future__ import annotations

from collections.abc import Callable

from engine_api.devices import npu_is_simulated
from engine_trainer.rewards import Sample, register

if npu_is_simulated():
    from engine_conformance import stand_in

    stand_in.install()


@register("sevens")
def sevens() -> Callable[[Sample], float]:
    """How many of four digits are a seven."""
    return lambda sample: sample.completion.count("7") / 4
