"""Damaged checkpoints, which are refused without a change or load as they were saved."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import given, note
from hypothesis import strategies as st

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, sft_loss
from engine_api.errors import CheckpointError
from engine_api.manifest import seal
from engine_conformance.fixtures import TinyModel, write_checkpoint

BATCH = Batch.pack([{"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}])
MODEL = TinyModel(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
# Values put in the place of expected ones.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "/etc/passwd",
            "../good/manifest.json",
            "state/00000.safetensors",
            "rank-00000.json",
            "bfloat16",
        ]
    ),
    st.lists(st.integers(-1, 700), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def look(engine: Any) -> dict[str, Any]:
    """Return all state that a load may change."""
    state = {key: tensor.detach().clone() for key, (tensor, _) in engine.state_shards().items()}
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - user code draws from it
    generators = (random.getstate(), name, keys.tolist(), rest, torch.get_rng_state())
    return {**state, "version": engine.weight_version, "generators": generators}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


@dataclass
class World:
    """An engine whose state differs from the good checkpoint's, and both states."""

    engine: Any
    folder: Path
    good: dict[str, Any]
    other: dict[str, Any]

    def damaged(self) -> Path:
        """Copy the good checkpoint, and put the engine into the other state."""
        self.back()
        place = self.folder / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / "step-2", place / "step-2")
        (place / "latest").write_text("step-2")
        return place

    def load(self, place: Path) -> bool:
        """Return whether the checkpoint was loaded, and fail for errors outside of the contract."""
        try:
            self.engine.load_checkpoint(place)
        except CheckpointError as error:
            note(str(error))
            assert same(look(self.engine), self.other), "a failed load has changed something"
            return False
        return True

    def back(self) -> None:
        """Put the engine into the other state."""
        self.engine.load_checkpoint(self.folder / "step-3")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = ModelSource(path=str(write_checkpoint(folder / "model", MODEL)))
    config = EngineConfig(model=model, optimizer=OptimizerConfig(lr=1e-2))
    engine: Any = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    looks = []
    for step, name in ((2, "step-2"), (1, "step-3")):
        for _ in range(step):
            engine.train_batch(BATCH, sft_loss)
        torch.rand(step)
        engine.save_checkpoint(folder / name, extra={"epoch": 1}).result()
        looks.append(look(engine))
    yield World(engine=engine, folder=folder, good=looks[0], other=looks[1])
    engine.close()


# --- files that something has damaged ------------------------------------------------------------


def files_of(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def flip(place: Path, draw: Callable[..., Any]) -> None:
    path = draw(st.sampled_from(files_of(place)))
    data = bytearray(path.read_bytes())
    if data:
        bit = draw(st.integers(0, 8 * len(data) - 1))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)


def truncate(place: Path, draw: Callable[..., Any]) -> None:
    path = draw(st.sampled_from(files_of(place)))
    path.write_bytes(path.read_bytes()[: draw(st.integers(0, max(0, path.stat().st_size - 1)))])


def append(place: Path, draw: Callable[..., Any]) -> None:
    path = draw(st.sampled_from(files_of(place)))
    path.write_bytes(path.read_bytes() + draw(st.binary(min_size=1, max_size=9)))


def delete(place: Path, draw: Callable[..., Any]) -> None:
    draw(st.sampled_from(files_of(place))).unlink()


def swap(place: Path, draw: Callable[..., Any]) -> None:
    one, other = (draw(st.sampled_from(files_of(place))) for _ in range(2))
    one_data = one.read_bytes()
    other_data = other.read_bytes()
    one.write_bytes(other_data)
    other.write_bytes(one_data)


def rename(place: Path, draw: Callable[..., Any]) -> None:
    path = draw(st.sampled_from(files_of(place)))
    name = draw(st.sampled_from(["manifest.json", "latest", "rank-00001.json", "x"]))
    path.rename(path.with_name(name))


def exchange(place: Path, draw: Callable[..., Any]) -> None:
    """Replace a file by that of another step, whose tensors are not copied."""
    name = draw(st.sampled_from(["manifest.json", "manifest.sha256", "rank-00000.json"]))
    shutil.copyfile(place.parent / "step-3" / name, place / "step-2" / name)


