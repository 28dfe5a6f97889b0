"""All GPU measurements of docs/benchmarks.md about rollouts and about engines side by side.

``python -m benchmarks.suite --list`` shows the steps; ``python -m benchmarks.suite --only
sync-8b,kernels --output DIR`` runs some. They run one after another, each with a deadline. A step's
output goes to ``DIR/<step>.log``; its measurements, one JSON line per row, are printed and go to
``DIR/rows.jsonl``. A step that fails or takes too long does not stop the remaining ones;
``--budget`` seconds after the start no further step begins. The exit status is 1 when a step did
not pass.

vLLM compiles DeepGEMM's kernels on first use (``~/.cache/vllm/deep_gemm``): keep that folder from
run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

# Shapes are compiled when they occur, instead of all of them before the first request.
ENVIRONMENT = {
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "HF_HUB_OFFLINE": "1",
}
VLLM = {
    "gpu_memory_utilization": 0.55,
    "max_model_len": 1024,
    "truncation": False,
    "deterministic": False,
    "memory_saver": False,
}
# Triton and PyTorch are used: FlashAttention 3 and FlashInfer are large, and not on every machine.
SGLANG = {
    "gpu_memory_utilization": 0.55,
    "max_model_len": 1024,
    "deterministic": False,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
}
CUDA_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "packages/rollout-fp8/tests")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, the number of its GPUs, and the seconds after which it is ended."""

    command: tuple[str, ...]
    seconds: int
    gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict[str, str])


def syncs(
    name: str,
    shape: str,
    seconds: int,
    *arguments: str,
    gpus: int = 1,
    server: str = "vllm",
    **options: object,
) -> dict[str, Step]:
    """Return two steps of benchmarks/sync.py, one in bf16 and one in FP8."""
    rollout = (VLLM if server.startswith("vllm") else SGLANG) | options
    return {
        name + suffix: Step(
            command=(
                *spread(gpus),
                "-m",
                "benchmarks.sync",
                "--server",
                server,
                "--shape",
                shape,
                "--quantization",
                quantization,
                "--rollout",
                json.dumps(rollout),
                *arguments,
            ),
            seconds=seconds,
            gpus=gpus,
        )
        for suffix, quantization in (("", "none"), ("-fp8", "fp8"))
    }


def spread(gpus: int) -> tuple[str, ...]:
    """Return the command that starts a module on ``gpus`` GPUs."""
    return (
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
        if gpus > 1
        else ()
    )


def mfu(backends: str, shape: str, seconds: int, *arguments: str, gpus: int = 1) -> Step:
    """Return a step of benchmarks/mfu.py: the engines one after another, on the same work."""
    module = ("-m", "benchmarks.mfu", "--backend", backends, "--shape", shape, *arguments)
    return Step(command=(*spread(gpus), *module), seconds=seconds, gpus=gpus)


def throughput(server: str, shape: str, seconds: int, *arguments: str) -> Step:
    """Return a step of benchmarks/rollout_throughput.py, FP8 over bf16."""
    return Step(
        command=(
            "-m",
            "benchmarks.rollout_throughput",
            "--server",
            server,
            "--shape",
            shape,
            "--both",
            *arguments,
        ),
        seconds=seconds,
    )


