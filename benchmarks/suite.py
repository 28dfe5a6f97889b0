"""All GPU measurements of docs/benchmarks.md about rollouts and about engines side by side.

``python -m benchmarks.suite --list`` shows the steps; ``python -m benchmarks.suite --only
sync-8b,kernels --output DIR`` runs some. They run one after another, each with a deadline. A step's
output goes to ``DIR/<step>.log``; its measurements, one JSON line per row, are printed and go to
``DIR/rows.jsonl``. A step that fails or takes too long does not stop the remaining ones;
``--budget`` seconds after the start no further step begins. The exit status is 1 when a step did
not pass, or did not run because GPUs are missing or have too little memory. Some names are those of
several steps: ``mfu-1.7b`` is one step for each engine at its best and one at its defaults.

Engines want different versions of the same packages. ``--environments FILE`` names a JSON object
that has for a backend, or for a step, the variables of its process, such as
``{"automodel": {"PYTHONPATH": "/opt/automodel"}}``. A step's own come after its backend's.

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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    """A command, its GPUs with their memory, and the seconds after which it is ended."""

    command: tuple[str, ...]
    seconds: int
    gpus: int = 1
    gib: int = 0
    """Memory of a GPU, in GiB, that the command needs. 0: that of any GPU is enough."""

    smaller: tuple[str, ...] = ()
    """Arguments that are added on a GPU with less than ``gib``. Without them it does not run."""

    backend: str = ""
    """The engine, where the step runs one alone."""

    packages: str = ""
    """Name of its environment, where that is not an engine's or a server's (tools/gpu_jobs.py)."""

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


def obstacle(step: Step, gpus: int, gib: float) -> str:
    """Return why a machine with ``gpus`` GPUs of ``gib`` GiB cannot run a step, or nothing."""
    if step.gpus > gpus:
        return f"it needs {step.gpus} GPUs, here are {gpus}"
    if step.gib > gib and not step.smaller:
        return f"it needs {step.gib} GiB of memory on a GPU, here are {gib:.1f}"
    return ""


def fit(step: Step, gib: float) -> Step:
    """Return the step with the arguments that let it fit a GPU of ``gib`` GiB."""
    if step.gib <= gib:
        return step
    return replace(step, command=(*step.command, *step.smaller))


def smallest_memory() -> float:
    """Return the memory in GiB of the smallest GPU here, and 0 where there is none."""
    sizes = [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]
    return min(sizes, default=0) / 2**30


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
    names = {entry.partition(":")[0] for entry in backends.split(",")}
    return Step(
        command=(*spread(gpus), *module),
        seconds=seconds,
        gpus=gpus,
        backend=names.pop() if len(names) == 1 else "",
    )


def fp8_training(*ways: str) -> Step:
    """Return a step of benchmarks/fp8_training.py."""
    command = ("-m", "benchmarks.fp8_training", "--ways", ",".join(ways))
    return Step(command=command, seconds=500)


# Each engine's own options at its best. The others have none that make training faster on one host.
LIGER: dict[str, object] = dict.fromkeys(
    ("rms_norm", "rotary_pos_emb", "swiglu_mlp"), "liger_kernel"
)
BEST: dict[str, dict[str, object]] = {
    "fsdp2": {},
    "megatron": {"spec": "te"},
    "veomni": LIGER,
    "torchtitan": {},
    "automodel": {},
}
# VeOmni compiles no blocks that hold Liger's kernels.
UNCOMPILED = {"veomni": ("--no-compile",)}
# A micro-batch is half a step there, whose gradients would not be sharded before its end.
REDUCING = {"reduce_each_micro_batch": True}
OWN_OF_TWO: dict[str, dict[str, object]] = {"megatron": {"sequence_parallel": True}}
# Memory that an engine's best settings need where that is more than 80 GB, by start of the step's
# name, and what takes less. At 1.7B, weights, gradients and optimizer of Megatron are 29 GiB, the
# activations of 16,384 tokens 44, and the head's tensors 13. Of 8B on two GPUs the first alone are
# 69 GiB, and the step has taken 86.
LARGE: dict[str, tuple[int, tuple[str, ...]]] = {
    "mfu-1.7b-megatron": (90, ("--max-tokens", "8192")),
    "mfu-8b-2-megatron": (90, ()),
}


def engines(name: str, shape: str, seconds: int, *arguments: str, gpus: int = 1) -> dict[str, Step]:
    """Return two steps for each engine, at its best and at its defaults, a process each.

    Args:
        name: start of the steps' names.
        shape: shape of the model.
        seconds: deadline of a step.
        arguments: work of a step, the same for all.
        gpus: number of GPUs. On several, Megatron's best is tensor parallelism.
    """
    steps: dict[str, Step] = {}
    for backend, own in BEST.items():
        layout = ":tp=2" if backend == "megatron" and gpus > 1 else ""
        given = own | (OWN_OF_TWO.get(backend, {}) if gpus > 1 else {})
        best = ("--options", json.dumps({backend: given})) if given else ()
        best += UNCOMPILED.get(backend, ())
        recompute = ("--recompute", "full") if gpus > 1 else ()
        gib, smaller = LARGE.get(f"{name}-{backend}", (0, ()))
        steps[f"{name}-{backend}"] = replace(
            mfu(backend + layout, shape, seconds, *arguments, *best, *recompute, gpus=gpus),
            gib=gib,
            smaller=smaller,
        )
        steps[f"{name}-{backend}-defaults"] = mfu(
            backend, shape, seconds, *arguments, "--defaults", gpus=gpus
        )
    return steps


def automatic(
    name: str, shape: str, seconds: int, *arguments: str, gpus: int = 1
) -> dict[str, Step]:
    """Return a step for each engine at its defaults, but with ``max_tokens: auto``."""
    given = (*arguments, "--defaults", "--max-tokens", "auto")
    return {
        f"{name}-{backend}": mfu(backend, shape, seconds, *given, gpus=gpus) for backend in BEST
    }


def keeping(name: str, shape: str, seconds: int, *arguments: str, gpus: int) -> dict[str, Step]:
    """Return a step for each engine that recomputes nothing, in micro-batches of 8,192 tokens.

    A GPU of 80 GB does not have the memory for 8B.
    """
    steps: dict[str, Step] = {}
    for backend, own in BEST.items():
        megatron = backend == "megatron"
        given = own | (OWN_OF_TWO["megatron"] if megatron else REDUCING)
        step = mfu(
            backend + (":tp=2" if megatron else ""),
            shape,
            seconds,
            *arguments,
            "--max-tokens",
            "8192",
            "--options",
            json.dumps({backend: given}),
            *UNCOMPILED.get(backend, ()),
            gpus=gpus,
        )
        steps[f"{name}-{backend}"] = replace(step, gib=90)
    return steps


def throughput(
    server: str,
    shape: str,
    seconds: int,
    *arguments: str,
    pair: str = "quantization",
    environment: dict[str, str] | None = None,
) -> Step:
    """Return a step of benchmarks/rollout_throughput.py with a pair of settings."""
    return Step(
        command=(
            "-m",
            "benchmarks.rollout_throughput",
            "--server",
            server,
            "--shape",
            shape,
            "--pair",
            pair,
            *arguments,
        ),
        seconds=seconds,
        environment=environment or {},
    )


def rl_steps(name: str, shape: str, best: int, *arguments: str) -> dict[str, Step]:
    """Return two steps of benchmarks/rl_step.py on two GPUs: the recipe as it is, and at its best.

    Args:
        name: start of the steps' names.
        shape: shape of the model.
        best: tokens of the largest micro-batch of which nothing has to be recomputed.
        arguments: work of a step, the same for both.
    """
    return {
        name + suffix: Step(
            command=(
                *("-m", "benchmarks.rl_step", "--shape", shape, "--gpus", "2"),
                *("--sequences", "256", "--warmup", "1", "--steps", "3"),
                *arguments,
                *own,
            ),
            seconds=590,
            gpus=2,
        )
        for suffix, own in (
            # The recipe's own micro-batch.
            ("", ("--max-tokens", "24576")),
            (
                "-best",
                (
                    *("--max-tokens", str(best)),
                    *("engine.memory.compile=true", "engine.memory.recompute=none"),
                ),
            ),
        )
    }


def mechanisms(name: str, models: str) -> dict[str, Step]:
    """Return a step of benchmarks/mechanisms.py, with the model to which it compares the others."""
    own = ("--output", f"runs/{name}", "--lanes", "5", "--models", f"qwen3,{models}")
    command = ("-m", "benchmarks.mechanisms", *own)
    return {name: Step(command=command, seconds=590, packages="mixers")}


ZOO_ON_VLLM = ("tools/zoo.py", "measure", "--rollout", "vllm", "--device", "cuda", "--lanes", "16")
WORK = ("--tokens", "16384", "--document", "4096", "--steps", "6", "--warmup", "3")
IN_FLOAT8 = (
    "--recompute",
    "full",
    "--precision",
    "bfloat16,float8:rowwise,float8:tensorwise",
)

KEPT = ("--recompute", "full,full:0.2,none")
# A GPU of 80 GB does not have the memory to recompute nothing.
FEWER = ("--recompute", "full,full:0.2")

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
        "megatron:tp=2",
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
        "megatron:ep=2",
        gpus=2,
        enforce_eager=True,
    ),
    **syncs(
        "sync-engines-8b",
        "qwen3-8b",
        580,
        "--backend",
        "fsdp2,veomni,automodel,torchtitan,megatron:tp=2",
        gpus=2,
        enforce_eager=True,
        # The engines are made while the replica holds its memory.
        gpu_memory_utilization=0.35,
    ),
    **syncs(
        "sync-engines-moe",
        "qwen3-30b-a3b-cut",
        580,
        "--layers",
        "12",
        "--backend",
        "fsdp2:ep=2,veomni:ep=2,automodel:ep=2,torchtitan:ep=2,megatron:ep=2",
        gpus=2,
        enforce_eager=True,
        # The engines are made while the replica holds its memory.
        gpu_memory_utilization=0.35,
    ),
    **{
        f"host-{tokens}{suffix}": mfu(
            "fsdp2",
            "0.6b",
            200,
            "--tokens",
            str(tokens),
            "--document",
            str(min(tokens, 4096)),
            "--options",
            json.dumps({"fsdp2": {"cast_each_pass": casts}}),
        )
        for tokens in (2048, 8192)
        for suffix, casts in (("", False), ("-cast", True))
    },
    **engines("mfu-1.7b", "1.7b", 200, *WORK),
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
    **engines("mfu-8b-2", "8b", 300, *WORK, gpus=2),
    # The same work with whole experts gathered, and with experts spread over both GPUs.
    "mfu-moe-2": replace(
        mfu("fsdp2,fsdp2:ep=2", "30b-a3b-6", 500, *WORK, "--no-compile", gpus=2),
        gib=90,
        smaller=("--recompute", "full"),
    ),
    # FP8 beside bf16 in one process.
    "mfu-8b-2-torchtitan-float8": mfu("torchtitan", "8b", 590, *WORK, *IN_FLOAT8, gpus=2),
    # What a user gets who sets nothing but the model, and what the best settings give.
    "defaults-0.6b": mfu("fsdp2", "0.6b", 300, *WORK, "--tokens", "32768", "--defaults", "beside"),
    # The best settings take 85.4 GiB in one micro-batch, and 62.6 in two.
    "defaults-1.7b": replace(
        mfu("fsdp2", "1.7b", 300, *WORK, "--tokens", "32768", "--defaults", "beside"),
        gib=90,
        smaller=("--max-tokens", "16384"),
    ),
    "defaults-8b-2": mfu(
        "fsdp2", "8b", 500, *WORK, "--recompute", "full", "--defaults", "beside", gpus=2
    ),
    **rl_steps("defaults-rl-0.6b", "qwen3-0.6b", 32768),
    **rl_steps("defaults-rl-8b", "qwen3-8b", 4096, "--new", "512"),
    # Recomputation of all activations, of those that a share leaves, and of none.
    "recompute-1.7b": replace(
        mfu("fsdp2", "1.7b", 300, *WORK, "--tokens", "32768", *KEPT), gib=92, smaller=FEWER
    ),
    "recompute-8b-12": replace(
        mfu("fsdp2", "8b-12", 300, *WORK, "--tokens", "24576", "--document", "512", *KEPT),
        gib=92,
        smaller=FEWER,
    ),
    "float8-1.7b": mfu("fsdp2", "1.7b", 400, *WORK, "--tokens", "32768", *IN_FLOAT8),
    "float8-8b-2": mfu("fsdp2", "8b", 590, *WORK, *IN_FLOAT8, gpus=2),
    "mfu-8b-2-megatron-pp": mfu("megatron:pp=2", "8b", 300, *WORK, "--recompute", "full", gpus=2),
    **automatic("auto-1.7b", "1.7b", 200, *WORK, "--tokens", "32768"),
    **automatic("auto-8b-2", "8b", 300, *WORK, gpus=2),
    **keeping("mfu-8b-2-kept", "8b", 300, *WORK, gpus=2),
    # Each half takes seven minutes on an H200, of which compiling is most.
    **mechanisms("mechanisms-attention", "gemma2,gpt-oss,deepseek-v3,gemma4"),
    **mechanisms("mechanisms-state", "qwen3-next,qwen3.5,nemotron-h,deepseek-v3.2,qwen3-moe"),
    "vision": Step(command=("-m", "benchmarks.vision"), seconds=400),
    "zoo-vllm": Step(command=(*ZOO_ON_VLLM, "--quantization", "none"), seconds=580),
    "zoo-vllm-fp8": Step(command=(*ZOO_ON_VLLM, "--quantization", "fp8"), seconds=580),
    "router-replay": Step(
        command=(
            "-m",
            "benchmarks.router_replay",
            "--shape",
            "qwen3-30b-a3b",
            "--layers",
            "8",
            # Mismatch is measured, not speed: nothing is compiled.
            "--rollout",
            json.dumps({"enforce_eager": True}),
        ),
        seconds=400,
    ),
    # Transformer Engine computes the one, and torchao the other.
    "fp8-training": fp8_training(
        "fsdp2-bf16", "megatron-bf16", "megatron-local-bf16", "megatron-fp8"
    ),
    "fp8-training-fsdp2": replace(
        fp8_training("fsdp2-bf16", "fsdp2-rowwise-fp8", "fsdp2-tensorwise-fp8"), backend="fsdp2"
    ),
    "throughput-8b": throughput("vllm", "qwen3-8b", 580),
    # 512 sequences of up to 8,192 tokens.
    "throughput-8b-cache": throughput(
        "vllm",
        "qwen3-8b",
        590,
        "--context",
        "8192",
        "--new",
        "512",
        "--memory",
        "0.85",
        "--warmup",
        "0",
        "--repeats",
        "1",
        "--judged",
        "4",
        "--rollout",
        json.dumps({"max_model_len": 8448}),
        pair="cache",
        # Without kernels that a start compiles for minutes.
        environment={"VLLM_USE_DEEP_GEMM": "0"},
    ),
    # Greedy completions of random weights repeat themselves: nearly all proposals are accepted.
    "throughput-8b-ngram": throughput(
        "vllm",
        "qwen3-8b",
        590,
        "--sequences",
        "16",
        "--temperature",
        "0",
        "--new",
        "512",
        "--judged",
        "4",
        "--rollout",
        json.dumps({"max_model_len": 1024}),
        pair="ngram",
    ),
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

# Names of several steps.
GROUPS = {
    "defaults": [name for name in STEPS if name.startswith("defaults-")],
    "host": [name for name in STEPS if name.startswith("host-")],
    "sync-engines": ["sync-engines-8b-fp8", "sync-engines-moe-fp8"],
    "mfu-1.7b": [name for name in STEPS if name.startswith("mfu-1.7b-") and STEPS[name].backend],
    **{
        group: [name for name in STEPS if name.startswith(f"{group}-")]
        for group in ("auto-1.7b", "auto-8b-2", "mechanisms", "mfu-8b-2-kept")
    },
}
GROUPS["mfu-8b-2"] = [
    name for name in STEPS if name.startswith("mfu-8b-2-") and name not in GROUPS["mfu-8b-2-kept"]
]


def expand(text: str) -> list[str]:
    """Return the names of steps in a list of names by commas, without repetitions.

    Raises ``ValueError`` for an unknown name.
    """
    found: dict[str, None] = {}
    for name in text.split(","):
        if name not in GROUPS and name not in STEPS:
            known = ", ".join([*GROUPS, *STEPS])
            raise ValueError(f"expected names of steps, got {name!r}; there are {known}")
        found |= dict.fromkeys(GROUPS.get(name, [name]))
    return list(found)


def read_environments(path: Path | None) -> dict[str, dict[str, str]]:
    """Return the variables in a file by backend or step.

    Raises ``ValueError`` for a name that is neither, and for what is no object of variables.
    """
    if path is None:
        return {}
    found = json.loads(path.read_text())
    known = {*STEPS, *(step.backend for step in STEPS.values() if step.backend)}
    for name, variables in found.items():
        if name not in known:
            raise ValueError(f"{path}: expected backends and steps, got {name!r}")
        if not isinstance(variables, dict) or not all(
            isinstance(value, str) for value in variables.values()
        ):
            raise ValueError(f"{path}: {name}: expected an object of texts, got {variables!r}")
    return found


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


def brief(row: dict[str, Any]) -> str:
    """Return a row for the screen: in short for a sync, and otherwise as JSON."""
    engine = ":".join(part for part in (row.get("backend"), row.get("layout")) if part)
    if "unavailable" in row:
        return f"{engine:18} not available: {row['unavailable'].splitlines()[-1].strip()}"
    if "phases_ms" not in row:
        return json.dumps(row)
    phases = ", ".join(f"{name} {value}" for name, value in row["phases_ms"].items())
    return (
        f"{engine:18} {row['quantization']:4} {'audited' if row['audited'] else 'not audited':11} "
        f"{row['ms']:7.1f} ms ({row['min_ms']} to {row['max_ms']}; {phases}) "
        f"{row['tensors']} tensors, {row['quantized']} quantized, {row['wire_gb_s']} GB/s, "
        f"digest {row['digest'] or '-'}"
    )


def describe(name: str, step: Step) -> str:
    """Return a step's line of ``--list``: its GPUs, deadline and command."""
    memory = ""
    if step.gib:
        memory = f" of {step.gib} GiB"
        memory += f" (or with {' '.join(step.smaller)})" if step.smaller else ""
    return (
        f"{name:29} {step.gpus} GPU{memory}  at most {step.seconds} s  python "
        f"{' '.join(step.command)}"
    )


