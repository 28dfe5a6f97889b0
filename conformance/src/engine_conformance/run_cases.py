"""``python -m engine_conformance.run_cases --backend NAME``: runs the cases, one line each, and a table.

Exit codes: 0 all that ran passed, 1 a case failed, 2 usage, 3 nothing ran.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    options = _parser().parse_args(arguments)
    from engine_conformance.cases import load_cases
    from engine_conformance.ranks import close_pools

    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        root = Path(folder)
        if options.plugin:
            _offer(options.plugin, root / "site")
        chosen = [one for one in load_cases().values() if fnmatch(one.id, options.case)]
        try:
            counts = _run(options, chosen, root)
        finally:
            close_pools()
    if counts["failed"] + counts["error"]:
        return 1
    return 0 if counts["passed"] else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_conformance.run_cases", description=__doc__)
    parser.add_argument("--backend", required=True, help="the name that the registry knows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--world", default="1,2", help="world sizes, by commas")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="precision of computation")
    parser.add_argument("--case", default="*", help="a glob of case ids")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no case after this")
    parser.add_argument("--plugin", help="module:ATTR of a descriptor that is not installed")
    return parser


def _offer(target: str, site: Path) -> None:
    """Make a descriptor discoverable as an installed one is, by an entry point on ``sys.path``; once is enough."""
    if any(entry.value == target for entry in entry_points(group="engine_api.engines")):
        return
    info = site / "engine_under_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[engine_api.engines]\nunder-test = {target}\n")
    sys.path.append(str(site))


def _run(options: argparse.Namespace, chosen: Sequence[object], root: Path) -> Counter[str]:
    from engine_conformance.cases import Case, Target, run_case

    began, rows, counts = time.monotonic(), list[str](), Counter[str]()
    for world in (int(part) for part in options.world.split(",")):
        target = Target(backend=options.backend, device=options.device, world=world, dtype=options.dtype, root=root)
        for one in chosen:
            assert isinstance(one, Case)
            if time.monotonic() - began > options.limit_seconds:
                counts["out of time"] += 1
                continue
            outcome = run_case(one, target)
            counts[outcome.status] += 1
            margin = "" if outcome.margin is None else f"{outcome.margin:.3g}"
            line = f"{outcome.status:8} {one.id:36} world {world}  margin {margin:8} {outcome.seconds:6.1f} s"
            print(line + (f"  {outcome.message}" if outcome.status == "skipped" else ""), flush=True)
            if outcome.status in ("failed", "error"):
                print(f"  MUST: {one.must}\n  {outcome.message}\n  hints: {one.hints}", flush=True)
                rows.append(line)
    _table(rows, counts, time.monotonic() - began)
    return counts


def _table(rows: Sequence[str], counts: Counter[str], seconds: float) -> None:
    print(
        "\n".join(["", *rows, ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) + f" in {seconds:.0f} s"])
    )


if __name__ == "__main__":
    sys.exit(main())
