"""Measure how near right engines come to the tolerances, over seeds and kernels.

``python tools/margins.py --out FILE`` runs every case that compares numbers, in one process and
with warm ranks, against engines that differ in rounding alone (``engine_mutants.kernels``), with
batches of many seeds, and appends one line of JSON per run to FILE. Runs that FILE already has are
left out, so that a scan can be stopped and continued.
``python tools/margins.py --record FILE …`` sums such files up in ``conformance/margins.json``,
prints the table, and fails if a right engine failed or had a margin above 0.8.
``python tools/margins.py`` writes the table of docs/tolerances.md from that; ``--check`` compares
the two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from matrix import ROOT, replace_section, table, write_or_check

sys.path[:0] = [str(ROOT / "conformance" / folder) for folder in ("loopback", "mutants")]

from engine_conformance.cases import Case, Target, load_cases, run_case  # noqa: E402
from engine_conformance.ranks import close_pools  # noqa: E402
from engine_mutants.kernels import ENGINES, KERNELS, backend, install_kernels  # noqa: E402

PAGE = ROOT / "docs" / "tolerances.md"
RECORD = ROOT / "conformance" / "margins.json"
# The largest margin that a right engine may show.
LIMIT = 0.8
# Cases that compare numbers with the oracle's. Those of compiled code run other operators than the
# kernels replace.
CASES = (
    "forward.llama,forward.qwen*,forward.temperature,forward.microbatch_split,forward.values,"
    "train.*,steps.clipping,steps.masked_batch,steps.nonfinite,lora.train,lora.switched,"
    "memory.chunks,memory.half_precision,rl.ppo,rl.grpo,rl.value,parallel.hsdp,parallel.ulysses,"
    "checkpoint.foreign"
)
Line = Mapping[str, Any]


def chosen_cases(globs: str) -> list[Case]:
    """Return the cases that fit one of the globs, in their order.

    Raises:
        SystemExit: if a glob fits no case.
    """
    cases = load_cases()
    for glob in globs.split(","):
        if not any(fnmatchcase(name, glob) for name in cases):
            raise SystemExit(f"no case is called {glob!r}")
    return [c for name, c in cases.items() if any(fnmatchcase(name, g) for g in globs.split(","))]


def runs(options: argparse.Namespace, root: Path) -> Iterator[tuple[Case, Target, Line]]:
    """Yield every run that applies, seed by seed, with the values that tell it from the others."""
    first, _, last = options.seeds.partition("-")
    kernels = options.kernel.split(",") if options.kernel else list(KERNELS)
    cases = chosen_cases(options.case)
    ways = [(kernel, engine) for engine in options.engine.split(",") for kernel in kernels]
    for seed in range(int(first), int(last or first) + 1):
        for kernel, engine in [ways[seed % len(ways)]] if options.in_turn else ways:
            for model_type in options.model_type.split(","):
                for world in map(int, options.world.split(",")):
                    target = Target(
                        backend=backend(engine, kernel),
                        root=root,
                        world=world,
                        dtype=options.dtype,
                        model_type=model_type,
                        patience=10.0,
                        seed=seed,
                    )
                    about = {
                        "engine": engine,
                        "kernel": kernel,
                        "world": world,
                        "dtype": options.dtype,
                        "model_type": model_type,
                        "seed": seed,
                    }
                    for case in cases:
                        if case.why_not(target) is None:
                            yield case, target, {"case": case.id} | about


def key(line: Line) -> tuple[Any, ...]:
    """Return the values that tell a run from others."""
    names = ("case", "engine", "kernel", "world", "dtype", "model_type", "seed")
    return tuple(line[name] for name in names)


def read(files: Iterable[Path]) -> list[Line]:
    """Return the lines of files, the last of each run."""
    lines = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    return list({key(line): line for line in lines}.values())


def scan(options: argparse.Namespace) -> None:
    """Run what is asked for and is not in the file yet, and append each outcome to the file."""
    torch.set_num_threads(1)
    done = {key(line) for line in read([options.out])} if options.out.exists() else set()
    with (
        tempfile.TemporaryDirectory(prefix="margins-") as folder,
        options.out.open("a", buffering=1) as out,
    ):
        install_kernels(Path(folder) / "site")
        try:
            for case, target, about in runs(options, Path(folder)):
                if key(about) in done:
                    continue
                outcome = run_case(case, target)
                margin = outcome.margin
                line = dict(about) | {
                    "status": outcome.status,
                    "margin": None if margin is None else min(margin, sys.float_info.max),
                    "seconds": round(outcome.seconds, 3),
                }
                if outcome.status != "passed" or (margin or 0) > LIMIT:
                    line |= {"message": outcome.message[-2000:]}
                    print(json.dumps(line), flush=True)
                out.write(json.dumps(line) + "\n")
        finally:
            close_pools()


def percentile(margins: Sequence[float], share: float) -> float:
    """Return the smallest margin that at least this share of the runs do not exceed.

    It is 0 where no run compared numbers, as where all of them ended as suite-error.
    """
    if not margins:
        return 0.0
    return sorted(margins)[max(0, math.ceil(share * len(margins)) - 1)]


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the distribution of margins by case and precision, and what was run."""
    by_case: dict[str, list[Line]] = {}
    for line in lines:
        name = line["case"] if line["dtype"] == "float32" else f"{line['case']} ({line['dtype']})"
        by_case.setdefault(name, []).append(line)
    cases = {}
    for name, found in sorted(by_case.items()):
        margins = [line["margin"] or 0.0 for line in found if line["status"] == "passed"]
        # A failure without a margin, as of a shape, is beyond every tolerance.
        margins += [
            line["margin"] or sys.float_info.max for line in found if line["status"] == "failed"
        ]
        worst = max(found, key=lambda line: line["margin"] or 0.0)
        wrong = sum(line["status"] != "passed" for line in found)
        if not any(margins) and not wrong:
            continue
        cases[name] = {
            "runs": len(found),
            "seeds": len({line["seed"] for line in found}),
            "kernels": len({line["kernel"] for line in found}),
            "not passed": wrong,
            "median": percentile(margins, 0.5),
            "99.9 %": percentile(margins, 0.999),
            "max": max(margins, default=0.0),
            "worst": f"{worst['engine']}, {worst['kernel']}, world {worst['world']}, "
            f"seed {worst['seed']}",
        }
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "runs": len(lines),
        "seeds": len({line["seed"] for line in lines}),
        "kernels": sorted({line["kernel"] for line in lines}),
        "engines": sorted({line["engine"] for line in lines}),
        "cases": cases,
    }


