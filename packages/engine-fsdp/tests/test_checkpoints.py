"""The contents that a checkpoint must have for this engine to load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import CheckpointCorrupt, CheckpointMismatch
from engine_api.manifest import fingerprint, seal
from engine_conformance.fixtures import write_checkpoint

BATCH = Batch.pack([{"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}])
NORM = "optim.model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "model"))


def make(folder: Path, optimizer: OptimizerConfig | None) -> Any:
    config = EngineConfig(model=ModelSource(path=str(folder)), optimizer=optimizer)
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    return engine


def saved(folder: Path, place: Path, optimizer: OptimizerConfig | None, steps: int = 2) -> Path:
    engine = make(folder, optimizer)
    for _ in range(steps):
        engine.train_batch(BATCH, sft_loss)
    engine.save_checkpoint(place).result()
    engine.close()
    return place


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, (tensor, _) in engine.state_shards().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def edit(
    place: Path, alter: Callable[[dict[str, Any]], object], name: str = "manifest.json"
) -> None:
    """Alter one of a checkpoint's JSON files, and update the checksums."""
    raw = json.loads((place / name).read_text())
    alter(raw)
    (place / name).write_text(json.dumps(raw))
    if name != "manifest.json":
        edit(place, lambda manifest: manifest["files"].update({name: fingerprint(place / name)}))
    seal(place)


ADAMW = OptimizerConfig(lr=1e-2)
PLAIN = OptimizerConfig(name="torch.optim.SGD", lr=1e-2)


@pytest.mark.parametrize("lacks", [f"{NORM}.step", f"{NORM}.exp_avg", f"{NORM}.", "optim."])
def test_a_checkpoint_that_lacks_optimizer_state_is_refused_by_name_and_changes_nothing(
    folder: Path, tmp_path: Path, lacks: str
) -> None:
    place = saved(folder, tmp_path / "step-2", ADAMW)
    manifest = json.loads((place / "manifest.json").read_text())
    gone = [key for key in manifest["tensors"] if key.startswith(lacks)]
    assert gone
    edit(place, lambda raw: [raw["tensors"].pop(key) for key in gone])
    engine = make(folder, ADAMW)
    before = state_of(engine)
    with pytest.raises(CheckpointMismatch) as caught:
        engine.load_checkpoint(place)
    assert min(gone) in caught.value.why
    assert "optimizer=False" in caught.value.remedy
    assert same(state_of(engine), before)
    assert engine.weight_version == 0


def test_all_but_the_optimizers_state_is_loaded_where_that_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    place = saved(folder, tmp_path / "step-2", ADAMW)
    whole = make(folder, ADAMW)
    alone = make(folder, ADAMW)
    whole.load_checkpoint(place)
    alone.train_batch(BATCH, sft_loss)
    alone.load_checkpoint(place, optimizer=False)
    weights = {key: value for key, value in state_of(whole).items() if key.startswith("model.")}
    assert same(state_of(alone), weights)
    assert alone.weight_version == 2
    alone.train_batch(BATCH, sft_loss)
    assert float(state_of(alone)[f"{NORM}.step"]) == 1


@pytest.mark.parametrize(
    ("wrote", "steps", "reads", "fits"),
    [
        (PLAIN, 2, PLAIN, True),
        (PLAIN, 2, None, True),
        (ADAMW, 2, None, True),
        (ADAMW, 0, ADAMW, True),
        (None, 0, ADAMW, True),
        (PLAIN, 2, ADAMW, False),
    ],
)
def test_state_is_asked_for_where_the_optimizer_keeps_some_and_has_made_a_step(
    folder: Path,
    tmp_path: Path,
    wrote: OptimizerConfig | None,
    steps: int,
    reads: OptimizerConfig | None,
    fits: bool,
) -> None:
    place = saved(folder, tmp_path / "step", wrote, steps)
    engine = make(folder, reads)
    if fits:
        assert engine.load_checkpoint(place).step == steps
    else:
        with pytest.raises(CheckpointMismatch, match="lacks optimizer state"):
            engine.load_checkpoint(place)


def test_a_weight_that_has_never_had_a_gradient_needs_no_state(
    folder: Path, tmp_path: Path
) -> None:
    """Torch's optimizers keep no state for a parameter without a gradient.

    An example is an expert that no token has reached.
    """
    engine = make(folder, ADAMW)
    frozen = next(entry for entry in engine.table if entry.name == "model.norm.weight").param
    clip = engine._clip_gradients

    def without(max_norm: float | None) -> float:
        frozen.grad = None
        return clip(max_norm)

    engine._clip_gradients = without
    engine.train_batch(BATCH, sft_loss)
    engine.save_checkpoint(tmp_path / "step-1").result()
    expected = state_of(engine)
    assert f"{NORM}.step" not in expected
    other = make(folder, ADAMW)
    other.load_checkpoint(tmp_path / "step-1")
    assert same(state_of(other), expected)


def test_a_moment_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    """A scalar in place of a moment would be installed, and would fail in the next step."""
    place = saved(folder, tmp_path / "step-2", ADAMW)

    def swap(raw: dict[str, Any]) -> None:
        tensors = raw["tensors"]
        tensors[f"{NORM}.exp_avg"]["shape"] = []
        tensors[f"{NORM}.exp_avg"]["shards"] = tensors[f"{NORM}.step"]["shards"]

    edit(place, swap)
    with pytest.raises(CheckpointMismatch, match=f"{NORM}.exp_avg has the shape"):
        make(folder, ADAMW).load_checkpoint(place)


GENERATORS = {
    "none": lambda raw: raw.clear(),
    "python": lambda raw: raw["python"][1].pop(),
    "numpy": lambda raw: raw["numpy"].__setitem__(2, 10**6),
    "torch": lambda raw: raw.update(torch="AAAA"),
    "kind": lambda raw: raw.update(torch=[1]),
}


@pytest.mark.parametrize("alter", GENERATORS.values(), ids=GENERATORS.keys())
def test_generators_that_cannot_be_restored_are_found_before_a_tensor_is_installed(
    folder: Path, tmp_path: Path, alter: Callable[[dict[str, Any]], object]
) -> None:
    place = saved(folder, tmp_path / "step-2", ADAMW)
    edit(place, alter, "rank-00000.json")
    engine = make(folder, ADAMW)
    before = state_of(engine)
    drawn = torch.get_rng_state()
    with pytest.raises(CheckpointCorrupt, match="generators cannot be restored"):
        engine.load_checkpoint(place)
    assert same(state_of(engine), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert engine.weight_version == 0


def test_inference_keeps_no_gathered_weights_that_a_checkpoint_would_not_reach(
    folder: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=ADAMW,
        # In a single dtype one rank would not be wrapped in FSDP.
        precision=Precision(compute="bfloat16"),
        memory=Memory(reshard_after_forward=False),
    )
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    want = engine.infer_batch(BATCH).log_probs
    engine.save_checkpoint(tmp_path / "step-0").result()
    engine.train_batch(BATCH, sft_loss)
    assert not torch.equal(engine.infer_batch(BATCH).log_probs, want)
    engine.load_checkpoint(tmp_path / "step-0")
    assert torch.equal(engine.infer_batch(BATCH).log_probs, want)
    engine.close()
