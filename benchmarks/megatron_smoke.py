"""engine-megatron's layouts and layer specs on GPUs, compared with the suite's float64 oracle.

``python -m benchmarks.megatron_smoke`` runs every step that the GPUs here allow, each in processes
of its own with a deadline, continues after a failure, and prints one table. ``--list`` shows the
steps, ``--only te-cp2,fp8`` chooses, ``--output DIR`` keeps logs and rows.jsonl.

A step computes log-probs of every token, the gradient of every weight in the first of three AdamW
steps (Adam's first moment, read through the checkpoint's boxes), and log-probs after the third.
Columns:

    before, after   error of a log-prob in nats, before the first step and after the third: root
                    mean square of all tokens and of the worst document, and the largest; then the
                    share of tokens that were compared
    weight          |g - g*| / |g*| of the worst weight that is no expert's, and of the middle one
                    of experts
    norm            relative error of the first step's gradient norm

The worst document, these weights and the norm are judged. Tokens of a mixture of experts whose
choice of experts may change by rounding are left out (`OracleModel.routing_margin`). Their
gradients are included: among experts the middle weight is judged, not the worst. The exit status is
1 when a step did not pass or was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import Step, last_words, run
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.comm import Comm, SingleComm, TorchComm
from engine_api.config import Precision
from engine_api.weights import assemble
from engine_conformance.fixtures import (
    PackedDocuments,
    TinyModel,
    packed_documents,
    write_checkpoint,
)
from engine_conformance.oracle import (
    AdamWConfig,
    Schedule,
    load_oracle,
    loss_and_grads,
    sft,
    train_steps,
)
from engine_conformance.tolerances import tolerance

# FP8's blocks divide these sides, also on two ranks, and the heads are as large as real ones.
DENSE = TinyModel(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_position=2048,
)
EXPERTS = TinyModel(
    family="qwen3_moe",
    vocab_size=1024,
    hidden_size=256,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    num_experts=8,
    top_k=2,
    moe_intermediate_size=256,
    max_position=2048,
)
LENGTHS = (700, 129, 1, 300, 64, 31, 257, 8)
STEPS, LR, EPS, BETA = 3, 1e-4, 1e-5, 0.9


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest errors of a step that passes.

    They are those of a document's log-probs (nats, root mean square), of a weight's gradient and of
    the norm (both relative). ``routed`` is the limit of a weight in a model with experts, which
    receives other tokens after rounding.
    """

    nats: float
    weight: float
    routed: float
    norm: float


