"""Comparisons with the oracle, in the controller; the oracle's runs are kept for the other world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine_api.errors import EngineError, RankFailure
from engine_conformance.cases._case import must
from engine_conformance.cases._ranks import Answer, InferCall, Trained
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_close_per_token, assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import LENGTHS, PackedDocuments, packed_documents
from engine_conformance.oracle import AdamWConfig, OracleModel, Schedule, TrainResult, load_oracle, sft, train_steps
from engine_conformance.oracle.train import Loss
from engine_conformance.tolerances import weight_tolerance

__all__ = [
    "documents",
    "merged",
    "oracle_of",
    "oracle_training",
    "outputs_match",
    "raised_everywhere",
    "same_on_all_ranks",
    "training_matches",
]

CONFIG = AdamWConfig(weight_decay=0.0)


@cache
def documents(seed: int = 0, lengths: str = "uneven") -> PackedDocuments:
    """The batch of this seed and these lengths, always the same object."""
    return packed_documents(seed, LENGTHS[lengths])


@cache
def oracle_of(folder: str) -> OracleModel:
    """The oracle of a folder."""
    return load_oracle(folder)


@cache
def oracle_training(
    folder: str,
    batches: tuple[PackedDocuments, ...],
    *,
    loss: Loss = sft,
    optimizer: AdamWConfig = CONFIG,
    schedule: Schedule | None = None,
    denominators: tuple[float, ...] | None = None,
) -> TrainResult:
    """The oracle's steps; the defaults are those of `Target.config` without clipping and decay."""
    return train_steps(
        oracle_of(folder), batches, loss, optimizer=optimizer, schedule=schedule, denominators=denominators
    )


def merged(call: InferCall, answers: Sequence[Answer]) -> dict[str, Tensor]:
    """The whole batch's outputs from the ranks' shares; ranks of one data-parallel rank must agree bit for bit."""
    lengths = call.documents.lengths
    whole: dict[str, list[Tensor | None]] = {name: [None] * len(lengths) for name in answers[0].fields}
    for rank, own in enumerate(answers):
        mine = list(range(own.dp_rank, len(lengths), own.dp_size))
        for name, value in own.fields.items():
            must(value.shape == (sum(lengths[d] for d in mine),), name, f"shape {tuple(value.shape)} on rank {rank}")
            for document, part in zip(mine, value.split([lengths[d] for d in mine]), strict=True):
                before = whole[name][document]
                same = before is None or torch.equal(before, part)
                must(same, name, "ranks of one data-parallel rank differ", where=f"rank {rank}, document {document}")
                whole[name][document] = part
    return {name: torch.cat([p for p in parts if p is not None]) for name, parts in whole.items()}


def outputs_match(target: Target, oracle: OracleModel, call: InferCall, answers: Sequence[Answer]) -> float:
    """Log-probs (and entropy) of every token; tokens whose experts rounding may change are left out."""
    batch, got = call.documents, merged(call, answers)
    want = oracle.token_outputs(batch.input_ids, batch.cu_seqlens, temperature=call.temperature)
    gap = 2 * target.tolerance("router_logits").atol
    keep = oracle.routing_margin(batch.input_ids, batch.cu_seqlens) > gap
    names = ("log_probs", "entropy") if call.entropy else ("log_probs",)
    margins = []
    for name in names:
        tol, exact = target.tolerance(name), getattr(want, name)  # type: ignore[arg-type]
        margins.append(assert_close_per_token(name, got[name], exact, tol, cu_seqlens=batch.cu_seqlens, keep=keep))
        must(not got[name][batch.cu_seqlens[:-1]].any(), name, "first tokens of documents do not carry 0")
    return max(margins)


def same_on_all_ranks(ranks: Sequence[Trained]) -> None:
    """Outputs, order of the export and its bits."""
    for rank, other in enumerate(ranks):
        must(
            other.outputs == ranks[0].outputs,
            "train output",
            f"{other.outputs} differs from rank 0's",
            where=f"rank {rank}",
        )
        must(other.order == ranks[0].order, "export order", "differs from rank 0's", where=f"rank {rank}")
        must(other.digest == ranks[0].digest, "export", "differs from rank 0's", where=f"rank {rank}")
        must(other.version == ranks[0].version, "weight_version", "differs from rank 0's", where=f"rank {rank}")


def training_matches(target: Target, ranks: Sequence[Trained], want: TrainResult, start: OracleModel) -> float:
    """Loss, gradient norm and rate of every step, and every weight after the last."""
    same_on_all_ranks(ranks)
    factors = {"ranks": float(target.world), "micro-batches": float(ranks[0].outputs[0].num_micro_batches)}
    margins = []
    for index, (got, exact) in enumerate(zip(ranks[0].outputs, want.steps, strict=True)):
        pairs = (("loss", got.loss, exact.loss), ("grad_norm", got.grad_norm, exact.grad_norm))
        margins += [
            assert_scalar_close(f"{name} of step {index}", value, true, target.tolerance(name), factors=factors)  # type: ignore[arg-type]
            for name, value, true in pairs
        ]
        must(abs(got.lr - exact.lr) <= 1e-12, "lr", f"{got.lr} at step {index}, the schedule says {exact.lr}")
        must(got.skipped is None, "train output", f"step {index} was skipped: {got.skipped}")
    must(ranks[0].version == len(want.steps), "weight_version", f"{ranks[0].version} after {len(want.steps)} steps")
    bounds = weight_tolerance(want, target.torch_dtype)
    weights = assert_weights_close(ranks[0].weights, want.params, bounds, start=start.trainable, factors=factors)
    return max(*margins, weights)


def raised_everywhere(
    name: str, errors: Sequence[EngineError | None], own: type[EngineError], *, faulty: Sequence[int] | None = None
) -> None:
    """Ranks that saw the fault raise ``own``, the others ``RankFailure`` (or ``own``); nobody goes on alone."""
    for rank, error in enumerate(errors):
        must(error is not None, name, f"nothing was raised, {own.__name__} expected", where=f"rank {rank}")
        sees = faulty is None or rank in faulty
        right = isinstance(error, own) or (not sees and isinstance(error, RankFailure))
        must(right, name, f"{type(error).__name__} ({error}), {own.__name__} expected", where=f"rank {rank}")
        must(bool(str(error)), name, "the error says nothing", where=f"rank {rank}")
