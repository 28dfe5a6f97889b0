"""Put the results of a pytest-benchmark run into docs/benchmarks.md.

``python tools/benchmarks.py RESULT.json NAME [--command TEXT]`` replaces what stands between
``<!-- begin NAME -->`` and ``<!-- end NAME -->`` (added at the end of the page when they are not
there) by a table with the command, the machine, the versions and the date. A benchmark's shapes and
figures are those that it put into ``benchmark.extra_info``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from matrix import ROOT, replace_section, table

PAGE = ROOT / "docs" / "benchmarks.md"
TITLE = "# Benchmarks\n\nEach table says how it was made. Times are medians over rounds.\n"
VERSIONS = (
    "torch",
    "transformers",
    "engine-api",
    "engine-torch",
    "engine-fsdp",
    "engine-trainer",
)


def render(result: dict[str, Any], command: str) -> str:
    """Return the section: provenance, then one row per benchmark."""
    benchmarks = result["benchmarks"]
    extra = sorted({key for b in benchmarks for key in b["extra_info"]})
    rows = [
        (
            b["name"],
            _seconds(b["stats"]["median"]),
            _seconds(b["stats"]["iqr"]),
            str(b["stats"]["rounds"]),
            *(str(b["extra_info"].get(key, "")) for key in extra),
        )
        for b in benchmarks
    ]
    facts = [f"`{command}`", result["datetime"][:10], _machine(result["machine_info"]), _versions()]
    head = ("benchmark", "median", "IQR", "rounds", *extra)
    return f"{'; '.join(facts)}\n\n{table(head, rows)}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _machine(info: dict[str, Any]) -> str:
    cpu = info.get("cpu", {})
    name = cpu.get("brand_raw") or info.get("machine", "unknown CPU")
    return f"{name}, {cpu.get('count', '?')} cores{_accelerator()}"


def _accelerator() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    return f", {torch.cuda.device_count()} × {torch.cuda.get_device_name()}"


def _versions() -> str:
    parts = [f"Python {platform.python_version()}"]
    for name in VERSIONS:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def main() -> None:
    """Read the arguments and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("--command", default="nox -s bench")
    options = parser.parse_args()
    body = render(json.loads(options.result.read_text()), options.command)
    page = PAGE.read_text() if PAGE.is_file() else TITLE
    PAGE.write_text(replace_section(page, options.name, body))


if __name__ == "__main__":
    main()
