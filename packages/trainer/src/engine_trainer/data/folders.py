"""Selection of the files of a folder that make up one split of one data set.

Data sets, splits and formats in one folder are never mixed. A file's split is its name without the
number of a shard (``train-00000-of-00002.parquet``), or the folder it lies in (``train/0.jsonl``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from engine_trainer.errors import DataError

# Older releases of datasets put 16 hexadecimal digits after the number of a shard.
_SHARD = re.compile(r"(^|[-_.])\d+([-_.]of[-_.]\d+)?(-[0-9a-f]{16})?$")
_HELD_OUT = re.compile(
    r"(test|validation|valid|val|dev|eval|held[-_]?out|holdout)(set|ing|data)?([-_.\d]|$)",
    re.IGNORECASE,
)
_TRAIN = re.compile(r"train(set|ing|data)?([-_.\d]|$)", re.IGNORECASE)
SHOWN = 6


# Descriptions that the datasets package writes into folders of JSON files.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


def suffix_of(file: Path) -> str:
    """Return the suffix of a file, for a compressed one with its format (``.jsonl.gz``)."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def data_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with one of ``suffixes`` in a folder and the folders below, by name."""
    return sorted(
        f
        for f in folder.rglob("*")
        if suffix_of(f) in suffixes and f.name not in _DESCRIPTIONS and f.is_file()
    )


def files_of(folder: Path, split: str | None, kinds: Sequence[Sequence[str]]) -> list[Path]:
    """Return the data files of ``split``, or all of them, in the order of their names.

    Args:
        folder: the folder.
        split: the split; None: all files.
        kinds: suffixes of files, of which only the first that the folder has are read.

    Raises:
        DataError: there are none, or some of them do not belong together.
    """
    files = next((found for kind in kinds if (found := data_files(folder, kind))), [])
    chosen = files if split is None else _of_split(folder, files, split)
    if not chosen:
        names = _names(folder, files) or "none"
        raise DataError(
            "the folder has no data file" + (f" of split {split!r}" if split else ""),
            file=str(folder),
            why=f"data files there: {names}",
            remedy="check the path and the split",
        )
    if split is None and len({_side(folder, f) for f in chosen}) > 1:
        odd = next(f for f in chosen if _side(folder, f))
        raise DataError(
            "the folder holds several splits",
            file=str(folder),
            why=_names(folder, [odd, *chosen]),
            remedy="set data.split (of held-out rows eval.split) to one, "
            "or name a file as the source",
        )
    _require_one(folder, chosen)
    return chosen


def _of_split(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    exact = [f for f in files if split in (_name(f), _stem(f))]
    exact = exact or [f for f in files if split in f.relative_to(folder).parts[:-1]]
    if exact:
        return exact
    alike = [f for f in files if f.name.startswith(split)]
    splits = sorted({_name(f) for f in alike})
    if len(splits) > 1:
        raise DataError(
            f"several splits begin with {split!r}",
            file=str(folder),
            why=", ".join(splits[:SHOWN]),
            remedy=f"name one of them, for example data.split={splits[0]}",
        )
    return alike


def _require_one(folder: Path, files: Sequence[Path]) -> None:
    """Raise ``DataError`` if files of one name lie in several folders or have several formats."""
    places: dict[str, set[Path]] = defaultdict(set)
    formats: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for file in files:
        places[_name(file)].add(file.parent)
        formats[file.parent, _name(file)].add(suffix_of(file))
    if any(len(found) > 1 for found in places.values()):
        raise DataError(
            "the folder holds several data sets",
            file=str(folder),
            why=_names(folder, files),
            remedy=f"name one as the source, such as {files[0].parent}, or several as a list",
        )
    if any(len(found) > 1 for found in formats.values()):
        raise DataError(
            "the folder holds a data set in more than one format",
            file=str(folder),
            why=_names(folder, files),
            remedy=f"name one as the source, such as {files[0]}",
        )


def _name(file: Path) -> str:
    """Return the file's name without suffix and shard, empty if it is a shard number alone."""
    return _SHARD.sub("", _stem(file))


def _stem(file: Path) -> str:
    """Return the file's name without its suffix."""
    return file.name.removesuffix(suffix_of(file))


def _side(folder: Path, file: Path) -> str:
    """Return "held out", "train" or "" (unknown) by the name of the file or of a folder."""
    names = (_stem(file), *file.relative_to(folder).parts[:-1])
    if any(_HELD_OUT.match(name) for name in names):
        return "held out"
    return "train" if any(_TRAIN.match(name) for name in names) else ""


def _names(folder: Path, files: Sequence[Path]) -> str:
    names = list(dict.fromkeys(f.relative_to(folder).as_posix() for f in files))
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
