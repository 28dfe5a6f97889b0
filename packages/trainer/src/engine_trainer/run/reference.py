"""The reference model of the KL term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.results import TokenOutputs
from engine_trainer.placement.groups import EngineGroup
from engine_trainer.run.run import Run


class Reference:
    """The model as it was when the run began, as a source of log-probs.

    It is the policy with the adapter off, or a second engine that only infers.
    """

    def __init__(self, run: Run) -> None:
        self._adapter = run.engine_config.lora is not None
        self._engines: EngineGroup = run.policy if self._adapter else self._create(run)

    @staticmethod
    def _create(run: Run) -> EngineGroup:
        return run.launcher.engines(
            run.config.engine,
            replace(run.engine_config, optimizer=None, router_replay=False),
            run.device,
        )

    @property
    def engines(self) -> EngineGroup | None:
        """The reference's own engine.

        None where the policy with the adapter off is the reference.
        """
        return None if self._adapter else self._engines

    def log_probs(self, shards: Sequence[Batch], temperature: float) -> list[torch.Tensor]:
        """Return the log-probs of each local shard, ``[T]`` float32."""
        return [log_probs_of(o) for o in self._infer(shards, temperature)]

    def outputs(self, batch: Batch) -> TokenOutputs:
        """Return the outputs for this rank's own shard at temperature 1.

        It is meant for a loop that every rank runs.
        """
        (outputs,) = self._infer([batch], 1.0)
        return outputs

    def _infer(self, shards: Sequence[Batch], temperature: float) -> list[TokenOutputs]:
        # The reference selects experts of its own, whatever the policy replays.
        bare = [without_experts(shard) for shard in shards]
        return self._engines.infer(bare, temperature=temperature, adapter=not self._adapter)

    def close(self) -> None:
        """Close the second engine, where there is one."""
        if self.engines is not None:
            self.engines.close()


def without_experts(batch: Batch) -> Batch:
    """Return the batch without the experts that the policy replays."""
    return batch.keep_fields(*(name for name in batch.fields if name != ROUTED_EXPERTS))


def log_probs_of(outputs: TokenOutputs) -> torch.Tensor:
    """Return the inferred log-probs.

    The outputs of an empty batch may have none.
    """
    return torch.zeros(0, dtype=torch.float32) if outputs.log_probs is None else outputs.log_probs
