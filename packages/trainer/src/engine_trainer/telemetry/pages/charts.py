"""Charts of a run's page as static SVG, whose labels are HTML so that a phone can show them."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 60
ROWS = 20


def histogram_over_steps(
    title: str, steps: NDArray[np.int64], values: NDArray[Any], about: str
) -> str:
    """Return a histogram of ``values`` for each step, as a column of cells, and their means.

    Steps share a column where there are more than ``COLUMNS``. A cell is the darker the larger its
    fraction of its column.
    """
    if not len(values):
        return ""
    first, last = int(steps.min()), int(steps.max())
    columns = min(COLUMNS, last - first + 1)
    x = (steps - first) * columns // (last - first + 1)
    low, high = float(values.min()), float(values.max())
    span = high - low or 1.0
    y = np.minimum(((values - low) / span * ROWS).astype(np.int64), ROWS - 1)
    counts = np.zeros((columns, ROWS), dtype=np.int64)
    np.add.at(counts, (x, y), 1)
    totals = counts.sum(axis=1)
    cells = "".join(
        _cell(column, row, int(counts[column, row]), int(totals[column]), low, span, title)
        for column, row in np.argwhere(counts).tolist()
    )
    means = " ".join(
        f"{column + 0.5:g},{ROWS - (values[x == column].mean() - low) / span * ROWS:.2f}"
        for column in np.flatnonzero(totals).tolist()
    )
    return (
        f"<figure><figcaption>{html.escape(title)} <small>{html.escape(about)}</small>"
        '</figcaption><div class="chart">'
        f'<div class="scale"><span>{high:.4g}</span><span>{low:.4g}</span></div>'
        f'<svg viewBox="0 0 {columns} {ROWS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)} from {low:.4g} to {high:.4g}, steps {first} to {last}">'
        f'{cells}<polyline class="mean" points="{means}"/></svg>'
        f'<div class="scale steps"><span>step {first}</span><span>step {last}</span></div>'
        "</div></figure>"
    )


def _cell(
    column: int, row: int, count: int, total: int, low: float, span: float, title: str
) -> str:
    begin, end = (low + span * edge / ROWS for edge in (row, row + 1))
    note = html.escape(f"{title} {begin:.4g} to {end:.4g}: {count} of {total}")
    # A single completion has to be seen, too.
    opacity = 0.15 + 0.85 * count / total
    return (
        f'<rect x="{column}" y="{ROWS - 1 - row}" width="1" height="1" '
        f'fill-opacity="{opacity:.2f}"><title>{note}</title></rect>'
    )
