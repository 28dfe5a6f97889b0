"""Functions that test_takeover runs inside ranks."""

from __future__ import annotations

import contextlib
import io

import torch

from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.registry import Resolution
from engine_trainer.config import RLConfig, SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.rewards import register
from engine_trainer.rl.loop import train_rl
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


def wire(
    path: str, backend: str, layout: dict[str, int], quantization: str
) -> dict[str, tuple[str, torch.Tensor]]:
    """What a weight sync sends to a server, by name: dtype and bytes; on rank 0 only."""
    from rollout_fp8.export.exporter import Exporter  # a package of its own, which need not be here

    source = ModelSource(path=path)
    config = EngineConfig(model=source, optimizer=None, parallelism=Parallelism(**layout))
    engine = EngineRegistry.create(backend=backend, device="cpu", config=config)
    engine.initialize()
    # Only the device is read.
    here = Resolution(plugin=None, row=None, device="cpu", source="", trace=())
    exporter = Exporter(resolution=here, model=source, dtype="bfloat16", quantization=quantization)
    # As bytes: eight-bit floats cannot be pickled.
    sent = {
        name: (str(t.dtype), t.contiguous().view(torch.uint8).clone())
        for name, t in exporter.export(engine)
    }
    exporter.close()
    engine.close()
    return sent if engine.topology.rank == 0 else {}
