"""Errors of the trainer that the contract does not know.

They derive from the contract's ``EngineError``.
"""

from __future__ import annotations

from engine_api.errors import EngineError


class DataError(EngineError):
    """The error of a data file, or of a row in it, that cannot be used.

    ``file``, ``row`` (line or row, counted from 1) and ``column`` say where.
    """

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


class ImageError(DataError):
    """The error of a row whose images cannot be used (``data.on_bad_image``)."""
