"""Tests of the portable checkpoint with several ranks: complete, atomic, checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_api import checkpoint
from engine_api.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    CheckpointWriteError,
    ConfigError,
    RankFailure,
)
from engine_api.manifest import Entry, Manifest, read_manifest, seal
from engine_api.weights import ShardSpec

WHOLE = {
    "model.a": torch.arange(35.0).view(7, 5),
    "optim.a.exp_avg": torch.arange(35.0).view(7, 5) / 7,
    "optim.a.step": torch.tensor(3.0),
    "model.b": torch.arange(6, dtype=torch.bfloat16),
}


def rows_of(key: str, rank: int, count: int) -> ShardSpec:
    """Return equal shards of dimension 0, the last ones short or empty.

    Scalars are copies.
    """
    shape = tuple(WHOLE[key].shape)
    if not shape:
        return ShardSpec.whole((), replica=rank)
    size = -(-shape[0] // count)
    low, high = min(rank * size, shape[0]), min(rank * size + size, shape[0])
    return ShardSpec(
        global_shape=shape, offset=(low, *[0] * (len(shape) - 1)), shape=(high - low, *shape[1:])
    )


def columns_of(key: str, rank: int, count: int) -> ShardSpec:
    shape = tuple(WHOLE[key].shape)
    if len(shape) < 2:
        return ShardSpec.whole(shape)
    low, high = shape[1] * rank // count, shape[1] * (rank + 1) // count
    return ShardSpec(global_shape=shape, offset=(0, low), shape=(shape[0], high - low))


def write(comm, folder: Path, step: int = 5, **extra):
    state = {
        k: (v[s.slices], s)
        for k, v in WHOLE.items()
        for s in [rows_of(k, comm.rank, comm.world_size)]
    }
    return checkpoint.write(
        folder,
        comm=comm,
        state=state,
        rank_state={"rank": comm.rank},
        step=step,
        engine="test",
        topology={"dp": comm.world_size},
        extra=extra,
    )


def read(comm, folder: Path, cut=columns_of, **changes):
    wanted = {k: (cut(k, comm.rank, comm.world_size), v.dtype) for k, v in WHOLE.items()} | changes
    found, manifest = checkpoint.find(folder, comm)
    tensors = checkpoint.read(found, manifest, comm=comm, layout=lambda entries: wanted)
    return manifest, tensors, checkpoint.read_rank_state(found, manifest, comm, comm.rank)


@pytest.fixture
def saved(tmp_path, ranks):
    """Write a checkpoint of two ranks at ``<folder>/step-5``."""
    assert [i.step for i in ranks(2, lambda comm: write(comm, tmp_path / "step-5", epoch=2))] == [
        5,
        5,
    ]
    return tmp_path


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (2, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("cut", [rows_of, columns_of])
def test_any_layout_reads_what_any_layout_wrote(tmp_path, ranks, writers, readers, cut):
    ranks(writers, lambda comm: write(comm, tmp_path / "x"))
    for rank, (manifest, tensors, rank_state) in enumerate(
        ranks(readers, lambda comm: read(comm, tmp_path, cut))
    ):
        assert manifest.world_size == writers
        assert rank_state == ({"rank": rank} if writers == readers else None)
        for key, whole in WHOLE.items():
            assert tensors[key].dtype == whole.dtype
            assert torch.equal(tensors[key], whole[cut(key, rank, readers).slices])


def test_what_a_checkpoint_leaves_on_disk(saved):
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step-5"]
    names = sorted(
        str(p.relative_to(saved / "step-5")) for p in (saved / "step-5").rglob("*") if p.is_file()
    )
    assert names == [
        "manifest.json",
        "manifest.sha256",
        "rank-00000.json",
        "rank-00001.json",
        "state/00000.safetensors",
        "state/00001.safetensors",
    ]
    manifest = read_manifest(saved / "step-5")
    assert (manifest.step, manifest.engine, manifest.extra) == (5, "test", {"epoch": 2})
    assert manifest.num_bytes == sum((saved / "step-5" / n).stat().st_size for n in names[2:])


def test_a_portable_manifest_is_as_earlier_releases_read_it(saved):
    raw = json.loads((saved / "step-5/manifest.json").read_text())
    assert raw["format"] == 1
    assert "state" not in raw


def own_format(comm, folder):
    """Write the files of an engine with a format of its own."""

    def save(partial):
        (partial / f"state/{comm.rank}.own").write_bytes(b"1234")
        return {f"of.{comm.rank}": Entry(dtype="float32", shape=(1,), shards=())}, [
            f"state/{comm.rank}.own"
        ]

    return checkpoint.write_files(
        folder,
        comm=comm,
        num_bytes=4,
        save=save,
        rank_state={},
        step=7,
        engine="test",
        topology={"tp": 2},
        extra={},
        state="own",
    )


def test_an_engines_own_format_is_whole_and_refused_by_others(tmp_path, ranks):
    assert [info.step for info in ranks(2, lambda comm: own_format(comm, tmp_path / "step-7"))] == [
        7,
        7,
    ]
    manifest = read_manifest(tmp_path / "step-7")
    assert (manifest.format, manifest.state, sorted(manifest.tensors)) == (
        2,
        "own",
        ["of.0", "of.1"],
    )
    assert sorted(manifest.files) == [
        "rank-00000.json",
        "rank-00001.json",
        "state/0.own",
        "state/1.own",
    ]
    for error in ranks(2, lambda comm: read(comm, tmp_path)):
        assert isinstance(error, CheckpointMismatch)
        assert "a format of test's own" in str(error)
        assert "2 ranks wrote it: tp 2" in str(error)
        assert "load it with test" in str(error)


def test_latest_follows_the_newest(saved, ranks):
    ranks(1, lambda comm: write(comm, saved / "step-6", step=6))
    assert checkpoint.locate(saved).name == "step-6"
    assert ranks(1, lambda comm: read(comm, saved))[0][0].step == 6
    assert ranks(1, lambda comm: read(comm, saved / "step-5"))[0][0].step == 5


def test_a_checkpoint_is_never_overwritten(saved, ranks):
    own, other = ranks(2, lambda comm: write(comm, saved / "step-5", step=9))
    assert isinstance(own, CheckpointWriteError)
    assert isinstance(other, RankFailure)
    assert read_manifest(saved / "step-5").step == 5


def shard_file(saved: Path) -> Path:
    return saved / "step-5/state/00001.safetensors"


def truncate(saved):
    path = shard_file(saved)
    path.write_bytes(path.read_bytes()[:-1])


def flip(saved):
    path = shard_file(saved)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def change(saved, alter):
    """Change the manifest's JSON, and write the digest of the changed manifest."""
    path = saved / "step-5/manifest.json"
    raw = json.loads(path.read_text())
    alter(raw)
    path.write_text(json.dumps(raw))
    seal(path.parent)


