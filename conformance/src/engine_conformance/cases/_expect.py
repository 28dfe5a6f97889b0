"""Comparisons with the oracle, in the controller.

The oracle's runs are kept for the other world sizes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine_api.errors import ConfigError, EngineError, RankFailure, UnsupportedCapability
from engine_conformance.cases import _losses as losses
from engine_conformance.cases._case import VALUE, must
from engine_conformance.cases._ranks import InferCall, RankOutputs, Trained
from engine_conformance.cases._target import EPS, Target
from engine_conformance.compare import (
    ConformanceFailure,
    assert_close_per_token,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import (
    LENGTHS,
    PackedDocuments,
    packed_documents,
)
from engine_conformance.oracle import (
    AdamWConfig,
    OracleModel,
    Schedule,
    TrainResult,
    load_oracle,
    train_steps,
)
from engine_conformance.oracle.train import Loss
from engine_conformance.seeds import cached_by_seed
from engine_conformance.tolerances import Quantity, Tolerance, weight_tolerance

__all__ = [
    "asking",
    "clear_documents",
    "documents",
    "looks_like",
    "merged",
    "oracle_of",
    "oracle_outputs",
    "oracle_training",
    "outputs_match",
    "raised_everywhere",
    "require_refusal_by_name",
    "same_on_all_ranks",
    "trained_on",
    "training_matches",
]

# A weight's name or a path in an error, which may hold a request's name by chance.
_NAMES = re.compile(r"\bmodel\.(?:layers|embed_tokens|norm)[\w.*]*|(?:/[\w.-]+){2,}")
CONFIG = AdamWConfig(weight_decay=0.0, eps=EPS)


@cached_by_seed
def documents(seed: int = 0, lengths: str = "uneven") -> PackedDocuments:
    """Return the batch of this seed and these lengths, always the same object."""
    return packed_documents(seed, LENGTHS[lengths])


def trained_on(
    target: Target, oracle: OracleModel, seed: int, lengths: str = "uneven"
) -> PackedDocuments:
    """Return a batch of these lengths on which rounding changes no choice of experts.

    A model without experts gets the batch of this seed and these lengths. In float32
    every choice is clear enough. In bfloat16 two router logits may each be off by their
    tolerance: the first batch from the seed on is taken whose choices are clearer than
    that, which only few and short documents are.
    """
    if oracle.config.moe is None or target.dtype == "float32":
        return documents(seed, lengths)
    return clear_documents(
        oracle, seed, (3, 2, 2, 1), gap=2 * target.tolerance("router_logits").atol
    )


@cached_by_seed
def _candidate(seed: int, lengths: tuple[int, ...]) -> PackedDocuments:
    return packed_documents(seed, lengths)


def clear_documents(
    oracle: OracleModel, seed: int, lengths: tuple[int, ...], *, gap: float
) -> PackedDocuments:
    """Return the first batch on which all choices of experts are clearer than ``gap``.

    Seeds are tried from ``1000 * seed`` on.
    """
    for candidate in range(1000 * seed, 1000 * seed + 1000):
        batch = _candidate(candidate, lengths)
        if oracle.routing_margin(batch.input_ids, batch.cu_seqlens).min() > gap:
            return batch
    raise AssertionError("no batch with clear choices of experts")


@cache
def oracle_of(folder: str) -> OracleModel:
    """Return the oracle of a folder."""
    return load_oracle(folder)


@cached_by_seed
def oracle_training(
    folder: str,
    batches: tuple[PackedDocuments, ...],
    *,
    loss: Loss | None = None,
    optimizer: AdamWConfig = CONFIG,
    schedule: Schedule | None = None,
    denominators: tuple[float, ...] | None = None,
) -> TrainResult:
    """Run the oracle's steps.

    The defaults are those of `Target.config` without clipping and decay, and its model
    type's loss.
    """
    oracle = oracle_of(folder)
    return train_steps(
        oracle,
        batches,
        loss or losses.oracle_default(oracle),
        optimizer=optimizer,
        schedule=schedule,
        denominators=denominators,
    )


def asking(target: Target, documents: PackedDocuments, **arguments: Any) -> InferCall:
    """Build a call for every output of this model type.

    It asks for entropy, unless it is a value model.
    """
    return InferCall(documents=documents, **({"entropy": target.model_type != VALUE} | arguments))


def merged(call: InferCall, outputs: Sequence[RankOutputs]) -> dict[str, Tensor]:
    """Merge the ranks' shares into the whole batch's outputs.

    Ranks of one data-parallel rank must agree bit for bit.
    """
    lengths = call.documents.lengths
    whole: dict[str, list[Tensor | None]] = {
        name: [None] * len(lengths) for name in outputs[0].fields
    }
    for rank, own in enumerate(outputs):
        mine = list(range(own.dp_rank, len(lengths), own.dp_size))
        given = sorted(own.fields)
        first = sorted(whole)
        must(given == first, "outputs", f"{given}, rank 0 returns {first}", where=f"rank {rank}")
        for name, value in own.fields.items():
            size = sum(lengths[d] for d in mine)
            must(
                value.shape == (size,),
                name,
                f"shape {tuple(value.shape)}, not ({size},)",
                where=f"rank {rank}",
            )
            for document, part in zip(mine, value.split([lengths[d] for d in mine]), strict=True):
                _finite(name, part, call.documents, document, rank)
                before = whole[name][document]
                same = before is None or torch.equal(before, part)
                must(
                    same,
                    name,
                    "ranks of one data-parallel rank differ",
                    where=f"rank {rank}, document {document}",
                )
                whole[name][document] = part
    absent = [d for parts in whole.values() for d, part in enumerate(parts) if part is None]
    must(not absent, "outputs", f"no rank returns outputs for documents {absent}")
    return {name: torch.cat([p for p in parts if p is not None]) for name, parts in whole.items()}


def _finite(name: str, part: Tensor, batch: PackedDocuments, document: int, rank: int) -> None:
    bad = (~part.isfinite()).nonzero()
    if len(bad):
        position = int(bad[0])
        what = "NaN" if part[position].isnan() else "infinite"
        token = int(batch.cu_seqlens[document]) + position
        where = f"document {document}, position {position}, rank {rank}"
        must(
            False,
            name,
            f"{what} at token {token}; {len(bad)} of {len(part)} are not finite",
            where=where,
        )


def oracle_outputs(oracle: OracleModel, call: InferCall) -> dict[str, Tensor]:
    """Return the oracle's outputs for the call, by field, float64 ``[T]``."""
    batch = call.documents
    if oracle.config.value_model:
        return {"values": oracle.values(batch.input_ids, batch.cu_seqlens)}
    want = oracle.token_outputs(
        batch.input_ids,
        batch.cu_seqlens,
        temperature=call.temperature,
        routed_experts=batch.routed_experts,
    )
    return {"log_probs": want.log_probs} | ({"entropy": want.entropy} if call.entropy else {})


