"""The reference model of the KL term."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine_api.batch import Batch
from engine_api.contract import Engine
from engine_api.registry import EngineRegistry
from engine_api.results import TokenOutputs
from engine_trainer.runtime import Run


class Reference:
    """Log-probs of the model as the run began: the adapter off, or a second engine that only infers."""

    def __init__(self, run: Run) -> None:
        self._adapter = run.engine_config.lora is not None
        self._engine: Engine = run.engine if self._adapter else self._create(run)

    @staticmethod
    def _create(run: Run) -> Engine:
        section = run.config.engine
        engine: Engine = EngineRegistry.create(
            model_type=section.model_type, backend=section.backend, device=run.device,
            config=replace(run.engine_config, optimizer=None),
        )  # fmt: skip
        engine.initialize()
        return engine

    def log_probs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """``[T]`` float32 on the CPU; all ranks together."""
        return log_probs_of(self._engine.infer_batch(batch, temperature=temperature, adapter=not self._adapter))

    def close(self) -> None:
        """Close the second engine, where there is one."""
        if not self._adapter:
            self._engine.close()


def log_probs_of(outputs: TokenOutputs) -> torch.Tensor:
    """Inferred log-probs on the CPU, where batches are built."""
    if outputs.log_probs is None:  # an empty batch may have none
        return torch.zeros(0)
    return outputs.log_probs.cpu()
