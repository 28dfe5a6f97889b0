"""``train_batch`` against a plain PyTorch loop on the same model, packed and padded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.conftest import SHAPE, SHAPE_TEXT
from engine_api import Batch, sft_loss

EQUAL = [256] * 4
# Word problems have such lengths: many short documents, a few long ones.
MIXED = [32] * 12 + [64] * 6 + [128] * 3 + [384]


def documents(lengths: list[int]) -> Batch:
    """Return random documents of these lengths, where all tokens but first ones carry loss."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for length in lengths:
        weight = torch.ones(length)
        weight[0] = 0.0
        ids = torch.randint(
            0,
            int(SHAPE["vocab_size"]),  # type: ignore[call-overload]
            (length,),
            generator=generator,
        )
        parts.append({"input_ids": ids, "loss_weight": weight})
    return Batch.pack(parts)


def plain_step(folder: Path, batch: Batch) -> Callable[[], float]:
    """Return one step of a hand-written loop: padded, full logits, clipped, fused AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    rows = batch.input_ids.split(batch.lengths)
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r)) for r in rows], batch_first=True)
    padded = bool((mask == 0).any())

    def step() -> float:
        optimizer.zero_grad()
        logits = model(
            input_ids=ids, attention_mask=mask.long() if padded else None, use_cache=False
        ).logits
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = mask[:, 1:].flatten()
        loss = (nll * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int = 15
) -> tuple[float, float]:
    """Return the median seconds of both, run alternately so that a busy machine slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for kept, run in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            run()
            # The first two turns warm up.
            if turn >= 2:
                kept.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def test_overhead(benchmark: Any, folder: Path, make_engine: Callable[..., Any]) -> None:
    """The engine aims to cost at most 5 % more than a hand-written loop.

    Both have the same documents, and full logits in one chunk.
    """
    batch, engine = documents(EQUAL), make_engine(logit_chunk=4096)
    plain = plain_step(folder, batch)
    ours, theirs = interleaved(lambda: engine.train_batch(batch, sft_loss), plain)
    benchmark.extra_info.update(
        shape=SHAPE_TEXT, documents="4 x 256", ratio=f"{ours / theirs:.3f} (engine / plain loop)"
    )
    benchmark.pedantic(lambda: engine.train_batch(batch, sft_loss), rounds=3)


def test_packed_against_padded(
    benchmark: Any, folder: Path, make_engine: Callable[..., Any]
) -> None:
    """Packing saves the padding of mixed lengths: the engine packs, the loop pads."""
    batch, engine = documents(MIXED), make_engine()
    ours, theirs = interleaved(
        lambda: engine.train_batch(batch, sft_loss), plain_step(folder, batch), rounds=7
    )
    benchmark.extra_info.update(
        shape=SHAPE_TEXT,
        documents="22 of 32 to 384, 1536 tokens",
        ratio=f"{ours / theirs:.3f} (packed / padded)",
    )
    benchmark.pedantic(lambda: engine.train_batch(batch, sft_loss), rounds=3)
