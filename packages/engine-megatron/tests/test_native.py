"""Megatron's own checkpoint format.

A checkpoint loads bit for bit in its layout and is refused in others. It is checked before it is
read, and a save that fails leaves none.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_api import OptimizerConfig
from engine_api.config import LoraConfig, Precision
from engine_api.errors import CheckpointCorrupt, ConfigError
from engine_api.manifest import read_manifest, seal
from engine_api.weights import assemble
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.ranks import RankError, RankPool
from engine_megatron.native import check_index
from engine_megatron.options import megatron_options

BF16 = {"precision": Precision(compute="bfloat16")}
BF16_MASTERS = {"precision": Precision(compute="bfloat16", master="bfloat16")}
LORA = {"lora": LoraConfig(rank=2, target_modules=["q_proj", "down_proj"])}
SGD = {"optimizer": OptimizerConfig(name="torch.optim.SGD", lr=1e-2, kwargs={"momentum": 0.9})}
DEEP = {"num_layers": 4, "vocab_size": 251, "num_heads": 8, "num_kv_heads": 4}
# Parallelism of two ranks, changes of the configuration, and whether the model has experts.
RESUMES = [
    ({"dp_shard": 2}, {}, False),
    ({"dp_shard": 2}, BF16, False),
    ({"dp_shard": 2}, BF16_MASTERS, False),
    ({"dp_shard": 2}, SGD | BF16, False),
    ({"dp_shard": 2}, LORA | BF16, False),
    ({"tp": 2}, {}, False),
    ({"pp": 2}, BF16, False),
    ({"pp": 2}, {"options": {"virtual_stages": 2}}, False),
    ({"ep": 2}, BF16, True),
]

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(tied=True, **DEEP)))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_checkpoint(
            tmp_path_factory.mktemp("experts"), TinyModel(family="qwen3_moe", num_experts=8, **DEEP)
        )
    )


@pytest.fixture(scope="module")
def saved(pool: RankPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Write a checkpoint with two data-parallel ranks, and return it and the results of its run."""
    folder = tmp_path_factory.mktemp("saved") / "step-2"
    return folder, pool.run(
        "native_ranks:run_uninterrupted",
        path=model,
        parallelism={"dp_shard": 2},
        folder=str(folder),
    )


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Path:
    """Copy the checkpoint, so that it can be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "step-2"))


def assemble_state(rows: Any) -> dict[str, torch.Tensor]:
    """Return whole tensors, from the states of all ranks."""
    return {
        key: assemble([row[key] for row in rows if key in row])
        for key in {key for row in rows for key in row}
    }


def assert_same_bits(got: Any, want: Any, about: str) -> None:
    found = assemble_state(got)
    exact = assemble_state(want)
    assert set(found) == set(exact)
    assert [key for key in exact if not torch.equal(found[key], exact[key])] == [], about


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [LORA | BF16, pytest.param(LORA | BF16 | SGD, marks=pytest.mark.nightly)]
)
def test_frozen_weights_keep_their_masters(
    pool: RankPool, model: str, tmp_path: Path, config: Any
) -> None:
    other = write_checkpoint(tmp_path / "other", TinyModel(tied=True, seed=1, **DEEP))
    want = [load_file(Path(path, "model.safetensors")) for path in (model, other)]
    for before, after, rounded in pool.run(
        "native_ranks:pass_base",
        path=model,
        other=str(other),
        folder=str(tmp_path / "step-1"),
        **config,
    ):
        for name in after:
            assert torch.equal(before[name], want[0][name]), name
            assert torch.equal(after[name], want[1][name]), name
            assert torch.equal(rounded[name], want[1][name].bfloat16()), name


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "config", "moe"), RESUMES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    pool: RankPool,
    model: str,
    experts: str,
    tmp_path: Path,
    parallelism: Any,
    config: Any,
    moe: bool,
) -> None:
    about = {
        "path": experts if moe else model,
        "parallelism": parallelism,
        "folder": str(tmp_path / "step-2"),
    } | config
    whole = pool.run("native_ranks:run_uninterrupted", **about)
    again = pool.run("native_ranks:resume", **about)
    for moment in (0, 1):
        assert_same_bits(
            [row[moment] for row in again], [row[moment] for row in whole], f"state {moment}"
        )
    assert [row[2] for row in again] == [row[2] for row in whole]
    assert read_manifest(tmp_path / "step-2").state == "megatron"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step-2"]


@pytest.mark.slow
def test_other_data_and_context_parallel_ranks_load_it(
    pool: RankPool, one: RankPool, model: str, saved: Any, tmp_path: Path
) -> None:
    folder, whole = saved
    ((loaded, after, figures),) = one.run(
        "native_ranks:resume", path=model, parallelism={}, folder=str(folder)
    )
    assert_same_bits([loaded], [row[0] for row in whole], "loaded")
    exact = assemble_state([row[1] for row in whole])
    for key, tensor in assemble_state([after]).items():
        torch.testing.assert_close(
            tensor, exact[key], atol=2e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
    torch.testing.assert_close(figures, whole[0][2], atol=1e-5, rtol=1e-5)
    alone = one.run(
        "native_ranks:run_uninterrupted",
        path=model,
        parallelism={},
        folder=str(tmp_path / "step-2"),
    )
    for spread in ({"dp_shard": 2}, {"cp": 2}):
        rows = pool.run(
            "native_ranks:resume", path=model, parallelism=spread, folder=str(tmp_path / "step-2")
        )
        assert_same_bits([row[0] for row in rows], [row[0] for row in alone], str(spread))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrote", "reads", "made"),
    [
        (BF16, BF16_MASTERS, {"checkpoint": "megatron"}),
        (BF16_MASTERS, BF16, {"checkpoint": "megatron"}),
        ({}, BF16_MASTERS, {"checkpoint": "portable"}),
        (BF16_MASTERS, {}, {"checkpoint": "portable"}),
        (BF16_MASTERS, BF16, {"checkpoint": "megatron"} | SGD),
    ],
)
def test_moments_come_in_the_dtype_that_the_optimizer_holds(
    pool: RankPool, model: str, tmp_path: Path, wrote: Any, reads: Any, made: Any
) -> None:
    rows = pool.run(
        "native_ranks:carry_over",
        path=model,
        parallelism={"dp_shard": 2},
        folder=str(tmp_path / "step-2"),
        wrote=wrote | made,
        reads=reads | made,
    )
    saved = assemble_state([row[0] for row in rows])
    loaded = assemble_state([row[1] for row in rows])
    assert set(saved) == set(loaded)
    assert [
        key for key in saved if not torch.equal(loaded[key], saved[key].to(loaded[key].dtype))
    ] == []
    for _, _, (own, *after), version in rows:
        assert (after, version) == ([own, own], 3)


@pytest.mark.slow
def test_an_engine_without_an_optimizer_loads_the_masters(
    one: RankPool, model: str, saved: Any
) -> None:
    folder, whole = saved
    ((loaded, _, _),) = one.run(
        "native_ranks:resume", path=model, parallelism={}, folder=str(folder), optimizer=None
    )
    exact = assemble_state([row[0] for row in whole])
    assert loaded
    assert all(torch.equal(tensor, exact[key]) for key, (tensor, _) in loaded.items())


def test_a_run_begins_again(pool: RankPool, model: str, tmp_path: Path) -> None:
    """The checkpoint has no moments, so the engine's own are dropped."""
    about = {"path": model, "parallelism": {"dp_shard": 2}, "folder": str(tmp_path / "step-0")}
    for first, again in pool.run("native_ranks:begin_again", **about):
        assert first == again


