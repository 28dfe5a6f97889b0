"""What runs inside the ranks of test_takeover."""

from __future__ import annotations

import contextlib
import io

from engine_trainer.config import RLConfig, SFTConfig
from engine_trainer.loading import load_config
from engine_trainer.rewards import register
from engine_trainer.rl import train_rl
from engine_trainer.sft import train_sft


@register("vowels")
def vowels():
    """A share that a random model gets some of."""
    return lambda sample: sum(c in "aeiouAEIOU02468" for c in sample.completion) / 8


def run(kind: str, file: str, overrides: list[str]) -> int:
    """One run as the command line would do it; the step at which it ended."""
    with contextlib.redirect_stdout(io.StringIO()):
        if kind == "sft":
            return train_sft(load_config(SFTConfig, file, overrides)).step
        return train_rl(load_config(RLConfig, file, overrides)).step