STEPS = {
    "kernels": Step(command=("-m", "benchmarks.kernels"), seconds=90),
    "kernel-tests": Step(
        command=(*CUDA_TESTS[:-1], "packages/rollout-fp8/tests/test_kernels_cuda.py"), seconds=120
    ),
    "transport-tests": Step(
        command=(*CUDA_TESTS[:-1], "packages/rollout-fp8/tests/test_transports_cuda.py"),
        seconds=240,
        gpus=2,
    ),
    **syncs("sync-0.6b", "qwen3-0.6b", 300),
    **syncs("sync-8b", "qwen3-8b", 580, "--sequences", "512"),
    **syncs("sync-moe", "qwen3-30b-a3b-cut", 580, "--layers", "12", "--sequences", "512"),
    **syncs("sync-8b-2", "qwen3-8b", 400, gpus=2, enforce_eager=True),
    **syncs("sync-8b-4", "qwen3-8b", 400, gpus=4, enforce_eager=True),
    **syncs(
        "sync-8b-2-tp",
        "qwen3-8b",
        400,
        "--tensor-parallel",
        "2",
        gpus=2,
        tensor_parallel_size=2,
        enforce_eager=True,
    ),
    **syncs(
        "sync-8b-4-tp",
        "qwen3-8b",
        400,
        "--tensor-parallel",
        "4",
        gpus=4,
        tensor_parallel_size=4,
        enforce_eager=True,
    ),
    **syncs("sync-moe-2", "qwen3-30b-a3b-cut", 400, "--layers", "12", gpus=2, enforce_eager=True),
    **syncs("sync-moe-4", "qwen3-30b-a3b-cut", 400, "--layers", "12", gpus=4, enforce_eager=True),
    **syncs("sync-8b-server", "qwen3-8b", 400, server="vllm-server", enforce_eager=True),
    **syncs(
        "sync-8b-megatron-tp",
        "qwen3-8b",
        400,
        "--backend",
        "megatron",
        "--tp",
        "2",
        gpus=2,
        enforce_eager=True,
    ),
    **syncs(
        "sync-moe-megatron-ep",
        "qwen3-30b-a3b-cut",
        400,
        "--layers",
        "12",
        "--backend",
        "megatron",
        "--ep",
        "2",
        gpus=2,
        enforce_eager=True,
    ),
    "mfu-1.7b": mfu("fsdp2,megatron", "1.7b", 400),
    "mfu-1.7b-long": mfu(
        "fsdp2,megatron",
        "1.7b",
        400,
        "--tokens",
        "16384",
        "--document",
        "16384",
        "--recompute",
        "full",
    ),
    "mfu-8b-2": mfu(
        "fsdp2,megatron:tp=2,megatron:pp=2",
        "8b",
        500,
        "--tokens",
        "16384",
        "--recompute",
        "full",
        gpus=2,
    ),
    "mechanisms": Step(
        command=("-m", "benchmarks.mechanisms", "--output", "runs/mechanisms"), seconds=590
    ),
    "router-replay": Step(
        command=(
            "-m",
            "benchmarks.router_replay",
            "--shape",
            "qwen3-30b-a3b",
            "--layers",
            "8",
        ),
        seconds=400,
    ),
    "fp8-training": Step(command=("-m", "benchmarks.fp8_training"), seconds=500),
    "throughput-8b": throughput("vllm", "qwen3-8b", 580),
    "throughput-moe": throughput("vllm", "qwen3-30b-a3b-cut", 580),
    "rollout-profile": Step(
        command=(
            "-m",
            "engine_conformance",
            "run",
            "vllm",
            "--profile",
            "rollout",
            "--device",
            "cuda",
            "--partner",
            "fsdp2",
            "--world",
            "1",
            "--dtype",
            "bfloat16",
        ),
        seconds=300,
    ),
    "sglang-smoke": Step(
        command=(
            "-m",
            "benchmarks.rollout_throughput",
            "--server",
            "sglang",
            "--shape",
            "qwen3-0.6b",
            "--sequences",
            "64",
            "--rollout",
            json.dumps(SGLANG | {"cuda_graph": False}),
        ),
        seconds=300,
    ),
    **syncs("sglang-sync-0.6b", "qwen3-0.6b", 400, server="sglang"),
    **syncs("sglang-sync-8b", "qwen3-8b", 580, "--sequences", "512", server="sglang"),
    **syncs(
        "sglang-sync-moe",
        "qwen3-30b-a3b-cut",
        580,
        "--layers",
        "12",
        "--sequences",
        "512",
        server="sglang",
    ),
}


def run(name: str, step: Step, output: Path) -> tuple[int, float, list[str]]:
    """Run a step and return its exit status (124: timeout), seconds, and printed JSON lines."""
    log = output / f"{name}.log"
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | step.environment,
            start_new_session=True,
        )
        try:
            status = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    return status, time.monotonic() - begin, [line for line in lines if line.startswith("{")]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the step's whole session: a server that is ended from outside leaves children behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def last_words(log: Path) -> str:
    """Return the line of the log that most likely says why the step failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "FAILED" in line]
    return (errors or lines or ["nothing was printed"])[-1][:200]


def main() -> int:
    """Parse the arguments, run the steps, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", default=",".join(STEPS), help="names, in the order in which they are to run"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/suite"))
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no step begins"
    )
    parser.add_argument("--list", action="store_true", help="show the steps and run nothing")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if options.list:
        for name in names:
            print(
                f"{name:18} {STEPS[name].gpus} GPU  at most {STEPS[name].seconds} s  python "
                f"{' '.join(STEPS[name].command)}"
            )
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    begin, failed, present = time.monotonic(), False, torch.cuda.device_count()
    for name in names:
        spent, missing = time.monotonic() - begin > options.budget, STEPS[name].gpus > present
        if spent or missing:
            why = (
                "the budget is spent"
                if spent
                else f"it needs {STEPS[name].gpus} GPUs, here are {present}"
            )
            print(f"{name:18} not run: {why}", flush=True)
            failed = True
            continue
        status, seconds, rows = run(name, STEPS[name], options.output)
        failed |= status != 0
        with (options.output / "rows.jsonl").open("a") as file:
            file.writelines(f"{json.dumps({'step': name} | json.loads(row))}\n" for row in rows)
        words = "" if status == 0 else last_words(options.output / f"{name}.log")
        print(
            f"{name:18} {'passed' if status == 0 else f'exit {status}'} {seconds:6.0f} s  {words}",
            flush=True,
        )
        for row in rows:
            print(f"  {row}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