def rows(record: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    head = ("case", "runs", "seeds", "kernels", "not passed", "median", "99.9 %", "max", "worst")
    body = [
        (
            f"`{name}`",
            *(str(row[column]) for column in ("runs", "seeds", "kernels", "not passed")),
            *(f"{row[column]:.2f}" for column in ("median", "99.9 %", "max")),
            row["worst"],
        )
        for name, row in sorted(record["cases"].items(), key=lambda item: -item[1]["max"])
    ]
    return table(head, body)


def page(record: Mapping[str, Any]) -> str:
    """Return the page with its generated section."""
    kernels = [(f"`{name}`", KERNELS[name].about) for name in record["kernels"]]
    text = (
        f"{record['runs']} runs on {record['date']} with torch {record['torch']} on a CPU, engines "
        f"{' and '.join(f'`{one}`' for one in record['engines'])}, {record['seeds']} seeds.\n\n"
        f"{rows(record)}\n{table(('kernel', 'what is different'), kernels)}"
    )
    return replace_section(PAGE.read_text(), "margins", text)


def too_near(record: Mapping[str, Any]) -> list[str]:
    """Return one line for each case that a right engine failed, or nearly."""
    return [
        f"{name}: {row['not passed']} of {row['runs']} did not pass, largest margin "
        f"{row['max']:.2f} ({row['worst']}), at most {LIMIT} expected"
        for name, row in record["cases"].items()
        if row["not passed"] or row["max"] > LIMIT
    ]


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append one line per run to this file")
    parser.add_argument("--seeds", default="0-199", help="FIRST-LAST; default: 0-199")
    parser.add_argument("--engine", default=",".join(ENGINES), help=f"default: {','.join(ENGINES)}")
    parser.add_argument("--kernel", default="", help=f"default: {','.join(KERNELS)}")
    parser.add_argument("--case", default=CASES, help="globs, by commas; default: all with numbers")
    parser.add_argument("--world", default="1", help="numbers of ranks, by commas; default: 1")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--model-type", default="language_model,value_model")
    parser.add_argument(
        "--in-turn", action="store_true", help="run each seed on one kernel of one engine, in turn"
    )
    parser.add_argument("--record", type=Path, nargs="+", metavar="FILE", help="sum these up")
    parser.add_argument("--check", action="store_true", help="compare the page")
    options = parser.parse_args()
    if options.out:
        scan(options)
        return 0
    if options.record:
        record = summary(read(options.record))
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        print(rows(record))
        if problems := too_near(record):
            raise SystemExit("\n".join(problems))
    return write_or_check(PAGE, page(json.loads(RECORD.read_text())), "margins.py")


if __name__ == "__main__":
    sys.exit(main())
