"""Put the engines' training throughput side by side into docs/benchmarks.md.

``python tools/engine_table.py ROWS.jsonl`` reads the rows that ``python -m benchmarks.suite --only
mfu-1.7b,mfu-8b-2`` has written, and replaces what stands between ``<!-- begin engines -->`` and
``<!-- end engines -->`` (added at the end of the page when they are not there). ``--print`` shows
the section instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matrix import ROOT, replace_section, table

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = ("step", "engine", "settings", "tokens/s", "MFU", "peak memory", "step time", "loss")


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the section: machine and versions, one row per measurement, and what FP8 gains.

    The rows of a shape and a number of GPUs stand together, the fastest first.
    """
    rows = [row for row in rows if "mfu" in row]
    machines = sorted({f"{row['gpus']} × {row['device']}" for row in rows})
    versions = sorted({f"torch {row['torch']}, transformers {row['transformers']}" for row in rows})
    work = sorted({f"{row['tokens']:,} in documents of {row['document']:,}" for row in rows})
    facts = (
        f"{'; '.join(machines)}. {'; '.join(versions)}. Tokens a step and GPU: {'; '.join(work)}."
    )
    rows = sorted(rows, key=lambda row: (row["gpus"], row["shape"], -row["tokens_per_s"]))
    parts = [facts, table(HEAD, [_cells(row) for row in rows])]
    parts += [line for row in rows if (line := _compare_float8(row, rows))]
    return "\n\n".join(part.strip() for part in parts)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    peak = f"{row['peak_gib']:.1f} GiB"
    return (
        f"`{row['step']}`",
        row["backend"],
        _describe(row),
        f"{row['tokens_per_s']:,}",
        f"{100 * row['mfu']:.1f} %",
        peak,
        f"{row['step_ms']:,.0f} ms",
        f"{row['loss']:.3f}",
    )


def _describe(row: dict[str, Any]) -> str:
    """Return the settings of a row in words."""
    words = ["defaults" if row["defaults"] else "", row["layout"], row["precision"]]
    words.append("compiled" if row["compile"] else "")
    words.append("recomputed" if row["recompute"] == "full" else "")
    if row["micro_batches"] > 1:
        words.append(f"{row['micro_batches']} micro-batches")
    words += [f"{name}={value}" for name, value in row["options"].items()]
    return ", ".join(word for word in words if word)


def _compare_float8(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return how a row in FP8 compares with bf16 of the same engine and work, or an empty text.

    The step that measured both in one process goes before others.
    """
    alike = ("backend", "layout", "shape", "gpus", "tokens", "recompute", "compile", "defaults")
    others = [
        other
        for other in rows
        if other["precision"] == "bfloat16" and all(other[key] == row[key] for key in alike)
    ]
    if row["precision"] != "float8" or not others:
        return ""
    other = max(others, key=lambda other: other["step"] == row["step"])
    ratio = row["tokens_per_s"] / other["tokens_per_s"]
    where = "in one process" if other["step"] == row["step"] else f"of `{other['step']}`"
    recipe = row["options"].get("float8_recipe", "")
    return f"`{row['step']}`: float8 ({recipe}) has {ratio:.2f} × the tokens/s of bfloat16 {where}."


def main() -> None:
    """Read the rows and rewrite the page, or print the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--print", action="store_true", help="show the section, change nothing")
    options = parser.parse_args()
    body = render([json.loads(line) for line in options.rows.read_text().splitlines()])
    if options.print:
        print(body)
        return
    PAGE.write_text(replace_section(PAGE.read_text(), "engines", body))


if __name__ == "__main__":
    main()
