"""The output of ``engine-train data`` to standard output."""

from __future__ import annotations

import os
import shutil
import sys

from engine_trainer.config import Config
from engine_trainer.preview.collect import collect
from engine_trainer.preview.show import show


def show_data(
    config: Config, task: str, *, rows: int = 3, row: int | None = None, color: bool | None = None
) -> bool:
    """Print the training data of a configuration, and return whether a run would begin with it.

    Args:
        config: the configuration.
        task: its task, ``sft``, ``rl``, ``dpo``, ``kto`` or ``rm``.
        rows: number of rows to print.
        row: number of the one row to print in full; None: the first ones.
        color: use ANSI colors; None: where the output is a terminal that has them.

    Raises ``ConfigError`` and ``DataError``.
    """
    preview = collect(config, task)
    width = shutil.get_terminal_size((80, 24)).columns
    colored = _has_colors() if color is None else color
    lines = show(preview, rows=rows, row=row, width=width, color=colored)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for line in lines:
            print(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    fates = [one.fate for one in preview.rows]
    return "refused" not in fates and any(fate in ("kept", "cut") for fate in fates)


def _has_colors() -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