def edit(saved, **changes):
    change(saved, lambda raw: raw.update(changes))


def without(saved, part):
    change(saved, lambda raw: raw.pop(part))


def hole(saved):
    change(saved, lambda raw: raw["tensors"]["model.a"]["shards"].pop(0))


def twice_and_never(saved):
    """Cover half of the elements twice and half of them never, as many as the whole has."""

    def alter(raw):
        first, second = raw["tensors"]["model.b"]["shards"]
        second["offset"] = first["offset"]

    change(saved, alter)


def unsealed(saved):
    path = saved / "step-5/manifest.json"
    path.write_text(path.read_text().replace('"step": 5', '"step": 7'))


DAMAGE = {
    "truncated": (truncate, CheckpointCorrupt, "truncated"),
    "altered": (flip, CheckpointCorrupt, "checksum differs"),
    "a file is gone": (lambda s: shard_file(s).unlink(), CheckpointCorrupt, "a file is missing"),
    "a shard is gone": (hole, CheckpointCorrupt, "model.a exactly once"),
    "boxes overlap": (twice_and_never, CheckpointCorrupt, "model.b exactly once"),
    "the manifest is altered": (unsealed, CheckpointCorrupt, "manifest.sha256 differ"),
    "no digest": (
        lambda s: (s / "step-5/manifest.sha256").unlink(),
        CheckpointCorrupt,
        "manifest.sha256 is missing",
    ),
    "no manifest": (
        lambda s: (s / "step-5/manifest.json").unlink(),
        CheckpointMissing,
        "rank-00000.json",
    ),
    "no JSON": (
        lambda s: (s / "step-5/manifest.json").write_text("{"),
        CheckpointCorrupt,
        "cannot be read",
    ),
    "foreign JSON": (
        lambda s: (s / "step-5/manifest.json").write_text("[1]"),
        CheckpointCorrupt,
        "cannot be read",
    ),
    "lacks tensors": (lambda s: without(s, "tensors"), CheckpointCorrupt, "lacks parts"),
    "has more": (lambda s: edit(s, colour="red"), CheckpointCorrupt, "lacks parts"),
    "a newer format": (lambda s: edit(s, format=3), CheckpointMismatch, "upgrade engine-api"),
    "a newer contract": (
        lambda s: edit(s, contract="1.99"),
        CheckpointMismatch,
        "upgrade engine-api",
    ),
    "no folder's name": (
        lambda s: (s / "latest").write_text("../x"),
        CheckpointCorrupt,
        "a folder next to it",
    ),
    "a name too long": (
        lambda s: (s / "latest").write_text("x" * 5000),
        CheckpointCorrupt,
        "a folder next to it",
    ),
    "a lost folder": (
        lambda s: shutil.rmtree(s / "step-5"),
        CheckpointMissing,
        "which does not exist",
    ),
}


