"""Rows of JSONL, parquet and arrow files, each with its file and number."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine_trainer.data.columns import python_columns
from engine_trainer.data.folders import files_of
from engine_trainer.data.hub import PREFIX, from_hub, hint
from engine_trainer.data.saved import is_saved, saved_files
from engine_trainer.data.strict_json import loads
from engine_trainer.errors import DataError

log = logging.getLogger("engine_trainer")
SUFFIXES = (".jsonl", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record with its location."""

    values: Mapping[str, Any]
    """Values by column."""
    file: str
    number: int
    """1-based line (JSONL) or row."""

    def error(
        self, what: str, *, column: str | None = None, why: str = "", remedy: str = ""
    ) -> DataError:
        """Return a ``DataError`` that names this row."""
        return DataError(
            what, file=self.file, row=self.number, column=column, why=why, remedy=remedy
        )


def read_rows(source: str | Sequence[str], split: str | None = None) -> list[Row]:
    """Return all rows of the files, or of the folders' files, in the order of their names.

    A source is a file, a folder of files, a folder that ``save_to_disk`` of ``datasets`` wrote, or
    a name on the hub (``hub``).

    Raises:
        DataError: there is no such file, no file of a known kind, a broken line, or an empty file.
    """
    given = [source] if isinstance(source, str) else source
    paths = [from_hub(s, SUFFIXES) if s.startswith(PREFIX) else Path(s) for s in given]
    return [row for path in paths for file in _files(path, split) for row in _read_file(file)]


def _files(path: Path, split: str | None) -> list[Path]:
    _require_path(path)
    if path.is_dir():
        return saved_files(path, split) if is_saved(path) else files_of(path, split, SUFFIXES)
    if not path.is_file():
        raise DataError(
            "there is no such file or folder",
            file=str(path),
            remedy=_nearest(path)
            or hint(path)
            or "check data.source and eval.source, relative to the working directory; "
            "a recipe's comments say how to get its data",
        )
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path.suffix or 'no'} suffix",
            file=str(path),
            why=f"known: {', '.join(SUFFIXES)}",
            remedy="convert it to JSONL: one JSON object a line",
        )
    if split is not None and not path.name.startswith(split):
        log.warning("split %r has no effect: %s is a single file", split, path)
    return [path]


def _require_path(path: Path) -> None:
    """Raise ``DataError`` for a path that the system cannot look up."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        # The caller reports the missing path, with its neighbours.
        pass
    # The path is too long, has a NUL, is not permitted, or is a loop of links.
    except (OSError, ValueError) as error:
        raise DataError(
            "the path cannot be read",
            file=f"{str(path)!r:.200}",
            why=str(error)[:200],
            remedy="check data.source and eval.source",
        ) from error


def _nearest(path: Path) -> str:
    """Return a remedy that names files with a similar name, or an empty text if there are none."""
    there = (
        [f.name for f in path.parent.iterdir() if f.is_dir() or f.suffix in SUFFIXES]
        if path.parent.is_dir()
        else []
    )
    close = get_close_matches(path.name, there)
    return (
        f"did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
    )


def _read_file(path: Path) -> list[Row]:
    rows = list(_jsonl(path) if path.suffix == ".jsonl" else _table(path))
    if not rows:
        raise DataError("the file is empty", file=str(path), remedy="it needs at least one row")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield Row(
                        values=_object(text, str(path), number), file=str(path), number=number
                    )
    except OSError as error:
        raise DataError(
            "the file cannot be read",
            file=str(path),
            why=str(error),
            remedy="check its permissions",
        ) from error


def _object(line: bytes, file: str, number: int) -> dict[str, Any]:
    try:
        value = loads(line)
    # Bad UTF-8, and an integer with more digits than Python converts, are ValueErrors too.
    except ValueError as error:
        raise DataError(
            "the line is not JSON",
            file=file,
            row=number,
            why=str(error),
            remedy="write one whole JSON object a line (a truncated file ends like this)",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"the line is a {type(value).__name__}, not an object",
            file=file,
            row=number,
            remedy='write {"column": value, …}',
        )
    return value


def _table(path: Path) -> Iterator[Row]:
    kind = path.suffix.removeprefix(".")
    try:
        table = pq.read_table(path) if kind == "parquet" else _arrow(path)
        # This raises a ValueError for bad UTF-8.
        names = table.column_names
    # A damaged file may claim any size, hence MemoryError.
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise DataError(
            f"the file is not readable {kind}",
            file=str(path),
            why=str(error),
            remedy="write the file again; a truncated copy gives this error",
        ) from error
    columns = list(python_columns(table, names, str(path)))
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield Row(values=dict(zip(names, values, strict=True)), file=str(path), number=number)


def _arrow(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        try:
            # The datasets package writes this format.
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            # The remaining format is Feather.
            return pa.ipc.open_file(source).read_all()
