"""The comparison of a reading with the oracle, and the choice of the likeliest cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine_conformance.diagnosis.readings import Document, Finding, Place, Reading, Subject
from engine_conformance.diagnosis.suspects import predict, rounded, suspects

__all__ = ["diagnose"]

# Largest difference in nats of a right computation in float32. Right engines are a hundred times
# nearer on tiny models, and near it on large ones.
_FLOAT32 = 1e-4
# A 16-bit computation rounds activations as often as weights, in each layer.
_ROUNDINGS = 8.0
# Share of the difference (root mean square) that may be left by a cause that is named.
_EXPLAINED = 0.1
# Number of causes that are shown beside the likeliest one.
_SHOWN = 3
# Largest difference in nats that is counted: log-probs of tokens that were cut off are -inf.
_LARGEST = 1e3
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def diagnose(subject: Subject, documents: Sequence[Document], reading: Reading) -> Finding:
    """Compare a reading with the oracle, and name the likeliest cause of a difference.

    Args:
        subject: the model.
        documents: the documents of the reading.
        reading: the log-probs that were reported.

    Raises:
        ValueError: if the reading has not one log-prob for each token of the completions.
    """
    lengths = [len(one.tokens) - one.prompt for one in documents]
    if [len(values) for values in reading.log_probs] != lengths:
        raise ValueError(
            f"expected log-probs of {lengths} tokens, got {[len(x) for x in reading.log_probs]}"
        )
    right = predict(subject.oracle, documents, subject)
    got = [values.double() for values in reading.log_probs]
    known = torch.cat([~values.isnan() for values in got])
    apart = _differences(got, right, known)
    bound = _bound(subject, documents, reading, right)
    finding = _describe(documents, reading, got, right, bound)
    if finding.is_right:
        return finding
    size = _rms(apart)
    ranked: list[tuple[float, int, str, str]] = []
    for number, suspect in enumerate(suspects(subject, documents, reading)):
        left = _rms(_differences(got, suspect.predict(), known)) / size
        ranked.append((left, number, suspect.cause, suspect.detail))
    ranked.sort()
    nearest = [(f"{cause}: {detail}", left) for left, _, cause, detail in ranked[:_SHOWN]]
    left, _, cause, detail = ranked[0]
    if left > max(_EXPLAINED, bound / size):
        cause, detail, left = _rounding(subject, documents, right, apart, known)
    return replace(finding, cause=cause, detail=detail, left=left, nearest=nearest)


def _describe(
    documents: Sequence[Document],
    reading: Reading,
    got: list[Tensor],
    right: list[Tensor],
    bound: float,
) -> Finding:
    wrong: dict[str, int] = {}
    places: list[Place] = []
    worst = 0.0
    for document, values, want in zip(documents, got, right, strict=True):
        known = ~values.isnan()
        apart = torch.zeros_like(values)
        apart[known] = _differences([values], [want], known).abs()
        beyond = apart > bound
        worst = max([worst, *apart.tolist()])
        if beyond.any():
            at = int(beyond.nonzero()[0])
            wrong[document.name] = int(beyond.sum())
            places.append(
                Place(
                    document=document.name,
                    position=document.prompt + at,
                    got=float(values[at]),
                    want=float(want[at]),
                )
            )
    return Finding(
        reading=reading.name,
        bound=bound,
        worst=worst,
        tokens=sum(int((~values.isnan()).sum()) for values in got),
        wrong=wrong,
        places=places,
    )


def _bound(
    subject: Subject, documents: Sequence[Document], reading: Reading, right: list[Tensor]
) -> float:
    """Return the largest difference that rounding in the reading's dtype explains."""
    if reading.dtype not in _DTYPES:
        return _FLOAT32
    other = predict(rounded(subject, _DTYPES[reading.dtype]), documents, subject)
    worst = float((_flat(other) - _flat(right)).abs().max())
    return max(_FLOAT32, _ROUNDINGS * worst)


def _rounding(
    subject: Subject,
    documents: Sequence[Document],
    right: list[Tensor],
    apart: Tensor,
    known: Tensor,
) -> tuple[str, str, float]:
    """Return the cause ``dtype`` where a difference has the size of rounding, else no cause."""
    for name, dtype in _DTYPES.items():
        other = predict(rounded(subject, dtype), documents, subject)
        size = _rms((_flat(other) - _flat(right))[known])
        if size / _ROUNDINGS <= _rms(apart) <= size * _ROUNDINGS:
            return "dtype", f"differences have the size of rounding to {name}", 0.0
    return "", "", 1.0


def _differences(got: list[Tensor], want: list[Tensor], known: Tensor) -> Tensor:
    """Return the differences of the known tokens, bounded where a log-prob is infinite or NaN."""
    left, right = _flat(got)[known], _flat(want)[known]
    # Two infinities of one sign are equal, and their difference would be NaN.
    apart = (left - right).masked_fill(left == right, 0.0)
    return apart.nan_to_num(_LARGEST).clamp(-_LARGEST, _LARGEST)


def _flat(values: list[Tensor]) -> Tensor:
    return torch.cat([one.double() for one in values])


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
