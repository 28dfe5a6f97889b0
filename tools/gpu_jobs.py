"""Write the jobs of one GPU host for tools/gpu_lanes.py: certificates, tests and benchmarks.

``python tools/gpu_jobs.py JOBS.json --reports DIR --commit HASH --certify megatron --parts 6
--renew fsdp2,veomni --tests fsdp2-gpu --steps mfu-8b-2,sync-8b-fp8``

- ``--certify`` runs the certificate of each engine or rollout in each precision, in ``--parts``
  parts, into ``DIR/NAME.DTYPE.PART``: ``engine-conformance merge --certify`` joins them. Engines
  run on ``--worlds`` ranks, rollouts on one;
- ``--renew`` copies the committed reports to ``DIR/ENGINE.DTYPE`` and runs the cases that have
  changed since;
- ``--tests`` runs the tests that want a GPU and have been on none since they were written;
- ``--steps`` runs steps of benchmarks.suite, each with its GPUs to itself.

A job's environment is its engine's name, its server's (``vllm``, ``sglang``), ``mixers`` for
kernels of linear attention and state spaces, or ``all`` for several engines in one process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matrix import ROOT, engine_devices, load, rollout_arguments, rollout_devices, run_arguments

sys.path.insert(0, str(ROOT))
from benchmarks.suite import BEST, STEPS, expand

DTYPES = ("float32", "bfloat16")
REPORTS = ROOT / "conformance" / "reports"
# Many ranks share a GPU and its host: each takes one thread, and little memory for NCCL.
SHARING = {
    "OMP_NUM_THREADS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
# Servers share a GPU: the suite's models need no more than this. SGLang's share is of what is free
# when it starts, and its neighbours take some of that until its cache is made.
SMALL_SERVERS = {
    "vllm": (
        *("--option", "gpu_memory_utilization=0.05"),
        *("--option", f"kv_cache_bytes={1 << 29}"),
    ),
    "sglang": (
        *("--option", "gpu_memory_utilization=0.95"),
        *("--option", "kv_cache_for_batch=true"),
    ),
}
# Names, folders with arguments of pytest, and variables that say "on the GPU".
TESTS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "megatron-families": (
        "megatron",
        ("packages/engine-megatron/tests/test_families.py",),
        {"ENGINE_TEST_DEVICE": "cuda"},
    ),
    "torchtitan-families": (
        "torchtitan",
        tuple(
            f"packages/engine-torchtitan/tests/test_{name}.py"
            for name in ("families", "pipeline", "values")
        ),
        {"ENGINE_TEST_DEVICE": "cuda"},
    ),
    "automodel-families": (
        "automodel",
        tuple(f"packages/engine-automodel/tests/test_{name}.py" for name in ("families", "values")),
        {"ENGINE_TEST_DEVICE": "cuda"},
    ),
    "veomni-images": (
        "veomni",
        ("packages/engine-veomni/tests/test_vision.py",),
        {"ENGINE_TEST_DEVICE": "cuda"},
    ),
    "fsdp2-gpu": (
        "fsdp2",
        ("-m", "gpu", "packages/engine-fsdp/tests", "packages/engine-torch/tests"),
        {},
    ),
    "vllm-images": (
        "vllm",
        ("packages/rollout-fp8/tests/vllm/test_images.py",),
        {"ROLLOUT_TEST_DEVICE": "cuda"},
    ),
}


def make_certificate(
    arguments: Sequence[str],
    name: str,
    dtype: str,
    report: Path,
    commit: str,
    lanes: int,
    *more: str,
) -> dict[str, Any]:
    """Return the job of a certificate in one precision, or of a part of it.

    Args:
        arguments: arguments of ``engine-conformance run`` that say what is certified, and where.
        name: the engine or the rollout, which is the name of its environment.
        dtype: the precision.
        report: the folder of its report.
        commit: the commit of this tree.
        lanes: cases at a time.
        more: further arguments.
    """
    return {
        "name": report.name,
        "environment": name,
        "variables": SHARING,
        "command": [
            *(sys.executable, "-m", "engine_conformance", *arguments),
            *("--dtype", dtype, "--certify", "--commit", commit, "--lanes", str(lanes)),
            *("--report", str(report), "--limit", "{limit}", "--patience", "4", "--quiet", *more),
        ],
        "seconds": 1500,
    }


def find_arguments(name: str, worlds: Sequence[int]) -> list[str]:
    """Return the arguments of ``engine-conformance run`` for an engine, or for a rollout.

    ``worlds`` are an engine's numbers of ranks. A rollout has one.
    """
    matrix = load()
    if (name, "cuda") in rollout_devices(matrix):
        return [*rollout_arguments(matrix, name, "cuda"), *SMALL_SERVERS.get(name, ())]
    return run_arguments(matrix, name, "cuda", worlds)


def make_renewal(
    engine: str, worlds: Sequence[int], dtype: str, folder: Path, commit: str, lanes: int
) -> dict[str, Any]:
    """Copy a committed report and return the job that renews it."""
    [committed] = REPORTS.glob(f"{engine}-*/cuda-{dtype}")
    report = folder / f"{engine}.{dtype}"
    shutil.copytree(committed, report, dirs_exist_ok=True)
    arguments = find_arguments(engine, worlds)
    return make_certificate(arguments, engine, dtype, report, commit, lanes, "--continue")


def make_test(name: str, folder: Path) -> dict[str, Any]:
    """Return the job of some tests."""
    environment, arguments, variables = TESTS[name]
    said = f"--junitxml={folder / name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", said, *arguments]
    return {
        "name": name,
        "environment": environment,
        "variables": variables,
        "command": command,
        "seconds": 600,
    }


def name_environment(name: str) -> str:
    """Return the name of a step's environment: its own, its engine's, its server's, or all."""
    chosen = STEPS[name]
    if chosen.packages:
        return chosen.packages
    if chosen.backend:
        return chosen.backend
    if "sglang" in name:
        return "sglang"
    text = " ".join(chosen.command)
    return "all" if any(one in text for one in BEST if one != "fsdp2") else "vllm"


