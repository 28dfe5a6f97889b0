"""Fixtures shared by the suite's own tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_conformance.fixtures import TinyModel, write_checkpoint

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a function that writes a tiny checkpoint once per set of arguments.

    The function returns the checkpoint's folder.
    """
    written: dict[str, Path] = {}

    def write(**kwargs: Any) -> Path:
        model = TinyModel(**kwargs)
        if repr(model) not in written:
            written[repr(model)] = write_checkpoint(tmp_path_factory.mktemp("model"), model)
        return written[repr(model)]

    return write
