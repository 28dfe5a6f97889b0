"""Direct preference optimization, in which the policy learns from pairs.

It needs no reward model and no rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_api.batch import Batch
from engine_trainer.algorithms.preference import LinearLoss, PairObjective
from engine_trainer.config import DPOConfig
from engine_trainer.data.preferences import Pair
from engine_trainer.preferences.loop import EVAL_ROWS, Plan, document_sums, share
from engine_trainer.preferences.pairs import PairData, pack_pairs, train_pairs
from engine_trainer.run.reference import Reference
from engine_trainer.run.run import Outcome, Run


def train_dpo(config: DPOConfig) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    DPO is of Rafailov et al. 2023, arXiv:2305.18290. A document counts by ``log π(answer | prompt)
    - log ref(answer | prompt)``; the reference is the model as the run began. SimPO and ORPO have
    no reference (``engine_trainer.algorithms.preference``).

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    return train_pairs(
        config,
        kind="dpo",
        objective_of=lambda run, data, plan, _: DPOObjective(run, config, data, plan),
    )


class DPOObjective:
    """Log-probs of the answers relative to those of the reference.

    See ``engine_trainer.preferences.pairs.Objective``.
    """

    def __init__(self, run: Run, config: DPOConfig, data: PairData, plan: Plan) -> None:
        self.linear = LinearLoss()
        self.loss = PairObjective.named(
            config.dpo.loss, config.dpo.beta, config.dpo.loss_options, config.dpo.sft_coefficient
        )
        self._reference: Reference | None = None
        self._known: dict[bool, dict[int, tuple[float, float]]] = {}
        self._reads_reference = config.dpo.reads_reference
        if not self._reads_reference:
            return
        if config.dpo.reference == "engine":
            self._reference = Reference(run)
            return
        # Before a checkpoint is loaded the policy is the reference.
        with run.timers.phase("reference"):
            self._known[False] = self._precompute(run, data, plan.visited(), heldout=False)
            if data.heldout is not None:
                self._known[True] = self._precompute(
                    run, data, range(len(data.heldout)), heldout=True
                )

    def documents(self, pair: Pair) -> list[dict[str, Any]]:
        """Return the documents, which sum the assistant's tokens (see ``Objective``)."""
        return [document.fields() for document in pair.documents]

    def offsets(self, heldout: bool, indices: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return the reference's log-probs (see ``Objective``)."""
        if not self._reads_reference:
            return torch.zeros(2 * len(indices), dtype=torch.float64)
        if self._reference is None:
            known = self._known[heldout]
            return torch.tensor([x for i in indices for x in known[i]], dtype=torch.float64)
        return document_sums(self._reference.outputs(batch), batch)

    def convert(self, folder: Path) -> None:
        """Do nothing (see ``Objective``)."""

    def close(self) -> None:
        """Close the reference (see ``Objective``)."""
        if self._reference is not None:
            self._reference.close()

    def _precompute(
        self, run: Run, data: PairData, indices: Sequence[int], *, heldout: bool
    ) -> dict[int, tuple[float, float]]:
        """Return the reference's sums of every pair, the same on all ranks."""
        dataset = data.select(heldout)
        found: dict[int, tuple[float, float]] = {}
        for start in range(0, len(indices), EVAL_ROWS):
            part = indices[start : start + EVAL_ROWS]
            local = share([len(dataset[i]) for i in part], run)
            batch = pack_pairs(self, [dataset[part[k]] for k in local])
            sums = document_sums(run.engine.infer_batch(batch), batch).tolist()
            own = {part[k]: (sums[2 * n], sums[2 * n + 1]) for n, k in enumerate(local)}
            found |= {i: both for row in run.policy.gather([own]) for i, both in row.items()}
        return found