@pytest.mark.parametrize(("damage", "error", "text"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_found_on_all_ranks_together(saved, ranks, damage, error, text):
    damage(saved)
    found = ranks(2, lambda comm: read(comm, saved))
    assert any(isinstance(e, error) and text in str(e) for e in found)
    assert all(isinstance(e, error | RankFailure) for e in found)


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def alter(raw):
        for part in path:
            raw = raw[part]
        raw[last] = value

    return alter


SHARD = ("tensors", "model.a", "shards", 0)
IMPOSSIBLE = {
    "step.true": set_in("step", True),
    "step.text": set_in("step", "5"),
    "step.fraction": set_in("step", 5.0),
    "step.negative": set_in("step", -1),
    "step.huge": set_in("step", 10**30),
    "world_size.none": set_in("world_size", 0),
    "topology.list": set_in("topology", []),
    "topology.size": set_in("topology", "dp", True),
    "extra.list": set_in("extra", []),
    "engine.number": set_in("engine", 3),
    "format.text": set_in("format", "1"),
    "format.own": set_in("format", 2),
    "contract.number": set_in("contract", 1.2),
    "tensors.list": set_in("tensors", []),
    "entry.text": set_in("tensors", "model.a", "x"),
    "entry.dtype": set_in("tensors", "model.a", "dtype", "nn"),
    "entry.shape": set_in("tensors", "model.a", "shape", [7, -5]),
    "entry.stepped": set_in("tensors", "model.a", "stepped", 1),
    "shard.absolute": set_in(*SHARD, "file", "/etc/passwd"),
    "shard.above": set_in(*SHARD, "file", "../step-4/state/00000.safetensors"),
    "shard.unlisted": set_in(*SHARD, "file", "state/00009.safetensors"),
    "shard.outside": set_in(*SHARD, "offset", [6, 0]),
    "shard.dimensions": set_in(*SHARD, "offset", [0]),
    "files.list": set_in("files", []),
    "files.absolute": set_in("files", "/etc/passwd", {"bytes": 1, "sha256": "0" * 64}),
    "files.above": set_in("files", "../x", {"bytes": 1, "sha256": "0" * 64}),
    "files.long": set_in("files", "x" * 300, {"bytes": 1, "sha256": "0" * 64}),
    "files.bytes": set_in("files", "rank-00000.json", "bytes", "1"),
    "files.sha256": set_in("files", "rank-00000.json", "sha256", "0" * 63),
}


@pytest.mark.parametrize("alter", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_sealed_manifest_that_says_what_cannot_be_is_refused(saved, ranks, alter):
    change(saved, alter)
    (error,) = ranks(1, lambda comm: read(comm, saved))
    assert isinstance(error, CheckpointCorrupt), error
    assert error.where.endswith("manifest.json")


def outcome(ranks, folder):
    """Return the result of a load, or the type of its error."""
    (result,) = ranks(1, lambda comm: read(comm, folder))
    if isinstance(result, Exception):
        assert isinstance(result, CheckpointError), repr(result)
        return None
    manifest, tensors, _ = result
    return manifest, {key: tensor.tolist() for key, tensor in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step-5/manifest.json", "step-5/manifest.sha256", "latest"])
def test_every_single_flipped_bit_is_found_or_does_no_harm(saved, ranks, name):
    ranks(1, lambda comm: write(comm, saved / "step-4", step=4))
    (saved / "latest").write_text("step-5")
    intact = outcome(ranks, saved)
    assert intact is not None
    data = (saved / name).read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (saved / name).write_bytes(damaged)
        assert outcome(ranks, saved) in (None, intact), f"bit {bit} of {name}"


def test_a_manifest_of_a_release_without_digests_is_read(saved, ranks):
    def alter(raw):
        for entry in raw["tensors"].values():
            entry.pop("stepped", None)

    change(saved, alter)
    (saved / "step-5/manifest.sha256").unlink()
    assert ranks(1, lambda comm: read(comm, saved))[0][0].step == 5


def test_a_digest_is_what_sha256sum_writes(saved):
    line = (saved / "step-5/manifest.sha256").read_text()
    digest = hashlib.sha256((saved / "step-5/manifest.json").read_bytes()).hexdigest()
    assert line == f"{digest}  manifest.json\n"


def lacking(*gone, step=5):
    """Return the missing state of an AdamW checkpoint without these keys."""
    fields = ("exp_avg", "exp_avg_sq", "step")
    keys = [
        "model.a",
        "model.b",
        "model.frozen",
        *(f"optim.{name}.{kept}" for name in "ab" for kept in fields),
    ]
    entries = {key: Entry(dtype="float32", shape=(), shards=(), stepped=None) for key in keys}
    whole = checkpoint._with_steps(entries)
    manifest = Manifest(
        step=step,
        engine="test",
        world_size=1,
        topology={},
        tensors={key: entry for key, entry in whole.items() if key not in gone},
        files={},
    )
    try:
        checkpoint.check_optimizer_state(Path("folder"), manifest, fields)
    except CheckpointMismatch as error:
        return error.why
    return None


def test_optimizer_state_that_is_missing_for_a_weight_that_had_a_step_is_named():
    assert lacking() is None
    assert "missing: optim.a.step;" in lacking("optim.a.step")
    assert "missing: optim.b.exp_avg;" in lacking("optim.b.exp_avg")
    all_of_a = [f"optim.a.{kept}" for kept in ("exp_avg", "exp_avg_sq", "step")]
    assert "missing: optim.a.exp_avg, optim.a.exp_avg_sq, optim.a.step;" in lacking(*all_of_a)
    everything = [*all_of_a, *(key.replace(".a.", ".b.") for key in all_of_a)]
    assert "and 3 more" in lacking(*everything)


def test_an_optimizer_that_keeps_nothing_needs_nothing_and_before_the_first_step_none_does():
    def check(step, fields, stepped):
        entry = Entry(dtype="float32", shape=(), shards=(), stepped=stepped)
        about = {"engine": "test", "world_size": 1, "topology": {}, "files": {}}
        manifest = Manifest(step=step, tensors={"model.a": entry}, **about)
        checkpoint.check_optimizer_state(Path("folder"), manifest, fields)

    for stepped in (None, False):
        check(3, (), stepped)
        check(0, ("exp_avg",), stepped)
        with pytest.raises(CheckpointMismatch, match=r"optim\.a\.exp_avg"):
            check(3, ("exp_avg",), stepped)


def test_state_that_is_gone_as_a_whole_is_missing_for_an_engine_that_names_no_fields():
    entry = Entry(dtype="float32", shape=(), shards=(), stepped=True)
    about = {"engine": "test", "world_size": 1, "topology": {}, "files": {}}
    manifest = Manifest(step=3, tensors={"model.a": entry}, **about)
    with pytest.raises(CheckpointMismatch, match=r"missing: optim\.a\.\*;"):
        checkpoint.check_optimizer_state(Path("folder"), manifest, ())


def test_a_missing_folder_says_so(tmp_path, ranks):
    (error,) = ranks(1, lambda comm: read(comm, tmp_path / "none"))
    assert isinstance(error, CheckpointMissing)
    assert "does not exist" in error.why


def test_another_model_is_named_by_its_keys(saved, ranks):
    changes = {
        "model.c": (ShardSpec.whole((2,)), torch.float32),
        "model.a": (ShardSpec.whole((7, 4)), torch.float32),
    }
    (error,) = ranks(1, lambda comm: read(comm, saved, **changes))
    assert isinstance(error, CheckpointMismatch)
    assert "missing: model.c" in error.why
    assert "model.a: checkpoint (7, 5), model (7, 4)" in error.why


def refuse_room(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))


def fail_in_writer(monkeypatch):
    def save_file(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)


def fail_in_manifest(monkeypatch):
    def write(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("engine_api.manifest.Manifest.write", write)


@pytest.mark.parametrize("fail", [refuse_room, fail_in_writer, fail_in_manifest])
def test_a_failed_save_leaves_nothing_and_the_old_one_intact(saved, ranks, monkeypatch, fail):
    with monkeypatch.context() as patch:
        fail(patch)
        found = ranks(2, lambda comm: write(comm, saved / "step-6", step=6))
    assert isinstance(found[0], CheckpointWriteError)
    assert isinstance(found[1], CheckpointWriteError | RankFailure)
    assert "earlier checkpoints are untouched" in found[0].remedy
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step-5"]
    assert ranks(2, lambda comm: read(comm, saved))[0][0].step == 5
    assert ranks(2, lambda comm: write(comm, saved / "step-6", step=6))[0].step == 6


def test_an_extra_that_is_not_json_stops_all_ranks(saved, ranks):
    found = ranks(2, lambda comm: write(comm, saved / "step-6", what=object()))
    assert all(isinstance(error, ConfigError) for error in found)
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step-5"]


def test_a_pointer_that_a_kill_left_behind_is_not_believed_and_is_repaired(saved, ranks):
    ranks(1, lambda comm: write(comm, saved / "step-12", step=12))
    # A save that is killed between its rename and the replacement of the pointer leaves this state.
    (saved / "latest").rename(saved / "step-12/latest")
    assert checkpoint.locate(saved).name == "step-12"
    (saved / "latest").write_text("step-5")
    assert checkpoint.locate(saved).name == "step-12"
    assert ranks(1, lambda comm: read(comm, saved))[0][0].step == 12
    assert checkpoint.repair(saved) == saved / "step-12"
    assert (saved / "latest").read_text() == "step-12"
    assert not (saved / "step-12/latest").exists()


def test_an_unfinished_folder_is_never_newer(saved):
    shutil.copytree(saved / "step-5", saved / "step-6.partial")
    (saved / "step-7").mkdir()
    assert checkpoint.locate(saved).name == "step-5"
    assert checkpoint.repair(saved) == saved / "step-5"


def test_a_folder_without_steps_has_nothing_to_repair(tmp_path):
    assert checkpoint.repair(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_names_are_on_the_disk_before_the_folder_has_its_own(tmp_path, ranks, monkeypatch):
    """Check the sync without which a loss of power may leave a renamed folder that lacks files."""
    order = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (order.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)),
    )
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (order.append("renamed"), rename(self, to))
    )
    ranks(1, lambda comm: write(comm, tmp_path / "step-1", step=1))
    before = order[: order.index("renamed")]
    partial = tmp_path / "step-1.partial"
    inside = [
        partial,
        partial / "state",
        *(partial / n for n in ("manifest.json", "manifest.sha256", "rank-00000.json")),
    ]
    assert {str(path) for path in [*inside, partial / "state/00000.safetensors"]} <= set(before)
    assert str(tmp_path) in order[order.index("renamed") :]


def test_a_checkpoint_whose_save_was_killed_before_the_pointer_moved(saved):
    (saved / "step-5" / "latest").write_text("step-5")
    assert checkpoint.locate(saved / "step-5") == saved / "step-5"


def test_a_killed_save_is_not_a_checkpoint_and_the_next_one_clears_it(saved, ranks):
    remains = saved / "step-6.partial"
    (remains / "state").mkdir(parents=True)
    (remains / "state/00007.safetensors").write_bytes(b"half")
    assert checkpoint.locate(saved).name == "step-5"
    (error,) = ranks(1, lambda comm: read(comm, remains))
    assert isinstance(error, CheckpointMissing)
    ranks(1, lambda comm: write(comm, saved / "step-6", step=6))
    assert not remains.exists()
    assert not (saved / "step-6/state/00007.safetensors").exists()