def test_a_manifest_lists_all_files(saved: Any) -> None:
    manifest = read_manifest(saved[0])
    files = {str(file.relative_to(saved[0])) for file in saved[0].rglob("*") if file.is_file()}
    assert files == {*manifest.files, "manifest.json", "manifest.sha256"}
    assert (manifest.format, manifest.step, manifest.engine) == (2, 2, "engine-megatron")
    assert {key.rpartition(".")[2] for key in manifest.tensors if key.startswith("optim.")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


@pytest.mark.parametrize("other", [{"tp": 2}, {"pp": 2}])
def test_another_layout_is_refused(pool: RankPool, model: str, saved: Any, other: Any) -> None:
    for kind, text, same in pool.run(
        "native_ranks:load_refused", path=model, parallelism=other, folder=str(saved[0])
    ):
        assert (kind, same) == ("CheckpointMismatch", True)
        assert "2 ranks wrote it with pp 1, dp 2" in text
        assert "checkpoint: portable" in text


@pytest.mark.slow
def test_another_model_is_refused(pool: RankPool, saved: Any, tmp_path: Path) -> None:
    for name, model in (
        ("deep", TinyModel(**DEEP | {"num_layers": 2})),
        ("wide", TinyModel(**DEEP | {"vocab_size": 256})),
    ):
        path = str(write_checkpoint(tmp_path / name, model))
        found = pool.run(
            "native_ranks:load_refused",
            path=path,
            parallelism={"dp_shard": 2},
            folder=str(saved[0]),
        )
        assert [(kind, same) for kind, _, same in found] == [("CheckpointMismatch", True)] * 2


def test_another_engine_refuses_it(model: str, saved: Any) -> None:
    pytest.importorskip("engine_fsdp")
    from engine_api import EngineConfig, EngineRegistry, ModelSource
    from engine_api.errors import CheckpointMismatch

    engine = EngineRegistry.create(
        backend="fsdp2", device="cpu", config=EngineConfig(model=ModelSource(path=model))
    )
    engine.initialize()
    with pytest.raises(CheckpointMismatch, match="a format of engine-megatron's own") as caught:
        engine.load_checkpoint(saved[0])
    engine.close()
    assert "save it again as portable" in str(caught.value)


class Runs:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "it-ran"),)


