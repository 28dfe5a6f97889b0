"""A right engine that connects its ranks at the first use of a group, as NCCL does."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from engine_loopback.engine import LoopbackEngineWithLMHead
from engine_loopback.plugin import PLUGIN as LOOPBACK

__all__ = ["PLUGIN", "ConnectingEngine"]

# NCCL's files of shared memory are larger than this.
_SHARED = 2**20
PLUGIN = replace(
    LOOPBACK,
    rows=tuple(
        replace(row, backends=("connecting",), target=f"{__name__}:ConnectingEngine")
        for row in LOOPBACK.rows[:1]
    ),
)


class ConnectingEngine(LoopbackEngineWithLMHead):
    """The loopback engine with a file of shared memory, written before the first folder."""

    connected = False

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Connect, and write the folder."""
        if not self.connected:
            with tempfile.TemporaryFile() as shared:
                shared.write(bytes(_SHARED))
            self.connected = True
        super().save_hf(directory, dtype=dtype)
