"""Folders that ``save_to_disk`` of Hugging Face ``datasets`` wrote, read without that package.

They hold arrow streams and two kinds of JSON file::

    folder/                       a DatasetDict
      dataset_dict.json           {"splits": ["train", "test"]}
      train/                      a Dataset
        state.json                {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], …}
        data-00000-of-00001.arrow
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine_trainer.data.strict_json import loads
from engine_trainer.errors import DataError

DICT, STATE = "dataset_dict.json", "state.json"


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote this folder."""
    return (folder / DICT).is_file() or (folder / STATE).is_file()


def saved_files(folder: Path, split: str | None) -> list[Path]:
    """Return the arrow files of one split, in their order.

    Raises:
        DataError: there is no such split, there are several and none is named, or a file is
            missing.
    """
    if (folder / DICT).is_file():
        return _shards(folder / _split(folder, split))
    given = _read(folder / STATE).get("_split")
    if split is not None and split != given:
        raise DataError(
            f"the data set has no split {split!r}",
            file=str(folder),
            why=f"it is {given or 'not split'}",
            remedy="leave the split out, or name the folder that holds it",
        )
    return _shards(folder)


def _split(folder: Path, split: str | None) -> str:
    splits = _texts(folder / DICT, "splits", _read(folder / DICT).get("splits", []))
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise DataError(
            "the folder holds several splits",
            file=str(folder),
            why=", ".join(splits),
            remedy="set split, for example data.split=train",
        )
    if split not in splits:
        raise DataError(
            f"the data set has no split {split!r}",
            file=str(folder),
            why=f"it has {', '.join(splits)}",
            remedy="name one of these",
        )
    return split


def _shards(folder: Path) -> list[Path]:
    state = _read(folder / STATE)
    if state.get("_indices_data_files"):
        raise DataError(
            "the rows are chosen by an index file",
            file=str(folder),
            why="an old release of datasets saved the data set like this",
            remedy="load and save it again with a recent one",
        )
    parts = state.get("_data_files", [])
    names = (
        [part.get("filename") for part in parts if isinstance(part, dict)]
        if isinstance(parts, list)
        else parts
    )
    files = [folder / name for name in _texts(folder / STATE, "_data_files", names)]
    absent = [f.name for f in files if not os.path.isfile(f)]  # noqa: PTH113 - os.path returns False for an impossible name, too
    if absent or not files:
        raise DataError(
            "a data file is missing",
            file=str(folder),
            why=f"{STATE} names {', '.join(absent) or 'none'}",
            remedy="copy the whole folder",
        )
    return files


def _texts(path: Path, key: str, names: Any) -> list[str]:
    """Return ``names`` after checking that it is a list of texts.

    Raises:
        DataError: it is not.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{key}: expected a list of names, got {names!r:.100}",
            file=str(path),
            remedy="copy the whole folder again",
        )
    return names


def _read(path: Path) -> dict[str, Any]:
    try:
        value = loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            "not readable", file=str(path), why=str(error), remedy="copy the whole folder again"
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            "expected an object of JSON", file=str(path), remedy="copy the whole folder again"
        )
    return value
