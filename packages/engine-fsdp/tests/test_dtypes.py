"""Checkpoints between engines whose weights differ in dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import CheckpointMismatch
from engine_conformance.fixtures import write_checkpoint

BATCH = Batch.pack([{"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}])


class Counts(torch.optim.SGD):
    """An optimizer whose state holds a number that is no tensor, so that no state can be loaded."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["count"] = 1


PRECISION = {
    "float32": Precision(),
    "bfloat16": Precision(master="bfloat16", compute="bfloat16", reduce="bfloat16"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "model"))


def make(folder: Path, dtype: str, optimizer: OptimizerConfig) -> Any:
    config = EngineConfig(
        model=ModelSource(path=str(folder)), optimizer=optimizer, precision=PRECISION[dtype]
    )
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    return engine


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, (tensor, _) in engine.state_shards().items()}


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(lr=1e-2),
        OptimizerConfig(name="torch.optim.SGD", lr=1e-2, kwargs={"momentum": 0.9}),
    ],
    ids=lambda optimizer: optimizer.name,
)
@pytest.mark.parametrize(("wrote", "reads"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_come_in_the_dtype_that_the_optimizer_holds(
    folder: Path, tmp_path: Path, wrote: str, reads: str, optimizer: OptimizerConfig
) -> None:
    first = make(folder, wrote, optimizer)
    for _ in range(2):
        first.train_batch(BATCH, sft_loss)
    first.save_checkpoint(tmp_path / "step-2").result()
    saved = state_of(first)
    first.close()
    engine = make(folder, reads, optimizer)
    engine.train_batch(BATCH, sft_loss)
    own = {key: tensor.dtype for key, tensor in state_of(engine).items()}
    assert engine.load_checkpoint(tmp_path / "step-2").step == 2
    loaded = state_of(engine)
    assert {key: tensor.dtype for key, tensor in loaded.items()} == own
    assert [key for key in saved if not torch.equal(loaded[key], saved[key].to(own[key]))] == []
    assert engine.train_batch(BATCH, sft_loss).weight_version == 3
    assert {key: tensor.dtype for key, tensor in state_of(engine).items()} == own
    engine.close()


def test_weights_alone_are_loaded_beside_an_optimizer_whose_state_is_no_tensor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "Counts", Counts, raising=False)
    first = make(folder, "float32", OptimizerConfig(lr=1e-2))
    # Before its first step.
    first.save_checkpoint(tmp_path / "step-0").result()
    first.train_batch(BATCH, sft_loss)
    first.save_checkpoint(tmp_path / "step-1").result()
    first.close()
    engine = make(folder, "float32", OptimizerConfig(name="torch.optim.Counts", lr=1e-2))
    assert engine.load_checkpoint(tmp_path / "step-0").step == 0
    with pytest.raises(CheckpointMismatch, match="another optimizer"):
        engine.load_checkpoint(tmp_path / "step-1")
    engine.close()