# The local spec on a CPU gave 1.2e-5, 3e-6 and 1e-6 in float32; 0.16, 0.04 and 8e-4 in bfloat16,
# and with experts 0.19, 0.18 and 1e-3. FP8's limits are a guess: eight times bfloat16's rounding,
# and less than 1, the error of a missing gradient.
LIMITS = {
    "float32": Limit(nats=1e-4, weight=1e-4, routed=1e-4, norm=1e-4),
    "bfloat16": Limit(nats=0.3, weight=0.12, routed=0.3, norm=0.01),
    "float8": Limit(nats=1.5, weight=0.8, routed=0.9, norm=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The engine of a step."""

    gpus: int = 1
    compute: Any = "bfloat16"
    spec: str = "te"
    parallelism: dict[str, int] = field(default_factory=dict[str, int])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    experts: bool = False
    recompute: Any = "none"
    seconds: int = 150


_SP: dict[str, Any] = {"sequence_parallel": True}
LAYOUTS = {
    "local-fp32": Layout(spec="local", compute="float32"),
    "local": Layout(spec="local"),
    "te": Layout(),
    "te-recompute": Layout(recompute="full"),
    "fp8": Layout(compute="float8"),
    "fp8-recompute": Layout(compute="float8", recompute="full"),
    "local-moe": Layout(spec="local", experts=True),
    "te-moe": Layout(experts=True),
    "fp8-moe": Layout(experts=True, compute="float8"),
    "local-tp2": Layout(gpus=2, spec="local", parallelism={"tp": 2}),
    "te-tp2": Layout(gpus=2, parallelism={"tp": 2}),
    "te-tp2-sp": Layout(gpus=2, parallelism={"tp": 2}, options=_SP),
    "local-cp2": Layout(gpus=2, spec="local", parallelism={"cp": 2}),
    "local-cp2-fp32": Layout(gpus=2, spec="local", compute="float32", parallelism={"cp": 2}),
    "te-cp2": Layout(gpus=2, parallelism={"cp": 2}),
    "te-pp2": Layout(gpus=2, parallelism={"pp": 2}),
    "te-dp2": Layout(gpus=2),
    "te-ep2": Layout(gpus=2, parallelism={"ep": 2}, experts=True),
    "te-ep2-tp2-sp": Layout(
        gpus=2,
        parallelism={"ep": 2, "tp": 2},
        options=_SP | {"expert_tensor_parallel": 1},
        experts=True,
    ),
    "fp8-tp2-sp": Layout(gpus=2, compute="float8", parallelism={"tp": 2}, options=_SP),
    "fp8-cp2": Layout(gpus=2, compute="float8", parallelism={"cp": 2}),
    "fp8-ep2": Layout(gpus=2, compute="float8", parallelism={"ep": 2}, experts=True),
    "te-tp2-sp-cp2": Layout(gpus=4, parallelism={"tp": 2, "cp": 2}, options=_SP),
    "te-pp2-cp2": Layout(gpus=4, parallelism={"pp": 2, "cp": 2}),
    "te-cp4": Layout(gpus=4, parallelism={"cp": 4}),
    "te-ep4": Layout(gpus=4, parallelism={"ep": 4}, experts=True),
    "te-ep2-cp2": Layout(gpus=4, parallelism={"ep": 2, "cp": 2}, experts=True),
}


# --- in the ranks ---------------------------------------------------------------------------------


def build(layout: Layout, folder: Path, device: str) -> Any:
    """Build the engine and initialize it."""
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        precision=Precision(compute=layout.compute),
        optimizer=OptimizerConfig(lr=LR, eps=EPS, clip_norm=None, betas=(BETA, 0.999)),
        parallelism=Parallelism(**layout.parallelism),
        options={"spec": layout.spec} | layout.options,
        memory=Memory(max_tokens=1024, logit_chunk=256, recompute=layout.recompute),
    )
    engine = EngineRegistry.create(backend="megatron", device=device, config=config)
    engine.initialize()
    return engine


def measure(engine: Any, documents: PackedDocuments, comm: Comm) -> dict[str, Any]:
    """Return log-probs before and after three steps, and the first step's gradients, loss and norm.

    The log-probs are in document order.
    """
    place, lengths = engine.topology, documents.lengths
    mine = list(range(place.dp_rank, len(lengths), place.dp_size))
    own = documents.take(mine)
    bounds = own.cu_seqlens.tolist()
    rows = [
        {"input_ids": own.input_ids[a:b], "loss_weight": own.loss_weight[a:b]}
        for a, b in pairwise(bounds)
    ]
    batch = Batch.pack(
        [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    )
    before = _in_order(engine.infer_batch(batch).log_probs, batch.lengths, mine, comm)
    first = engine.train_batch(batch, sft_loss)
    grads = _first_gradients(engine, comm)
    for _ in range(STEPS - 1):
        engine.train_batch(batch, sft_loss)
    after = _in_order(engine.infer_batch(batch).log_probs, batch.lengths, mine, comm)
    return {
        "before": before,
        "after": after,
        "grads": grads,
        "loss": first.loss,
        "norm": first.grad_norm,
    }


def _in_order(values: Tensor, lengths: Any, mine: list[int], comm: Comm) -> Tensor:
    parts: dict[int, Tensor] = {}
    for row in comm.all_gather(dict(zip(mine, values.cpu().split(list(lengths)), strict=True))):
        parts |= row
    return torch.cat([parts[document] for document in sorted(parts)])


def _first_gradients(engine: Any, comm: Comm) -> dict[str, Tensor]:
    """Return whole gradients by name: after one step Adam's first moment is ``(1 - beta) g``."""
    own: dict[str, Any] = {}
    for key, (tensor, spec) in engine.state_shards().items():
        if key.endswith(".exp_avg") and spec.replica == 0 and not spec.is_empty:
            own[key.removeprefix("optim.").removesuffix(".exp_avg")] = (tensor.detach().cpu(), spec)
    rows = comm.all_gather(own)
    names = sorted({name for row in rows for name in row})
    return {
        name: assemble([row[name] for row in rows if name in row]) / (1 - BETA) for name in names
    }


def compare(
    got: dict[str, Any], folder: Path, documents: PackedDocuments, layout: Layout
) -> dict[str, Any]:
    """Return the step's row: errors against the oracle, and whether they are within the limits."""
    oracle = load_oracle(folder)
    dtype = torch.float32 if layout.compute == "float32" else torch.bfloat16
    gap = 2 * tolerance("router_logits", dtype).atol if layout.experts else 0.0
    keep = oracle.routing_margin(documents.input_ids, documents.cu_seqlens) > gap
    loss, grads = loss_and_grads(oracle, documents, sft, documents.denominator)
    trained = train_steps(
        oracle,
        [documents] * STEPS,
        optimizer=AdamWConfig(betas=(BETA, 0.999), eps=EPS, weight_decay=0.0),
        schedule=Schedule(lr=LR),
    )
    row: dict[str, Any] = {"kept": round(float(keep.double().mean()), 3)}
    for when, model in (("before", oracle), ("after", trained.oracle)):
        want = model.token_outputs(documents.input_ids, documents.cu_seqlens).log_probs
        error = got[when].double() - want
        kept = [
            part[own]
            for part, own in zip(error.split(LENGTHS), keep.split(LENGTHS), strict=True)
            if own.any()
        ]
        row[f"{when}_rms"], row[f"{when}_max"] = _rms(error[keep]), float(error[keep].abs().max())
        row[f"{when}_document"] = max(_rms(part) for part in kept)
    errors = {
        name: float((got["grads"][name].double() - true).norm() / true.norm())
        for name, true in grads.items()
    }
    experts = sorted(error for name, error in errors.items() if ".experts." in name)
    worst = max((name for name in errors if ".experts." not in name), key=lambda name: errors[name])
    row |= {
        "weight": errors[worst],
        "weight_name": worst,
        "experts": experts[len(experts) // 2] if experts else 0.0,
    }
    row["loss"], row["norm"] = (
        abs(got["loss"] - loss) / abs(loss),
        abs(got["norm"] / trained.steps[0].grad_norm - 1),
    )
    limit = LIMITS[layout.compute]
    weight = limit.routed if layout.experts else limit.weight
    judged = {
        "before_document": limit.nats,
        "after_document": limit.nats,
        "weight": weight,
        "experts": weight,
        "norm": limit.norm,
    }
    row["passed"] = all(row[name] <= most for name, most in judged.items())
    return row


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


def in_rank(name: str, root: Path, device: str) -> bool:
    """Run one rank of a step and return whether the step passed; rank 0 prints the row."""
    layout = LAYOUTS[name]
    documents = packed_documents(7, LENGTHS, vocab_size=DENSE.vocab_size)
    folder = root / ("experts" if layout.experts else "dense")
    engine = build(layout, folder, device)
    comm: Comm = TorchComm() if engine.topology.world_size > 1 else SingleComm()
    begin = time.monotonic()
    got = measure(engine, documents, comm)
    seconds = time.monotonic() - begin
    rank = engine.topology.rank
    engine.close()
    if rank:
        return True
    row = compare(got, folder, documents, layout) | {"seconds": round(seconds, 1)}
    print(json.dumps(row), flush=True)
    return bool(row["passed"])


# --- the controller -------------------------------------------------------------------------------


def step_of(name: str, root: Path, device: str) -> Step:
    """Return the command of a step."""
    gpus = LAYOUTS[name].gpus
    module = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(gpus),
        "-m",
        "benchmarks.megatron_smoke",
        "--rank-of",
        name,
        "--output",
        str(root),
        "--device",
        device,
    )
    return Step(
        command=module,
        seconds=LAYOUTS[name].seconds,
        gpus=gpus,
        environment={"OMP_NUM_THREADS": "4"},
    )


def _line(row: dict[str, Any]) -> str:
    log_probs = "  ".join(
        f"{when} {row[f'{when}_rms']:.1e} {row[f'{when}_document']:.1e} {row[f'{when}_max']:.1e}"
        for when in ("before", "after")
    )
    return (
        f"{log_probs} of {row['kept']:.1%}  weight {row['weight']:.1e} {row['experts']:.1e}  norm "
        f"{row['norm']:.1e}  "
        f"{row['seconds']} s  {row['weight_name']}"
    )


def main() -> int:
    """Parse the arguments, then run steps, or be one rank of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", default=",".join(LAYOUTS), help="names, in the order in which they are to run"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/megatron-smoke"))
    parser.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="run what needs at most so many"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no step begins"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="show the steps and run nothing")
    parser.add_argument("--rank-of", choices=sorted(LAYOUTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return 0 if in_rank(options.rank_of, options.output, options.device) else 1
    names = options.only.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    if options.list:
        for name in names:
            print(
                f"{name:16} {LAYOUTS[name].gpus} GPU  at most {LAYOUTS[name].seconds} s  "
                f"{LAYOUTS[name]}"
            )
        return 0
    return _run(names, options)


def _run(names: list[str], options: argparse.Namespace) -> int:
    root: Path = options.output
    for name, model in (("dense", DENSE), ("experts", EXPERTS)):
        write_checkpoint(root / name, model)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    begin, failed = time.monotonic(), False
    for name in names:
        spent, missing = (
            time.monotonic() - begin > options.budget,
            LAYOUTS[name].gpus > options.gpus,
        )
        if spent or missing:
            why = "the budget is spent" if spent else f"it needs {LAYOUTS[name].gpus} GPUs"
            print(f"{name:16} not run: {why}", flush=True)
            failed = True
            continue
        status, seconds, rows = run(name, step_of(name, root, options.device), root)
        failed |= status != 0
        with (root / "rows.jsonl").open("a") as file:
            file.writelines(
                f"{json.dumps({'step': name, 'status': status} | json.loads(row))}\n"
                for row in rows
            )
        told = _line(json.loads(rows[0])) if rows else last_words(root / f"{name}.log")
        print(
            f"{name:16} {'passed' if status == 0 else f'exit {status}'} {seconds:4.0f} s  {told}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
