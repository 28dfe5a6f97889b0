"""Megatron's pipeline schedule (1F1B, arXiv:2104.04473) around this engine's forward and the caller's loss."""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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


def run(forward: Forward, model: Any, parts: Sequence[Batch], on_last: OnLast, *, backward: bool) -> list[Any]:
    """The schedule over all micro-batches, all stages together.

    ``on_last`` makes of the last stage's hidden states a scalar to differentiate and what is collected of it: the
    result, one a micro-batch, on the last stage; nothing on the others.
    """

    def step(batches: Any, _: Any) -> tuple[Tensor, Any]:
        batch: Batch = next(batches)
        packed = forward.pack(batch)
        hidden = forward.hidden(packed)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            scalar, collected = on_last(hidden, packed, batch)
            # With a count of tokens, and calculate_per_token_loss, Megatron divides by nothing.
            return scalar, torch.ones((), dtype=torch.int, device=hidden.device), collected

        return hidden, finish

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(parts), model=[model], num_microbatches=len(parts),
        seq_length=1, micro_batch_size=1, forward_only=not backward,  # lengths vary and are sent along
    )  # fmt: skip
    return collected


def infer(forward: Forward, model: Any, batch: Batch, needs: Sequence[str], temperature: float) -> TokenOutputs:
    """One micro-batch through all stages; its outputs on every stage."""
    names = ("values",) if forward.shape.kind == "value_model" else ("log_probs", "entropy")
    names = tuple(name for name in names if name in needs)

    def on_last(hidden: Tensor, packed: Packed, _: Batch) -> tuple[Tensor, Tensor]:
        outputs = forward.outputs(hidden, packed, needs, temperature)
        return hidden.new_zeros(()), torch.stack([getattr(outputs, name) for name in names])

    found = run(forward, model, [batch], on_last, backward=False)
    like = torch.empty(len(names), batch.num_tokens, device=forward.device)
    rows = found[0].contiguous() if forward.layout.is_last else like
    last = replace(forward.layout.here, stage=forward.layout.stages - 1)
    dist.broadcast(rows, src=forward.layout.rank_of(last), group=pipeline_group())
    return TokenOutputs(**dict(zip(names, rows, strict=True)))


def train(
    forward: Forward, model: Any, parts: Sequence[Batch], loss_of: Callable[[TokenOutputs, Batch], LossOutput],
    needs: Sequence[str], denominator: float, temperature: float,
) -> tuple[list[LossOutput], Exception | None]:  # fmt: skip
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
            return hidden.sum() * 0.0, None
        return result.loss / denominator, LossOutput(loss=result.loss.detach(), metrics=result.metrics)

    results = run(forward, model, parts, on_last, backward=True)
    if not forward.layout.is_last or raised:
        results = [LossOutput(loss=torch.zeros(()))] * len(parts)
    return results, raised[0] if raised else None