def last_words(log: Path) -> str:
    """Return the line of the log that most likely says why the step failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "FAILED" in line]
    return (errors or lines or ["nothing was printed"])[-1][:200]


def main(arguments: Sequence[str] | None = None) -> int:
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
    parser.add_argument(
        "--environments", type=Path, help="JSON: backend or step -> variables of its process"
    )
    options = parser.parse_args(arguments)
    try:
        names = expand(options.only)
        environments = read_environments(options.environments)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for name in names:
            print(describe(name, STEPS[name]))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    failed = False
    gib = smallest_memory()
    for name in names:
        spent = time.monotonic() - begin > options.budget
        why = obstacle(STEPS[name], torch.cuda.device_count(), gib)
        if spent or why:
            print(f"{name:29} not run: {'the budget is spent' if spent else why}", flush=True)
            failed = True
            continue
        step = fit(STEPS[name], gib)
        if step.command != STEPS[name].command:
            print(
                f"{name:29} with {' '.join(step.smaller)}, since a GPU has {gib:.1f} GiB",
                flush=True,
            )
        own = environments.get(step.backend, {}) | environments.get(name, {})
        step = replace(step, environment=step.environment | own)
        status, seconds, rows = run(name, step, options.output)
        failed |= status != 0
        with (options.output / "rows.jsonl").open("a") as file:
            file.writelines(f"{json.dumps({'step': name} | json.loads(row))}\n" for row in rows)
        words = "" if status == 0 else last_words(options.output / f"{name}.log")
        print(
            f"{name:29} {'passed' if status == 0 else f'exit {status}'} {seconds:6.0f} s  {words}",
            flush=True,
        )
        for row in rows:
            print(f"  {brief(json.loads(row))}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
