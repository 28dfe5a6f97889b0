"""Tests of the reader of a model folder's weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_api.errors import ConfigError
from engine_api.hf_folder import INDEX, WeightFiles

WHOLE = torch.arange(12.0).view(3, 4)


def write(folder: Path, file: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / file)
    return folder


def write_index(folder: Path, **file_of: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        WeightFiles(str(tmp_path))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        WeightFiles(str(tmp_path))
    assert "pytorch_model.bin is a pickle" in caught.value.why


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = write(tmp_path, x=torch.zeros(64)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        WeightFiles(str(tmp_path))
    assert caught.value.why


def test_weights_of_all_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, f"{name}.safetensors", **{name: torch.zeros(1)})
    files = WeightFiles(str(tmp_path))
    assert set(files.handles) == {"a", "b"}
    assert "a" in files
    assert "c" not in files


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors", a=torch.zeros(1))
    (tmp_path / "consolidated.safetensors").write_bytes(b"x")
    write_index(tmp_path, a="a.safetensors")
    assert set(WeightFiles(str(tmp_path)).handles) == {"a"}


def test_a_file_of_the_index_may_be_absent_if_no_weight_in_it_is_wanted(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors", a=torch.zeros(1))
    write_index(tmp_path, a="a.safetensors", b="b.safetensors")
    files = WeightFiles(str(tmp_path))
    files.check({"a": (1,)})
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read") as caught:
        files.check({"a": (1,), "b": (1,)})
    assert "not there" in caught.value.why


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 3), slice(0, 4)),
        (slice(1, 3), slice(0, 4)),
        (slice(1, 3), slice(1, 2)),
        (slice(3, 3), slice(0, 4)),
    ],
)
def test_a_box_is_read_in_the_stored_dtype(tmp_path: Path, box: tuple[slice, ...]) -> None:
    files = WeightFiles(str(write(tmp_path, a=WHOLE.bfloat16(), one=torch.tensor(2.0))))
    assert torch.equal(files.read("a", box), WHOLE.bfloat16()[box])
    assert files.read("one", ()) == 2.0


def test_missing_weights_are_counted_and_named_except_a_value_head(tmp_path: Path) -> None:
    files = WeightFiles(str(write(tmp_path, a=WHOLE)))
    files.check({"a": (3, 4), "score.weight": (1, 4)})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors: b\n"):
        files.check({"a": (3, 4), "b": (1,)})
    with pytest.raises(ConfigError, match=r"lacks 4 tensors: b, c, d, …\n"):
        files.check(dict.fromkeys("abcde", (3, 4)))


def test_a_weight_in_another_shape_is_refused(tmp_path: Path) -> None:
    files = WeightFiles(str(write(tmp_path, a=WHOLE)))
    with pytest.raises(ConfigError, match=r"a is \(3, 4\), config\.json says \(4, 3\)"):
        files.check({"a": (4, 3)})


def test_packed_weights_are_refused_for_their_dtype_not_for_their_shape(tmp_path: Path) -> None:
    files = WeightFiles(str(write(tmp_path, a=torch.zeros(3, 2, dtype=torch.uint8))))
    with pytest.raises(ConfigError, match="a is stored as U8"):
        files.check({"a": (3, 4)})


def test_weights_of_no_use_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, **{name: torch.zeros(1) for name in "abcdef"})
    with caplog.at_level(logging.WARNING, logger="engine_api"):
        WeightFiles(str(tmp_path)).check({"a": (1,)})
    assert "5 tensors are not used: b, c, d, e, …" in caplog.text
