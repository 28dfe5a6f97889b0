"""Defects of continuing from another engine's checkpoint, or in a different layout."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine_api.checkpoint import locate
from engine_api.manifest import Entry, read_manifest
from engine_api.results import CheckpointInfo
from engine_api.weights import ShardSpec
from engine_loopback.engine import LoopbackEngine
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

GROUP = "portable-checkpoint"
Boxes = dict[str, tuple[ShardSpec, torch.dtype]]


class KnowsWriter(LoopbackEngine):
    """An engine that can treat checkpoints of other engines differently from its own."""

    foreign = False

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        # Without this check, a case that closes an engine would fail for the absent manifest.
        self._expect("load_checkpoint", "ready")
        self.foreign = read_manifest(locate(Path(directory))).engine != self._name
        return super().load_checkpoint(directory)


@mutant("checkpoint.partner", group=GROUP, seen_in="Megatron-LM #5895")
class OptimizerStaysBehind(KnowsWriter):
    """A load of another engine's checkpoint takes the weights and leaves out the optimizer."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        super()._install_state(
            {k: t for k, t in tensors.items() if not (self.foreign and k.startswith("optim."))}
        )


@mutant("checkpoint.partner_tp", group=GROUP, world=2)
class ForeignMomentsCutByRank(KnowsWriter):
    """Another engine's moments are cut by rows for each tensor rank, even if split by columns."""

    def optimizer_layout(self, entries: Mapping[str, Entry]) -> Boxes:
        return {
            key: (self.cut(box), dtype)
            for key, (box, dtype) in super().optimizer_layout(entries).items()
        }

    def cut(self, box: ShardSpec) -> ShardSpec:
        """Return a box of as many elements in whole rows."""
        if not self.foreign or len(box.shape) < 2 or box.shape[1] == box.global_shape[1]:
            return box
        rows = box.global_shape[0] // self.layout.tensor
        shape = (rows, *box.global_shape[1:])
        assert math.prod(shape) == math.prod(box.shape)
        return replace(box, offset=(rows * self.layout.here.tensor, 0), shape=shape)

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        if value.dim():
            value = value.view(weight.box.shape)
        super().restore_state(optimizer, weight, field, value)


@mutant("checkpoint.partner_pp", group=GROUP, world=2)
class ForeignStepOfFirstStage(KnowsWriter):
    """The step count of another engine's optimizer is restored on a pipeline's first stage only."""

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        lost = self.foreign and field == "step" and self.layout.here.stage > 0
        super().restore_state(optimizer, weight, field, torch.zeros_like(value) if lost else value)


@mutant("checkpoint.partner_tp_pp", group=GROUP, world=4)
class MomentsAtPlaceOfStage(LoopbackEngine):
    """Moments under tp and pp are read at the stage's number instead of the tensor rank's."""

    def optimizer_layout(self, entries: Mapping[str, Entry]) -> Boxes:
        return {
            key: (self.moved(box), dtype)
            for key, (box, dtype) in super().optimizer_layout(entries).items()
        }

    def moved(self, box: ShardSpec) -> ShardSpec:
        """Return the box of the tensor-parallel rank with this stage's number."""
        if self.layout.stages != self.layout.tensor or box.is_empty:
            return box
        offset = [
            0 if own == whole else own * self.layout.here.stage
            for own, whole in zip(box.shape, box.global_shape, strict=True)
        ]
        return replace(box, offset=tuple(offset))


@mutant("checkpoint.partner_ep", group="ep", world=2)
class ForeignExpertsReversed(KnowsWriter):
    """Another engine's expert moments are read in the reverse order of a rank's experts."""

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.shape.experts // self.layout.expert

        def other(key: str) -> str:
            if not (self.foreign and self.layout.expert > 1 and key.startswith("optim.")):
                return key
            return re.sub(
                r"experts\.(\d+)",
                lambda m: f"experts.{int(m[1]) // own * own + own - 1 - int(m[1]) % own}",
                key,
            )

        super()._install_state({key: tensors[other(key)] for key in tensors})