def alter_a_byte(folder: Path) -> None:
    file = next(folder.glob("state/__1_*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def replace_file(folder: Path, data: bytes, name: str = "state/.metadata") -> None:
    """Replace a file of a checkpoint, and its checksum."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    seal(folder)


def pickle_with_torch(what: Any) -> bytes:
    """Return an object in torch's older format, which other bytes may follow."""
    buffer = io.BytesIO()
    torch.save(what, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def make_tensors_run(folder: Path) -> None:
    """Replace each tensor by a pickle that runs code."""
    files: dict[str, bytes] = {}
    index = pickle.loads((folder / "state/.metadata").read_bytes())
    for place in sorted(index.storage_data.values(), key=lambda place: place.offset):
        data = pickle_with_torch(Runs(folder)).ljust(place.length, b".")
        assert len(data) == place.length
        files[place.relative_path] = (
            files.get(place.relative_path, b"").ljust(place.offset, b".") + data
        )
    for name, data in files.items():
        replace_file(folder, data, f"state/{name}")


DAMAGE = {
    "altered": (alter_a_byte, "checksum differs"),
    "a file is gone": (
        lambda folder: next(folder.glob("state/__0_*")).unlink(),
        "a file is missing",
    ),
    "no index": (lambda folder: (folder / "state/.metadata").unlink(), "a file is missing"),
    "an index that runs": (
        lambda folder: replace_file(folder, pickle.dumps(Runs(folder))),
        "not one that this engine wrote",
    ),
    "a common file that runs": (
        lambda folder: replace_file(folder, pickle_with_torch(Runs(folder)), "state/common.pt"),
        "Weights only load failed",
    ),
    "tensors that run": (make_tensors_run, "Weights only load failed"),
    "an index of nothing": (
        lambda folder: replace_file(folder, pickle.dumps({})),
        "not one that this engine wrote",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_refused_and_changes_nothing(
    pool: RankPool, model: str, copied: Path, damage: str
) -> None:
    harm, why = DAMAGE[damage]
    harm(copied)
    found = pool.run(
        "native_ranks:load_refused", path=model, parallelism={"dp_shard": 2}, folder=str(copied)
    )
    assert all(same for _, _, same in found)
    assert {kind for kind, _, _ in found} <= {"CheckpointCorrupt", "RankFailure"}
    assert [text for _, text, _ in found if why not in text] == []
    assert not (copied / "it-ran").exists()


def test_an_index_of_objects_is_refused(tmp_path: Path) -> None:
    """Torch unpickles such objects without any check."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    path = tmp_path / ".metadata"
    path.write_bytes(
        pickle.dumps(Metadata(state_dict_metadata={"model.x": BytesStorageMetadata()}))
    )
    with pytest.raises(CheckpointCorrupt, match="BytesStorageMetadata"):
        check_index(path)


def test_a_full_disk_leaves_nothing(pool: RankPool, model: str, tmp_path: Path) -> None:
    about = {"path": model, "parallelism": {"dp_shard": 2}, "folder": str(tmp_path / "step-1")}
    for kind, left, after in pool.run("native_ranks:save_on_a_full_disk", **about):
        assert (kind, left, after) == ("CheckpointWriteError, True", [], 1)


@pytest.mark.slow
def test_a_killed_save_leaves_no_checkpoint(pool: RankPool, model: str, tmp_path: Path) -> None:
    about = {"path": model, "parallelism": {"dp_shard": 2}, "folder": str(tmp_path / "step-2")}
    with RankPool(2, deadline=60.0) as ranks, pytest.raises(RankError):
        ranks.run("native_ranks:die_while_saving", **about)
    assert {file.name for file in tmp_path.iterdir()} <= {"step-2.partial"}
    pool.run("native_ranks:run_uninterrupted", **about)
    pool.run("native_ranks:resume", **about)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step-2"]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="megatron"):
        megatron_options({"checkpoint": "megatrn"})
    assert megatron_options({}).checkpoint == "portable"
