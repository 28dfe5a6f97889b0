"""FP8 in the products of VeOmni's classes, which are those of transformers' on engine-fsdp.

Tests that need torchao emulate its products on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ignore_reads_of_compile
from float8_peers import make_batch
from torch import Tensor
from torchao_marks import needs_torchao

import engine_torch.float8
from engine_api import (
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_veomni.plugin import NPU, PLUGIN


def create(
    folder: Path, backend: str = "veomni", recipe: str = "rowwise", compiles: bool = False
) -> Any:
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None),
        precision=Precision(compute="float8"),
        memory=Memory(compile=compiles),
        options={"float8_recipe": recipe, "float8_emulate": True},
    )
    return EngineRegistry.create(backend=backend, device="cpu", config=config)


def run(engine: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs, and the weights after a step of SGD."""
    engine.initialize()
    assert engine.resolved()["precision.compute"] == "float8"
    outputs = engine.infer_batch(make_batch()).log_probs
    engine.train_batch(make_batch(), sft_loss)
    after = {name: one.clone() for name, one in engine.get_per_tensor_param()}
    engine.close()
    return outputs, after


@needs_torchao
def test_the_engine_declares_fp8_with_the_tested_torchao() -> None:
    assert "fp8" in PLUGIN.capabilities
    assert "fp8" not in NPU.capabilities


@needs_torchao
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probs_and_updates_are_those_of_engine_fsdp(
    tmp_path: Path, family: str, recipe: str
) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", TinyModel(family=family)))
    found, want = (run(create(folder, backend, recipe)) for backend in ("veomni", "fsdp2"))
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], one) for name, one in want[1].items())


@needs_torchao
@pytest.mark.slow
@ignore_reads_of_compile
def test_compiled_blocks_compute_what_those_of_engine_fsdp_do(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", TinyModel(family="qwen3")))
    # A CPU's compiler has no casts of rows.
    found, want = (
        run(create(folder, backend, "tensorwise", compiles=True)) for backend in ("veomni", "fsdp2")
    )
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], one) for name, one in want[1].items())


@needs_torchao
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_refused(tmp_path: Path, family: str) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", TinyModel(family=family)))
    engine = create(folder)
    with pytest.raises(ConfigError, match="for a model with experts") as caught:
        engine.initialize()
    assert caught.value.field == "precision.compute"


def test_without_the_tested_torchao_float8_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_torch.float8, "find_torchao_problem", lambda: "not there")
    with pytest.raises(UnsupportedCapability, match=r"not there; torchao 0\.17\.0") as caught:
        create(Path("any"))
    assert "engine-veomni[core,float8]" in caught.value.remedy