_UNSHIFTED = (
    "got[t] is the log-prob of token t by the logits after it: they are not shifted; "
    "take token t by the logits at t - 1 (alignment)"
)


def _is_unshifted(oracle: OracleModel, call: InferCall, got: Tensor, tol: Tolerance) -> bool:
    """Return whether log-probs are those of an engine that does not shift its logits.

    First tokens do not count: some engines set them to 0 nevertheless.
    """
    batch = call.documents
    wrong = oracle.unshifted_log_probs(
        batch.input_ids, batch.cu_seqlens, temperature=call.temperature
    )
    inside = torch.ones(len(wrong), dtype=torch.bool)
    inside[torch.as_tensor(batch.cu_seqlens[:-1]).long()] = False
    near = (got.double() - wrong).abs() <= tol.bound(wrong)
    return bool(inside.any()) and float(near[inside].double().mean()) >= 0.9


def outputs_match(
    target: Target, oracle: OracleModel, call: InferCall, outputs: Sequence[RankOutputs]
) -> float:
    """Compare every output of every token with the oracle's.

    Tokens whose experts rounding may change are left out.
    """
    batch = call.documents
    got = merged(call, outputs)
    want = oracle_outputs(oracle, call)
    must(
        set(want) <= set(got),
        "outputs",
        f"the engine returns {sorted(got)}, {sorted(want)} were asked for",
    )
    must("values" in want or "values" not in got, "outputs", "a language model returns values")
    unasked = sorted(set(got) - set(want))
    must(
        not unasked or not target.is_asked_since("1.3"),
        "outputs",
        f"the engine returns {unasked}, which nobody asked for",
    )
    gap = 2 * target.tolerance("router_logits", layers=oracle.config.num_layers).atol
    chosen = oracle.routing_margin(batch.input_ids, batch.cu_seqlens, batch.routed_experts)
    keep = chosen > gap
    margins = []
    for name, exact in want.items():
        tol = target.tolerance(name, layers=oracle.config.num_layers)  # type: ignore[arg-type]
        # The logits' error is divided by the temperature too, for which tolerances have room
        # down to a half.
        tol = replace(tol, atol=tol.atol * max(1.0, 0.5 / call.temperature))
        try:
            margin = assert_close_per_token(
                name, got[name], exact, tol, cu_seqlens=batch.cu_seqlens, keep=keep
            )
        except ConformanceFailure as failure:
            if name != "log_probs" or not _is_unshifted(oracle, call, got[name], tol):
                raise
            raise failure.with_hint(_UNSHIFTED) from None
        margins.append(margin)
        must(
            not got[name][batch.cu_seqlens[:-1]].any(),
            name,
            "first tokens of documents do not carry 0",
        )
    return max(margins)


def looks_like(
    target: Target,
    stepped: OracleModel,
    start: OracleModel,
    call: InferCall,
    outputs: Sequence[RankOutputs],
) -> float:
    """Compare outputs within a hundredth of the steps' change, or within their tolerance.

    It is a tenth in 16 bits.
    """
    got = merged(call, outputs)
    want = oracle_outputs(stepped, call)
    before = oracle_outputs(start, call)
    fraction = 0.01 if target.dtype == "float32" else 0.1
    margins = []
    for name, exact in want.items():
        moved = float((exact - before[name]).abs().max())
        own = target.tolerance(name)  # type: ignore[arg-type]
        tol = Tolerance(atol=own.atol + fraction * moved)
        margins.append(
            assert_close_per_token(
                f"{name} after the step",
                got[name],
                exact,
                tol,
                cu_seqlens=call.documents.cu_seqlens,
            )
        )
    return max(margins)


