"""Megatron's pipeline schedules (1F1B, with model chunks interleaved, arXiv:2104.04473) around this engine's forward and the caller's loss."""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine_api.batch import Batch
from engine_api.results import LossOutput, TokenOutputs
from engine_megatron.model import Forward, Packed
from engine_megatron.parallel import pipeline_group

OnLast = Callable[[Tensor, Packed, Batch], tuple[Tensor, Any]]


def run(
    forward: Forward,
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    on_last: OnLast,
    *,
    backward: bool,
) -> list[Any]:
    """The schedule over all micro-batches, all stages together; ``chunks`` are those of ``forward`` or their wrappers.

    ``on_last`` makes of the last chunk's hidden states a scalar to differentiate and what is collected of it: the
    result, one a micro-batch, on the last stage; nothing on the others.
    """
    virtual, stages = forward.layout.virtual, forward.layout.stages
    # Interleaved, micro-batches go round in groups of as many as there are stages; empty ones run where stages would wait.
    given = [*parts, *[parts[0].select([])] * (-len(parts) % stages if virtual > 1 else 0)]
    feeds = tee(
        ((batch, forward.pack(batch)) for batch in given), virtual
    )  # packed once, whichever chunk comes first

    def step(feed: Any, chunk: Any) -> tuple[Tensor, Any]:
        batch, packed = next(feed)
        hidden = forward.hidden(packed, chunk)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            scalar, collected = on_last(hidden, packed, batch)
            # With a count of tokens, and calculate_per_token_loss, Megatron divides by nothing.
            return scalar, torch.ones((), dtype=torch.int, device=hidden.device), collected

        return hidden, finish

    schedule = get_forward_backward_func(pp_size=stages, vp_size=virtual if virtual > 1 else None)
    collected: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=list(feeds),
        model=list(chunks),
        num_microbatches=len(given),
        seq_length=1,
        micro_batch_size=1,
        forward_only=not backward,  # lengths vary and are sent along
    )
    return collected[: len(parts)]


def infer(
    forward: Forward, chunks: Sequence[Any], batch: Batch, needs: Sequence[str], temperature: float
) -> TokenOutputs:
    """One micro-batch through all stages; its outputs on every stage."""
    names = ("values",) if forward.shape.kind == "value_model" else ("log_probs", "entropy")
    names = tuple(name for name in names if name in needs)

    def on_last(hidden: Tensor, packed: Packed, _: Batch) -> tuple[Tensor, Tensor]:
        outputs = forward.outputs(hidden, packed, needs, temperature)
        return hidden.new_zeros(()), torch.stack([getattr(outputs, name) for name in names])

    found = run(forward, chunks, [batch], on_last, backward=False)
    like = torch.empty(len(names), batch.num_tokens, device=forward.device)
    rows = found[0].contiguous() if forward.layout.is_last else like
    last = replace(forward.layout.here, stage=forward.layout.stages - 1)
    dist.broadcast(rows, src=forward.layout.rank_of(last), group=pipeline_group())
    return TokenOutputs(**dict(zip(names, rows, strict=True)))


def nothing_of(outputs: TokenOutputs) -> Tensor:
    """Return a zero that depends on every output with a gradient."""
    given = [t for t in (outputs.log_probs, outputs.entropy, outputs.values) if t is not None]
    return sum((t.sum() for t in given[1:]), start=given[0].sum()) * 0.0


def train(
    forward: Forward,
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    loss_of: Callable[[TokenOutputs, Batch], LossOutput],
    needs: Sequence[str],
    denominator: float,
    temperature: float,
) -> tuple[list[LossOutput], Exception | None]:
    """Forward and backward over the micro-batches; zeros on stages that do not know the loss.

    What the loss raises on the last stage is given back, not raised: the other stages are still in the schedule.
    """
    raised: list[Exception] = []

    def on_last(hidden: Tensor, packed: Packed, batch: Batch) -> tuple[Tensor, LossOutput | None]:
        outputs = forward.outputs(hidden, packed, needs, temperature)
        try:
            result = loss_of(outputs, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, no stage may be left waiting; raised by the caller
            raised.append(error)
            # Through all outputs: tensor-parallel neighbours whose loss did not raise wait for this rank in their backward.
            return nothing_of(outputs), None
        return result.loss / denominator, LossOutput(
            loss=result.loss.detach(), metrics=result.metrics
        )

    results = run(forward, chunks, parts, on_last, backward=True)
    if not forward.layout.is_last or raised:
        results = [LossOutput(loss=torch.zeros(()))] * len(parts)
    return results, raised[0] if raised else None
