"""Agreement of two GPUs with one GPU: per-token log-probs at a Qwen3 shape in bf16.

The log-probs are compared before and after three steps.
``python -m benchmarks.agree --reference ref.pt`` on one process writes the reference; then
``torchrun --nproc-per-node 2 -m benchmarks.agree --reference ref.pt [--ulysses 2]`` compares with
it, per token. The documents are split over data-parallel ranks; results are put together in
document order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.mfu import SHAPES, full_name
from benchmarks.shapes import model_folder
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    sft_loss,
)
from engine_api.comm import SingleComm, TorchComm

LENGTHS = [700, 1500, 31, 2048, 1, 911, 333, 64]


def documents(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Return the documents of the comparison, with uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        weight = torch.ones(length)
        weight[0] = 0.0
        rows.append(
            {
                "input_ids": torch.randint(0, vocabulary, (length,), generator=generator),
                "loss_weight": weight,
            }
        )
    return rows


def build(options: argparse.Namespace) -> Any:
    """Build the engine and initialize it."""
    precision = Precision(compute=options.compute)
    config = EngineConfig(
        model=ModelSource(
            path=str(model_folder(full_name(options.shape))),
            init="random",
            config_overrides={"initializer_range": 0.05},
        ),
        optimizer=OptimizerConfig(lr=1e-4),
        parallelism=Parallelism(ulysses=options.ulysses),
        precision=precision,
        memory=Memory(max_tokens=4096, logit_chunk=1024),
    )
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    return engine


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the log-probs of every document before and after three steps, and the figures."""
    engine = build(options)
    place = engine.topology
    comm = TorchComm() if place.world_size > 1 else SingleComm()
    rows = documents(SHAPES[options.shape]["vocab_size"])
    mine = [d for d in range(len(rows)) if d % place.dp_size == place.dp_rank]
    batch = Batch.pack([rows[d] for d in mine])
    before = _collect(engine, comm, batch, mine)
    steps = [engine.train_batch(batch, sft_loss) for _ in range(3)]
    after = _collect(engine, comm, batch, mine)
    engine.close()
    return {
        "rank": place.rank,
        "before": before,
        "after": after,
        "loss": [s.loss for s in steps],
        "grad_norm": [s.grad_norm for s in steps],
    }


def _collect(engine: Any, comm: Any, batch: Batch, mine: list[int]) -> torch.Tensor:
    values = engine.infer_batch(batch).log_probs.cpu().split(batch.lengths)
    parts: dict[int, torch.Tensor] = {}
    for row in comm.all_gather(dict(zip(mine, values, strict=True))):
        parts |= row
    return torch.cat([parts[d] for d in sorted(parts)])


def compare(
    ours: dict[str, Any], reference: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the largest and the root-mean-square difference per token."""
    row: dict[str, Any] = {
        "shape": options.shape,
        "compute": options.compute,
        "ulysses": options.ulysses,
    }
    for when in ("before", "after"):
        difference = (ours[when] - reference[when]).double()
        row[f"{when}_max"] = round(float(difference.abs().max()), 6)
        row[f"{when}_rms"] = round(float(difference.pow(2).mean().sqrt()), 7)
        row[f"{when}_scale"] = round(float(reference[when].abs().max()), 2)
    for name in ("loss", "grad_norm"):
        pairs = zip(ours[name], reference[name], strict=True)
        row[f"{name}_relative"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return row


def main() -> None:
    """Write the reference where it is absent, compare with it where it exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compute", default="bfloat16")
    parser.add_argument("--ulysses", type=int, default=1)
    options = parser.parse_args()
    known = torch.load(options.reference, weights_only=True) if options.reference.exists() else None
    ours = run(options)
    if known is None:
        torch.save(ours, options.reference)
        print(json.dumps({"reference": str(options.reference), "loss": ours["loss"]}), flush=True)
    elif ours["rank"] == 0:
        print(json.dumps(compare(ours, known, options)), flush=True)


if __name__ == "__main__":
    main()
