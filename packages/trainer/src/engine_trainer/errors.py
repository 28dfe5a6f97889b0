"""Errors of the trainer that the contract does not know; they belong to its tree."""

from __future__ import annotations

from engine_api.errors import EngineError


class DataError(EngineError):
    """A data file or a row of it cannot be used; ``file``, ``row`` (1-based line or row) and ``column`` say where."""

    def __init__(
        self,
        what: str,
        *,
        file: str = "",
        row: int | None = None,
        column: str | None = None,
        why: str = "",
        remedy: str = "",
    ) -> None:
        self.file, self.row, self.column = file, row, column
        place = (
            file
            + (f":{row}" if row is not None else "")
            + (f", column {column!r}" if column else "")
        )
        super().__init__(what, where=place, why=why, remedy=remedy)
