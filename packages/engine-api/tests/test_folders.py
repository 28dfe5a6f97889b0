"""Tests of the replacement of folders and files as a whole.

A process that is killed at any moment leaves the old ones or the new ones.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_api import folders, hf_folder
from engine_api.comm import SingleComm
from engine_api.errors import ConfigError

# Names of the audit events of Python calls that change a file system.
EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.chmod",
    "shutil.rmtree",
}
KILLED = 9

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def killed_everywhere(
    folder: Path, work: Callable[[], None], prepare: Callable[[], None]
) -> Iterator[int]:
    """Run ``work`` in a child that dies before its n-th change of files in ``folder``, for each n.

    Yield n after each run; the last run reaches its end.
    """
    for count in range(10_000):
        prepare()
        child = os.fork()
        if child == 0:
            _die_after(count, folder, work)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        yield count
        if code == 0:
            return
    raise AssertionError("it never came to its end")


def _die_after(count: int, folder: Path, work: Callable[[], None]) -> None:
    left = count

    def die(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in EVENTS and str(folder) in str(arguments):
            if not left:
                os._exit(KILLED)
            left -= 1

    try:
        sys.addaudithook(die)
        work()
        os._exit(0)
    # Whatever was raised, the child must not go on as the test.
    finally:
        os._exit(1)


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_leaves_the_former_folder_or_the_new_one(tmp_path, monkeypatch, exchanges):
    old, new = tmp_path / "hf", tmp_path / "hf.partial"
    former = {"a": "former", "b": "former", "notes": "of the user"}
    wanted = {"a": "new", "c": "new", "notes": "of the user"}
    if not exchanges:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)

    def prepare():
        for path in tmp_path.iterdir():
            folders.remove(path)
        for folder, files in ((old, former), (new, {"a": "new", "c": "new"})):
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(text)

    seen = []
    for _ in killed_everywhere(
        tmp_path, lambda: folders.replace_folder(new, old, stale=("a", "b", "c")), prepare
    ):
        if not exchanges:
            folders.restore(old)
        seen.append(read(old))
    assert all(content in (former, wanted) for content in seen), seen
    assert seen[0] == former
    assert seen[-1] == wanted
    assert not new.exists()
    assert len(seen) > 4


def test_this_file_system_exchanges_or_says_that_it_cannot(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    moved = folders._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / ("b" if moved else "a")).is_file()


def test_a_file_in_the_way_is_kept(tmp_path):
    (tmp_path / "hf").write_text("kept")
    (tmp_path / "new").mkdir()
    with pytest.raises(NotADirectoryError) as caught:
        folders.replace_folder(tmp_path / "new", tmp_path / "hf")
    assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "hf").read_text() == "kept"


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a").touch()
    (tmp_path / "hf").symlink_to(tmp_path / "disk")
    folders.replace_folder(tmp_path / "new", tmp_path / "hf")
    assert (tmp_path / "hf").is_symlink()
    assert (tmp_path / "disk/a").is_file()


class Config:
    """A stand-in for transformers' configuration with the members that are used."""

    def to_dict(self):
        return {"model_type": "test"}


def save(folder: Path, value: float) -> None:
    export = ((name, torch.full((3,), value)) for name in ("a", "b"))
    source = str(folder.parent.parent / "source")
    hf_folder.save_hf(
        export, folder, comm=SingleComm(), source=source, hf_config=Config(), mtp=None
    )


def test_a_killed_save_hf_leaves_the_former_model_or_the_new_one(tmp_path):
    folder = tmp_path / "out" / "hf"
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").write_text("{}")

    def prepare():
        save(folder, 1.0)
        (folder / "README.md").write_text("of the user")

    values = []
    for _ in killed_everywhere(tmp_path / "out", lambda: save(folder, 2.0), prepare):
        values.append(
            {
                float(v)
                for tensor in load_file(folder / "model.safetensors").values()
                for v in tensor
            }
        )
        assert sorted(p.name for p in folder.iterdir()) == [
            "README.md",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert json.loads((folder / "config.json").read_text())["model_type"] == "test"
    assert all(found in ({1.0}, {2.0}) for found in values), values
    assert values[0] == {1.0}
    assert values[-1] == {2.0}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["hf"]


def index(folder: Path, weight_map: object) -> Path:
    (folder / hf_folder.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x.safetensors",
        "a/../../x",
        "..",
        "",
        ".",
        "a//b",
        "x\x00",
        "\ud800",
        None,
        3,
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    with pytest.raises(
        ConfigError, match="expected the name of a file in this folder for t"
    ) as caught:
        hf_folder.read_index(index(tmp_path, {"good": "a.safetensors", "t": name}))
    assert caught.value.field == "model.path"


@pytest.mark.parametrize("weight_map", [None, [], "a", 1])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    with pytest.raises(ConfigError, match="expected a mapping as weight_map"):
        hf_folder.read_index(index(tmp_path, weight_map))


def test_an_index_is_read_as_it_stands(tmp_path):
    assert hf_folder.read_index(tmp_path) is None
    assert hf_folder.read_index(index(tmp_path, {"t": "part/a.safetensors"})) == {
        "t": "part/a.safetensors"
    }
