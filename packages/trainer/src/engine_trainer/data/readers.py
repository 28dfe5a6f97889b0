"""Rows of JSONL, JSON, CSV, parquet and arrow files, each with its file and number.

A JSON file is a list of objects. A CSV file has commas, quotes and UTF-8, and its first row names
the columns; all values are text, and an empty one is a null. These three may be compressed with
gzip (``rows.jsonl.gz``).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import logging
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from engine_trainer.data.columns import python_columns
from engine_trainer.data.folders import data_files, files_of, suffix_of
from engine_trainer.data.hub import PREFIX, from_hub, hint
from engine_trainer.data.saved import is_saved, saved_files
from engine_trainer.data.strict_json import HalfCharacter, loads
from engine_trainer.errors import DataError

log = logging.getLogger("engine_trainer")
# In a folder, files of the second kind are read only where there are none of the first, because
# folders of data sets hold descriptions in JSON, too.
SUFFIXES = (
    (".jsonl", ".jsonl.gz", ".parquet", ".arrow"),
    (".json", ".json.gz", ".csv", ".csv.gz"),
)
KNOWN = (*SUFFIXES[0], *SUFFIXES[1])
# Errors of a file that cannot be read or decompressed.
_BROKEN = (OSError, EOFError, zlib.error)
# Largest number of characters of a field in a CSV file. Python's own limit is 131,072.
_FIELD = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record with its location."""

    values: Mapping[str, Any]
    """Values by column."""
    file: str
    number: int
    """1-based line (JSONL) or row. The header of a CSV file is not counted."""

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
    paths = [_from_hub(s) if s.startswith(PREFIX) else Path(s) for s in given]
    return [row for path in paths for file in _files(path, split) for row in _read_file(file)]


def _from_hub(source: str) -> Path:
    """Return the local file or folder of a hub name, with the files of one kind downloaded."""
    if source.endswith(KNOWN):
        return from_hub(source, KNOWN)
    path = from_hub(source, SUFFIXES[0])
    return path if data_files(path, SUFFIXES[0]) else from_hub(source, SUFFIXES[1])


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
    if suffix_of(path) not in KNOWN:
        raise DataError(
            f"{suffix_of(path) or 'no'} suffix",
            file=str(path),
            why=f"known: {', '.join(KNOWN)}",
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
        [f.name for f in path.parent.iterdir() if f.is_dir() or suffix_of(f) in KNOWN]
        if path.parent.is_dir()
        else []
    )
    close = get_close_matches(path.name, there)
    return (
        f"did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
    )


def _read_file(path: Path) -> list[Row]:
    kind = suffix_of(path).removesuffix(".gz")
    rows = list(_READERS[kind](path))
    if not rows:
        raise DataError("the file is empty", file=str(path), remedy="it needs at least one row")
    return rows


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of text, decompressed.

    Raises ``DataError`` for UTF-16 and UTF-32, and for errors while it is opened and read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            _refuse_wide(file.peek(4)[:4], path)
            yield cast("IO[bytes]", file)
    except _BROKEN as error:
        raise DataError(
            "the file cannot be read",
            file=str(path),
            why=str(error),
            remedy="check its permissions"
            if path.suffix != ".gz"
            else "check its permissions, or compress it again (a truncated copy gives this error)",
        ) from error


def _refuse_wide(start: bytes, path: Path) -> None:
    """Raise ``DataError`` for a file in UTF-16 or UTF-32, by its first four bytes."""
    encoding = json.detect_encoding(start)
    # Zeros are what a crash leaves of a file.
    if encoding.startswith("utf-8") or "\0" in start.decode(encoding, "replace"):
        return
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    raise DataError(
        f"expected UTF-8, got {name}",
        file=str(path),
        why=f"it begins with the bytes {start.hex(' ')}",
        remedy=f"convert it, and name the new file: {_conversion(path, name)}",
    )


def _not_utf8(what: str, path: Path, row: int | None, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{what} is not UTF-8",
        file=str(path),
        row=row,
        why=str(error),
        remedy="convert the file, and name the new one; if it is Latin-1: "
        + _conversion(path, "LATIN1"),
    )