def same_on_all_ranks(ranks: Sequence[Trained]) -> None:
    """Require the same outputs, and the same order and bits of the export, on all ranks."""
    for rank, other in enumerate(ranks):
        must(
            other.outputs == ranks[0].outputs,
            "train output",
            f"{other.outputs} differs from rank 0's",
            where=f"rank {rank}",
        )
        must(
            other.order == ranks[0].order,
            "export order",
            "differs from rank 0's",
            where=f"rank {rank}",
        )
        must(
            other.digest == ranks[0].digest, "export", "differs from rank 0's", where=f"rank {rank}"
        )
        must(
            other.version == ranks[0].version,
            "weight_version",
            "differs from rank 0's",
            where=f"rank {rank}",
        )


def training_matches(
    target: Target,
    ranks: Sequence[Trained],
    want: TrainResult,
    start: OracleModel,
    *,
    off_policy: Collection[int] = (),
) -> float:
    """Compare loss, gradient norm and rate of every step, and every weight after the last step.

    ``off_policy`` are the steps whose loss has ratios of probabilities other than one.
    """
    same_on_all_ranks(ranks)
    factors = {
        "ranks": float(target.world),
        "micro-batches": float(ranks[0].outputs[0].num_micro_batches),
    }
    margins = list[float]()
    layers = want.oracle.config.num_layers
    for index, (got, exact) in enumerate(zip(ranks[0].outputs, want.steps, strict=True)):
        of_norm = "ratio_grad_norm" if index in off_policy else "grad_norm"
        pairs: tuple[tuple[str, Quantity, float, float], ...] = (
            ("loss", "loss", got.loss, exact.loss),
            ("grad_norm", of_norm, got.grad_norm, exact.grad_norm),
        )
        for name, quantity, value, true in pairs:
            tol = target.tolerance(quantity, layers=layers)
            margins.append(
                assert_scalar_close(f"{name} of step {index}", value, true, tol, factors=factors)
            )
        must(
            abs(got.lr - exact.lr) <= 1e-12,
            "lr",
            f"{got.lr} at step {index}, the schedule says {exact.lr}",
        )
        must(got.skipped is None, "train output", f"step {index} was skipped: {got.skipped}")
    must(
        ranks[0].version == len(want.steps),
        "weight_version",
        f"{ranks[0].version} after {len(want.steps)} steps",
    )
    bounds = weight_tolerance(want, target.torch_dtype, layers=layers)
    weights = assert_weights_close(
        ranks[0].weights, want.params, bounds, start=start.trainable, factors=factors
    )
    return max(*margins, weights)


def same_step(trained: Trained, undisturbed: Trained, rank: int, *, after: str) -> None:
    """Require a rank's results and weights to equal, bit for bit, those of an undisturbed run.

    ``after`` names the disturbance, for the failure.
    """
    same = trained.outputs == undisturbed.outputs and trained.digest == undisturbed.digest
    must(
        same,
        "step",
        f"after {after}, it differs from the same step without",
        where=f"rank {rank}",
    )


def raised_everywhere(
    name: str,
    errors: Sequence[EngineError | None],
    own: type[EngineError],
    *,
    faulty: Sequence[int] | None = None,
) -> None:
    """Require ``own`` on ranks that saw the fault, and ``RankFailure`` (or ``own``) elsewhere.

    No rank may go on alone.
    """
    for rank, error in enumerate(errors):
        must(
            error is not None,
            name,
            f"nothing was raised, {own.__name__} expected",
            where=f"rank {rank}",
        )
        sees = faulty is None or rank in faulty
        right = isinstance(error, own) or (not sees and isinstance(error, RankFailure))
        must(
            right,
            name,
            f"{type(error).__name__} ({error}), {own.__name__} expected",
            where=f"rank {rank}",
        )
        must(bool(str(error)), name, "the error says nothing", where=f"rank {rank}")


def require_refusal_by_name(
    name: str, words: Sequence[str], errors: Sequence[EngineError | None]
) -> None:
    """Require a refusal on every rank that names one of these words.

    It is a `ConfigError` or an `UnsupportedCapability`.
    """
    kind = next((type(error) for error in errors if error is not None), ConfigError)
    allowed = issubclass(kind, (ConfigError, UnsupportedCapability))
    raised_everywhere(name, errors, kind if allowed else ConfigError)
    said = str(errors[0])
    # Weights that are missing are no request, whatever their names.
    told = _NAMES.sub("", said).lower()
    named = any(word.lower() in told for word in words)
    expected = f"a refusal that names the key ({' or '.join(words)})"
    must(named, name, f"expected {expected}, got: {said}")
