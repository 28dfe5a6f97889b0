"""Models, options and checkpoints that the engine must refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    ModelSource,
    OptimizerConfig,
    Precision,
    hf_folder,
    sft_loss,
)
from engine_api.errors import CheckpointMismatch, CheckpointWriteError, ConfigError
from engine_conformance.fixtures import write_checkpoint

BATCH = Batch.pack([{"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "model"))


def make(folder: Path, **config: Any) -> Any:
    config = {"optimizer": OptimizerConfig(lr=1e-2)} | config
    engine = EngineRegistry.create(
        backend="fsdp2",
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder)), **config),
    )
    engine.initialize()
    return engine


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_quantized_weights_are_not_read_without_their_scales(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantized"):
        make(folder)


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "nonesuch"}', '{"model_type": "vit"}'])
def test_a_config_that_is_of_no_use(folder: Path, text: str | None) -> None:
    file = folder / "config.json"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        make(folder)
    assert caught.value.field == "model.path"
    assert caught.value.remedy


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if "down_proj" in n)
    tensors[name][1, 1] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        make(folder)
    assert name in caught.value.why


@pytest.mark.parametrize("damage", ["truncated", "missing", "index"])
def test_damage_behind_an_index(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(file), file.name)}))
    if damage == "missing":
        file.unlink()
    else:
        broken = file if damage == "truncated" else index
        broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        make(folder)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_that_would_be_lost(folder: Path, target: str) -> None:
    with pytest.raises(ConfigError, match="cannot carry an adapter"):
        make(folder, lora=LoraConfig(rank=2, target_modules=["q_proj", target]))


def test_a_loss_that_wants_what_the_model_does_not_give(folder: Path) -> None:
    class Loss:
        needs = ("entropi",)

    engine = make(folder)
    with pytest.raises(ConfigError, match="entropi"):
        engine.train_batch(BATCH, Loss())
    assert engine.train_batch(BATCH, sft_loss).skipped is None


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(name="builtins.dict"),
        OptimizerConfig(kwargs={"foreach": True}),
    ],
)
def test_an_optimizer_that_cannot_be_made(folder: Path, optimizer: OptimizerConfig) -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        make(folder, optimizer=optimizer)


def test_the_state_of_another_optimizer_is_refused(folder: Path, tmp_path: Path) -> None:
    sgd = make(folder, optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"momentum": 0.9}))
    sgd.train_batch(BATCH, sft_loss)
    sgd.save_checkpoint(tmp_path / "sgd").result()
    engine = make(folder)
    with pytest.raises(CheckpointMismatch, match="momentum_buffer"):
        engine.load_checkpoint(tmp_path / "sgd")
    assert engine.train_batch(BATCH, sft_loss).weight_version == 1


def test_inference_that_fails_leaves_no_gathered_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank is wrapped in FSDP only where it casts its weights in each pass.
    mixed = Precision(compute="bfloat16")
    engine = make(folder, precision=mixed, options={"cast_each_pass": True})

    def fail(*_: Any, **__: Any) -> None:
        engine.module.unshard()
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.module), "outputs", fail)
        with pytest.raises(RuntimeError, match="boom"):
            engine.infer_batch(BATCH)
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in engine.module.parameters())


def test_a_full_disk_leaves_the_model_folder_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(folder)
    engine.save_hf(tmp_path / "hf")
    before = {p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()}
    engine.train_batch(BATCH, sft_loss)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_folder, "require_room", full)
    with pytest.raises(CheckpointWriteError, match="No space"):
        engine.save_hf(tmp_path / "hf")
    assert {p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()} == before
    assert not list(tmp_path.glob("*.partial"))
