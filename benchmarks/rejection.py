"""Shares of completions that each bound of ``algorithm.correction.reject`` would reject.

``python -m benchmarks.rejection --model Qwen/Qwen3-8B --quantization fp8 --new 4096`` generates
with vLLM, scores the same tokens with engine-fsdp on the same weights, and prints one JSON line for
each length: the first 512, 1,024, … tokens of the completions that are so long, with the mean KL of
a token and the shares that lie outside each band. ``--prompts FILE`` takes JSONL rows with a
``prompt``, in the tokenizer's chat template; without it prompts are random tokens, which say little
of a trained model's answers. ``--shape`` takes random weights in place of a model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout_throughput import OPTIONS, prompts
from benchmarks.shapes import SHAPES, whole_folder
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    Precision,
    RolloutRegistry,
    SamplingParams,
)
from engine_trainer.algorithms.correction import Ratios, is_kept, ratios

# Half-widths of bands around 1, from verl's 0.999 to 1.001 outwards.
GEOMETRIC = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
LEVELS: dict[str, tuple[tuple[float, float], ...]] = {
    "geometric": ((0.999, 1.002), *((1 - width, 1 + width) for width in GEOMETRIC)),
    "sequence": ((0.5, 2.0), (0.1, 10.0)),
    "token": ((0.5, 2.0), (0.2, 5.0)),
}


def asked(options: argparse.Namespace, folder: Path) -> list[list[int]]:
    """Return the prompts as tokens, ``--sequences`` of them."""
    if options.prompts is None:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        return prompts(options.sequences, options.prompt, vocabulary, seed=0)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    turns = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(options.sequences)]
    texts = [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        for turn in turns
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def generated(options: argparse.Namespace, engine: Any, folder: Path) -> Batch:
    """Return completions with the rollout's log-probs.

    Each completion is a document, whose ``mask`` is set on the generated tokens.
    """
    model = ModelSource(path=str(folder))
    arguments = {"gpu_memory_utilization": options.memory} if options.server in OPTIONS else {}
    arguments |= OPTIONS.get(options.server, {}) | json.loads(options.rollout)
    # The local rollout needs no server, serves no quantization and receives none.
    wire = (
        {}
        if options.server == "local"
        else {"dtype": options.dtype, "quantization": options.quantization}
    )
    arguments |= wire or {"dtype": options.dtype}
    rollout = RolloutRegistry.create(
        name=options.server,
        device=options.device,
        model=model,
        pad_token_id=0,
        batch_size=options.sequences,
        **arguments,
    )
    exporter = RolloutRegistry.create_exporter(
        name=options.server, device=options.device, model=model, **wire
    )
    try:
        rollout.update_weights(exporter.export(engine), 0)
        rows = asked(options, folder)
        found = rollout.generate(rows, SamplingParams(max_new_tokens=options.new, seed=0))
    finally:
        exporter.close()
        rollout.close()
    return Batch.pack(
        [
            {
                "input_ids": [*row, *one.tokens],
                "mask": [0.0] * len(row) + [1.0] * len(one.tokens),
                "rollout_log_probs": [0.0] * len(row) + list(one.log_probs),
            }
            for row, one in zip(rows, found, strict=True)
        ]
    )


def rows_of(batch: Batch, engine_log_probs: torch.Tensor, new: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each length, about the first tokens of completions at least so long."""
    counts = [int(part.sum()) for part in batch["mask"].split(batch.lengths)]
    lengths = [1 << power for power in range(9, 20) if 1 << power < new]
    for length in [*lengths, new]:
        chosen = [d for d, count in enumerate(counts) if count >= length]
        if not chosen:
            continue
        part, log_probs = batch.select(chosen), engine_log_probs[batch.token_index(chosen)]
        place = torch.cat([own.cumsum(0) for own in part["mask"].split(part.lengths)])
        mask = part["mask"] * (place <= length)
        given = ratios(log_probs, part["rollout_log_probs"], mask, part.cu_seqlens)
        yield {"tokens": length, "completions": len(chosen), **figures(given)}


def figures(given: Ratios) -> dict[str, Any]:
    """Return the mismatch, quantiles of the geometric ratio, and the share each band rejects."""
    log, tokens = given.log[given.counted], float(given.counts.sum())
    quantiles = torch.quantile(
        given.geometric, torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    )
    row: dict[str, Any] = {
        "kl_k3": float((log.exp() - 1 - log).sum()) / tokens,
        "rms": float(log.square().mean().sqrt()),
        "geometric": [round(value, 6) for value in quantiles.tolist()],
    }
    for level, bands in LEVELS.items():
        ratio, counted = given.units(level)
        row[f"rejected_{level}"] = {
            f"{low:.6g}…{high:.6g}": round(
                float((~is_kept(ratio, low, high)[counted]).double().mean()), 4
            )
            for low, high in bands
        }
    return row


def main() -> None:
    """Generate, score, and print one JSON line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a Hugging Face folder or hub id")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights of a shape of benchmarks/shapes.py"
    )
    parser.add_argument(
        "--prompts", type=Path, default=None, help="JSONL with a prompt in each row"
    )
    parser.add_argument("--server", default="vllm", help="name of the rollout")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="fp8")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the rollout, and what the engine computes in"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--new", type=int, default=4096, help="most tokens of a completion")
    parser.add_argument("--memory", type=float, default=0.4, help="the server's share of the GPU")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="of a micro-batch of the engine"
    )
    parser.add_argument("--rollout", default="{}", help="more rollout.options, as JSON")
    options = parser.parse_args()
    if (options.model is None) == (options.shape is None):
        parser.error("give --model or --shape, one of the two")
    if options.shape is not None:
        folder = whole_folder(options.shape)
    else:
        from engine_api.hf_folder import fetch

        folder = Path(fetch(ModelSource(path=options.model)))
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=None,
        precision=Precision(compute=options.dtype),
        memory=Memory(max_tokens=options.max_tokens),
    )
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    try:
        batch = generated(options, engine, folder)
        log_probs = engine.infer_batch(batch).log_probs
        assert log_probs is not None, "a language model gives log-probs"
    finally:
        engine.close()
    said = {
        "model": options.model or options.shape,
        "server": options.server,
        "quantization": options.quantization,
        "dtype": options.dtype,
    }
    for row in rows_of(batch, log_probs.cpu(), options.new):
        print(json.dumps(said | row), flush=True)


if __name__ == "__main__":
    main()