def make_step(name: str, folder: Path) -> dict[str, Any]:
    """Return the job of a step of the suite of benchmarks."""
    chosen = STEPS[name]
    command = [sys.executable, "-m", "benchmarks.suite", "--only", name]
    command += ["--output", str(folder / name)]
    return {
        "name": name,
        "command": command,
        "gpus": chosen.gpus,
        "environment": name_environment(name),
        "seconds": chosen.seconds + 20,
        "least": 45,
    }


def make_word_reader(*known: str) -> Callable[[str], list[str]]:
    """Return a reader of a list with commas that has words of ``known`` alone."""

    def read(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown}")
        return found

    return read


def read_worlds(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks of a list with commas."""
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    """Write the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="of this tree, for the reports")
    pairs = [*engine_devices(load()), *rollout_devices(load())]
    certified = [name for name, device in pairs if device == "cuda"]
    committed = sorted({path.parent.name.rpartition("-")[0] for path in REPORTS.glob("*/cuda-*")})
    parser.add_argument("--certify", type=make_word_reader(*certified), default=[])
    parser.add_argument("--worlds", type=read_worlds, default=(1, 2), help="default: 1,2")
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument("--renew", type=make_word_reader(*committed), default=[])
    parser.add_argument("--renew-lanes", type=int, default=2)
    parser.add_argument("--tests", type=make_word_reader(*TESTS), default=[], help=",".join(TESTS))
    parser.add_argument("--steps", default="")
    options = parser.parse_args()
    options.reports.mkdir(parents=True, exist_ok=True)
    found = [
        make_renewal(
            engine, options.worlds, dtype, options.reports, options.commit, options.renew_lanes
        )
        for engine in options.renew
        for dtype in DTYPES
    ]
    for name in options.certify:
        arguments = find_arguments(name, options.worlds)
        for dtype in DTYPES:
            for number in range(1, options.parts + 1):
                report = options.reports / f"{name}.{dtype}.{number:02d}"
                part = ("--part", f"{number}/{options.parts}") if options.parts > 1 else ()
                found.append(
                    make_certificate(arguments, name, dtype, report, options.commit, 1, *part)
                )
    found += [make_test(name, options.reports) for name in options.tests]
    names = expand(options.steps) if options.steps else []
    found += [make_step(name, options.reports) for name in names]
    options.jobs.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{options.jobs}: {len(found)} jobs")


if __name__ == "__main__":
    main()