def _conversion(path: Path, encoding: str) -> str:
    """Return the command that writes a file again in UTF-8, with a name of its own."""
    suffix = suffix_of(path)
    new = path.with_name(f"{path.name.removesuffix(suffix)}-utf8{suffix.removesuffix('.gz')}")
    old = shlex.quote(str(path))
    convert = f"iconv -f {encoding} -t UTF-8"
    convert = f"gzip -dc {old} | {convert}" if path.suffix == ".gz" else f"{convert} {old}"
    return f"{convert} > {shlex.quote(str(new))}"


def _jsonl(path: Path) -> Iterator[Row]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield Row(values=_object(text, path, number), file=str(path), number=number)


def _json(path: Path) -> Iterator[Row]:
    with _opened(path) as file:
        text = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        rows = loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        raise _not_utf8("the file", path, None, error) from error
    except HalfCharacter as error:
        match error.keys:
            case (int(index), *keys):
                raise _half_character(keys, path, index + 1, error) from error
            case keys:
                raise _half_character(keys, path, None, error) from error
    except ValueError as error:
        raise DataError(
            "the file is not JSON",
            file=str(path),
            why=str(error),
            remedy="write one list of rows; a file with one object a line is called .jsonl",
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"the file is a {type(rows).__name__}, not a list of rows",
            file=str(path),
            why=f"its keys: {', '.join(rows)}"[:200] if isinstance(rows, dict) else "",
            remedy='write [{"column": value, …}, …]; '
            "a file with one object a line is called .jsonl",
        )
    for number, values in enumerate(rows, start=1):
        if not isinstance(values, dict):
            raise DataError(
                f"the row is a {type(values).__name__}, not an object",
                file=str(path),
                row=number,
                remedy='write {"column": value, …}',
            )
        yield Row(values=values, file=str(path), number=number)


def _csv(path: Path) -> Iterator[Row]:
    header: list[str] | None = None
    number = 0
    former = csv.field_size_limit(_FIELD)
    try:
        with _opened(path) as lines:
            # The lines of a quoted text belong together, so that the reader takes them as it needs.
            for fields in csv.reader(_utf8(lines), strict=True):
                if header is None:
                    header = _header(fields, path)
                elif fields:
                    number += 1
                    yield Row(
                        values=_by_column(header, fields, path, number),
                        file=str(path),
                        number=number,
                    )
    except (csv.Error, UnicodeDecodeError) as error:
        what = "the row" if header else "the header"
        row = number + 1 if header else None
        if isinstance(error, UnicodeDecodeError):
            raise _not_utf8(what, path, row, error) from error
        raise DataError(
            f"{what} is not CSV",
            file=str(path),
            row=row,
            why=str(error),
            remedy="write UTF-8 with commas, end each row with a line feed, "
            "and double each quote inside of quotes",
        ) from error
    finally:
        csv.field_size_limit(former)


def _utf8(lines: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")


def _header(names: list[str], path: Path) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                "the file has two columns of this name",
                file=str(path),
                column=name or "(no name)",
                remedy="rename one",
            )
    return names


def _by_column(header: list[str], fields: list[str], path: Path, number: int) -> dict[str, Any]:
    if len(fields) != len(header):
        raise DataError(
            f"expected {len(header)} values, got {len(fields)}",
            file=str(path),
            row=number,
            why=f"the header has the columns {', '.join(header)}"[:300],
            remedy="put quotes around a text with commas or line breaks",
        )
    return {name: text or None for name, text in zip(header, fields, strict=True)}


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = loads(line)
    except UnicodeDecodeError as error:
        raise _not_utf8("the line", path, number, error) from error
    except HalfCharacter as error:
        raise _half_character(error.keys, path, number, error) from error
    # An integer with more digits than Python converts is a ValueError too.
    except ValueError as error:
        raise DataError(
            "the line is not JSON",
            file=str(path),
            row=number,
            why=str(error),
            remedy="write one whole JSON object a line (a truncated file ends like this)",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"the line is a {type(value).__name__}, not an object",
            file=str(path),
            row=number,
            remedy='write {"column": value, …}',
        )
    return value


def _half_character(
    keys: Sequence[str | int], path: Path, row: int | None, error: HalfCharacter
) -> DataError:
    return DataError(
        "a text has half of a character",
        file=str(path),
        row=row,
        # A list in the place of a row has no columns.
        column=keys[0] if keys and isinstance(keys[0], str) else None,
        why=str(error),
        remedy="write the text again, or remove the half (a text that was cut inside of an emoji "
        "ends like this)",
    )


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


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _table,
    ".arrow": _table,
}
