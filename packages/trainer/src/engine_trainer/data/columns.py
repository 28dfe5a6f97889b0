"""Columns of parquet and arrow files as Python values.

Times (timestamps, dates, times of day, durations) are read as text, because Arrow's times have a
wider range and more digits than Python's, and an unused column must not end a run. Times with a
time zone are converted to UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from engine_trainer.data.strict_json import MAX_DEPTH
from engine_trainer.errors import DataError

# Exceptions that pyarrow raises for a value that it cannot convert. UnicodeDecodeError is a
# ValueError.
_UNREADABLE = (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError)


def python_columns(table: pa.Table, names: Sequence[str], file: str) -> Iterator[list[Any]]:
    """Yield the values of each column. Raises ``DataError`` that names file, row and column."""
    for name, column in zip(names, table.columns, strict=True):
        if names.count(name) > 1:
            raise DataError(
                "the file has two columns of this name", file=file, column=name, remedy="rename one"
            )
        if _depth(column.type) > MAX_DEPTH:
            raise DataError(
                f"nested deeper than {MAX_DEPTH} levels",
                file=file,
                column=name,
                remedy="write it as text",
            )
        try:
            # Without this check, pyarrow would follow the bad offsets of a damaged file.
            column.validate(full=True)
            yield _as_text(column).to_pylist()
        except _UNREADABLE as error:
            row = _first_unreadable(column)
            raise DataError(
                "the value cannot be read" if row is not None else "the column cannot be read",
                file=file,
                row=row,
                column=name,
                why=str(error),
                remedy="write the column again (text is UTF-8), or leave it out",
            ) from error


def _first_unreadable(column: pa.ChunkedArray) -> int | None:
    """Return the 1-based number of the first row that cannot be read, or None if all can."""
    for row in range(len(column)):
        try:
            one = column.slice(row, 1)
            one.validate(full=True)
            _as_text(one).to_pylist()
        except _UNREADABLE:
            return row + 1
    return None


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column with its times as text, at every depth."""
    for leaf in (_in_utc, _text):
        wanted = _with_leaves(column.type, leaf)
        column = column if wanted == column.type else column.cast(wanted)
    return column


def _in_utc(kind: pa.DataType) -> pa.DataType:
    # Named time zones are looked up in a database that may be missing on the machine.
    return (
        pa.timestamp(kind.unit, tz="UTC")
        if pa.types.is_timestamp(kind) and kind.tz is not None
        else kind
    )


def _text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_temporal(kind) and not pa.types.is_interval(kind) else kind


def _with_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with ``leaf`` applied to each type in it that contains no other types."""
    if isinstance(kind, pa.BaseExtensionType):
        return _with_leaves(kind.storage_type, leaf)
    if pa.types.is_dictionary(kind):
        return _with_leaves(kind.value_type, leaf)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_leaves(field.type, leaf)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_leaves(kind.key_type, leaf), _with_leaves(kind.item_type, leaf))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_with_leaves(kind.value_type, leaf), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_with_leaves(kind.value_type, leaf))
    return pa.list_(_with_leaves(kind.value_type, leaf)) if pa.types.is_list(kind) else leaf(kind)


def _depth(kind: pa.DataType) -> int:
    """Return the depth to which types are nested in each other."""
    deepest, level = 0, [kind]
    while level:
        deepest += 1
        level = [inner.field(i).type for inner in level for i in range(inner.num_fields)]
    return deepest