def alter_json(place: Path, draw: Callable[..., Any]) -> None:
    path = draw(st.sampled_from([place / "step-2/manifest.json", place / "step-2/rank-00000.json"]))
    alter(path, draw)


DAMAGES = (flip, truncate, append, delete, swap, rename, exchange, alter_json)


@pytest.mark.slow
@fuzz()
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_loads_as_it_was_saved(
    world: World, data: st.DataObject
) -> None:
    place = world.damaged()
    for damage in data.draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=2)):
        note(damage.__name__)
        if files_of(place):
            try:
                damage(place, data.draw)
            except (OSError, ValueError) as error:
                # The first damage may have removed what the second one needs.
                note(repr(error))
    if world.load(place):
        assert same(look(world.engine), world.good), "it loaded as something else"


# --- checkpoints that were edited and sealed again
# -------------------------------------------------


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value, with four items of each list at most."""
    inside: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inside = [place for key, part in value.items() for place in paths_in(part, (*path, key))]
    elif isinstance(value, list):
        first = enumerate(value[:4])
        inside = [place for index, part in first for place in paths_in(part, (*path, index))]
    return [path, *inside] if path else inside


def alter(path: Path, draw: Callable[..., Any]) -> None:
    """Delete, rename, add or replace something in a JSON file."""
    raw = json.loads(path.read_text())
    where = draw(st.sampled_from(paths_in(raw)))
    parent = raw
    for part in where[:-1]:
        parent = parent[part]
    kind = draw(st.sampled_from(["delete", "replace", "rename", "add", "nudge"]))
    note(f"{path.name}: {kind} {where}")
    last = where[-1]
    if kind == "delete":
        del parent[last]
    elif kind == "replace":
        parent[last] = draw(VALUES)
    elif kind == "nudge" and type(parent[last]) is int:
        parent[last] += draw(st.sampled_from([-1, 1]))
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(sorted(parent)) | st.text(max_size=5))] = parent.pop(last)
    elif isinstance(parent, dict):
        parent[draw(st.text(max_size=5))] = draw(VALUES)
    else:
        parent.insert(last, draw(VALUES))
    path.write_text(json.dumps(raw))


def reseal(folder: Path) -> None:
    """Set the manifest's sizes and checksums to those of the current files."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    listed = raw.get("files")
    for name, about in listed.items() if isinstance(listed, dict) else ():
        if not isinstance(about, dict) or "\0" in name:
            continue
        file = folder / name
        if file.is_file() and file.is_relative_to(folder):
            data = file.read_bytes()
            about.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    path.write_text(json.dumps(raw))
    seal(folder)


def alter_tensors(folder: Path, draw: Callable[..., Any]) -> None:
    """Save tensors with shapes, dtypes and names that differ from the manifest."""
    from safetensors.torch import load_file, save_file

    path = folder / "state/00000.safetensors"
    tensors = load_file(path)
    key = draw(st.sampled_from(sorted(tensors)))
    change = draw(st.sampled_from(["gone", "flat", "integers", "half", "longer", "renamed"]))
    note(f"{key} {change}")
    tensor = tensors.pop(key)
    changed = {
        "gone": {},
        "flat": {key: tensor.reshape(-1)},
        "integers": {key: tensor.to(torch.int32)},
        "half": {key: tensor.to(torch.float16)},
        "longer": {key: torch.cat([tensor.reshape(-1)] * 2)},
        "renamed": {f"{key}x": tensor},
    }
    save_file(tensors | changed[change], path)


@pytest.mark.slow
@fuzz()
@given(data=st.data())
def test_an_edited_checkpoint_is_refused_or_leaves_an_engine_that_trains(
    world: World, data: st.DataObject
) -> None:
    place = world.damaged() / "step-2"
    for _ in range(data.draw(st.integers(1, 2))):
        part = data.draw(st.sampled_from(["manifest", "manifest", "generators", "tensors"]))
        if part == "tensors":
            alter_tensors(place, data.draw)
        else:
            alter(place / ("manifest.json" if part == "manifest" else "rank-00000.json"), data.draw)
    reseal(place)
    if world.load(place):
        world.engine.train_batch(BATCH, sft_loss)
        assert [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        world.back()
        assert same(look(world.engine), world.other)
