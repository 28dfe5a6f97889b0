"""Megatron's pipeline schedules around this engine's forward and the caller's loss.

The schedule is 1F1B, interleaved if there are several model chunks (arXiv:2104.04473).
"""

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
from engine_api.losses import zero_loss
from engine_api.results import LossOutput, TokenOutputs
from engine_megatron.model import Forward, PackedInputs
from engine_megatron.parallel import pipeline_group

OnLast = Callable[[Tensor, PackedInputs, Batch], tuple[Tensor, Any]]


def run(
    forward: Forward,
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    on_last: OnLast,
    *,
    backward: bool,
) -> list[Any]:
    """Run the schedule over all micro-batches.

    All stages call it together. ``chunks`` are those of ``forward`` or their wrappers. ``on_last``
    takes the last chunk's hidden states and returns a scalar to differentiate and a value to
    collect. The last stage returns the collected values, one per micro-batch; all other stages
    return an empty list.
    """
    virtual = forward.layout.virtual
    stages = forward.layout.stages
    # The interleaved schedule takes micro-batches in groups of as many as there are stages. Empty
    # micro-batches complete the last group.
    missing = -len(parts) % stages if virtual > 1 else 0
    given = [*parts, *[parts[0].select([])] * missing]
    # Each micro-batch is packed once, by the chunk that comes first.
    feeds = tee(((batch, forward.pack_inputs(batch)) for batch in given), virtual)

    def step(feed: Any, chunk: Any) -> tuple[Tensor, Any]:
        batch, packed = next(feed)
        hidden = forward.hidden(packed, chunk)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            scalar, collected = on_last(hidden, packed, batch)
            # With a token count of 1 and calculate_per_token_loss Megatron does not divide the
            # loss.
            return scalar, torch.ones((), dtype=torch.int, device=hidden.device), collected

        return hidden, finish

    schedule = get_forward_backward_func(pp_size=stages, vp_size=virtual if virtual > 1 else None)
    collected: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=list(feeds),
        model=list(chunks),
        num_microbatches=len(given),
        # Lengths vary, and are sent with the hidden states.
        seq_length=1,
        micro_batch_size=1,
        forward_only=not backward,
    )
    return collected[: len(parts)]


def infer(
    forward: Forward, chunks: Sequence[Any], batch: Batch, needs: Sequence[str], temperature: float
) -> TokenOutputs:
    """Run one micro-batch through all stages, and return its outputs on every stage."""
    available = ("values",) if forward.shape.kind == "value_model" else ("log_probs", "entropy")
    names = tuple(name for name in available if name in needs)

    def on_last(hidden: Tensor, packed: PackedInputs, _: Batch) -> tuple[Tensor, Tensor]:
        outputs = forward.outputs(hidden, packed, needs, temperature)
        return hidden.new_zeros(()), torch.stack([getattr(outputs, name) for name in names])

    found = run(forward, chunks, [batch], on_last, backward=False)
    like = torch.empty(len(names), batch.num_tokens, device=forward.device)
    rows = found[0].contiguous() if forward.layout.is_last else like
    last = replace(forward.layout.here, stage=forward.layout.stages - 1)
    dist.broadcast(rows, src=forward.layout.rank_of(last), group=pipeline_group())
    return TokenOutputs(**dict(zip(names, rows, strict=True)))


def train(
    forward: Forward,
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    loss_of: Callable[[TokenOutputs, Batch], LossOutput],
    needs: Sequence[str],
    denominator: float,
    temperature: float,
) -> tuple[list[LossOutput], Exception | None]:
    """Run forward and backward over the micro-batches, and return their losses.

    Losses are zero on stages that do not know them. An exception of the loss on the last stage is
    returned, not raised, because the other stages are still in the schedule.
    """
    raised: list[Exception] = []

    def on_last(
        hidden: Tensor, packed: PackedInputs, batch: Batch
    ) -> tuple[Tensor, LossOutput | None]:
        outputs = forward.outputs(hidden, packed, needs, temperature)
        try:
            result = loss_of(outputs, batch)
        except Exception as error:  # noqa: BLE001 - no stage may be left waiting; the caller raises
            raised.append(error)
            # Tensor-parallel ranks whose loss did not raise wait for this rank in their backward.
            return zero_loss(outputs).loss, None
        collected = LossOutput(loss=result.loss.detach(), metrics=result.metrics)
        return result.loss / denominator, collected

    results = run(forward, chunks, parts, on_last, backward=True)
    if not forward.layout.is_last or raised:
        results = [LossOutput(loss=torch.zeros(()))] * len(parts)
    return results, raised[0] if raised else None
