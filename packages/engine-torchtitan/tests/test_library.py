"""torchtitan's global variables are as they were, after its import and after the last engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_api import Batch, EngineConfig, EngineRegistry, Memory, ModelSource
from engine_api.errors import ConfigError
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_torchtitan import library
from engine_torchtitan.library import Hold

IMPORT = """
import logging, os, sys
import torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode

constructor = FakeTensorMode.__init__
environment = dict(os.environ)
handlers = list(logging.getLogger().handlers)
level = logging.getLogger().level
threads = torch.autograd.is_multithreading_enabled()

import engine_torchtitan.engine

assert dict(os.environ) == environment
assert logging.getLogger().handlers == handlers
assert logging.getLogger().level == level
assert torch.autograd.is_multithreading_enabled() == threads
assert not torch.distributed.is_initialized()
assert FakeTensorMode.__init__ is constructor
assert "torchtitan.trainer" not in sys.modules
kernels = "torchtitan.distributed.minimal_async_ep.kernels"
assert kernels not in sys.modules or "triton" in sys.modules

from torchtitan.distributed.utils import get_spmd_backend
assert get_spmd_backend() == "spmd_types"
"""
# Packages that torchtitan asks for, or imports, and that this engine does not need.
UNUSED = ("datasets", "torchdata", "triton", "wandb")
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({UNUSED!r})
{IMPORT}
"""
# A name that torch has from 2.13 on.
OLDER = f"""
import torch.distributed.fsdp as fsdp
vars(fsdp).pop("DataParallelMeshDims", None)
{IMPORT}
assert not hasattr(fsdp, "DataParallelMeshDims")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [IMPORT, WITHOUT, OLDER],
    ids=["alone", "without what it does not need", "beside an older torch"],
)
def test_its_import_prints_nothing_and_changes_nothing_else(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_kernel_in_triton_says_what_it_needs() -> None:
    with pytest.raises(ModuleNotFoundError, match="needs triton"):
        library._refuse_kernel()


def test_a_backend_that_names_dimensions_of_a_mesh_says_which_torch_it_needs() -> None:
    with pytest.raises(ImportError, match=r"came with torch 2\.13"):
        library._AbsentMeshDims(shard="fsdp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", TinyModel(family="qwen3"))


def create(folder: Path, **given: Any) -> Any:
    config = EngineConfig(model=ModelSource(path=str(folder)), **given)
    return EngineRegistry.create(backend="torchtitan", device="cpu", config=config)


def test_the_last_engine_that_is_closed_restores_the_backend(folder: Path) -> None:
    batch = Batch.pack([{"input_ids": [5, 6, 7]}])
    before = library.get_spmd_backend()
    first, second = create(folder), create(folder, memory=Memory(recompute="full"))
    first.initialize()
    second.initialize()
    assert library.get_spmd_backend() == library.SPMD_BACKEND
    want = first.infer_batch(batch).log_probs
    first.close()
    assert library.get_spmd_backend() == library.SPMD_BACKEND
    assert float((second.infer_batch(batch).log_probs - want).abs().max()) == 0
    second.close()
    second.close()
    assert library.get_spmd_backend() == before
    assert Hold._count == 0


def test_an_engine_that_was_not_built_holds_nothing(tmp_path: Path) -> None:
    before = library.get_spmd_backend()
    with pytest.raises(ConfigError):
        create(tmp_path / "absent").initialize()
    assert library.get_spmd_backend() == before
    assert Hold._count == 0
