"""Patterns of wrong answers that point to a known defect: ratios, shifts by one, and places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Factors", "ratio_hint", "token_hints"]

Factors = Mapping[str, float]
"""Sizes of the run by name, as ``{"dp size": 2, "micro-batches": 3}``."""

# A ratio's meaning -> what makes a sum be off by it.
_CAUSES = {
    "ranks": "it is summed over the ranks twice, or each rank holds the whole sum already",
    "1 / ranks": "it is averaged over the ranks, and the denominator is that of all ranks already",
    "root of ranks": "the norm counts what all ranks hold once a rank",
    "1 / root of ranks": "the norm is of one rank's part",
    "micro-batches": "each micro-batch counts as a whole batch",
    "1 / micro-batches": "it is averaged over the micro-batches on top of the denominator",
}
# Share of the elements that must follow a pattern for it to be reported.
_MOST = 0.9
# Relative distance within which two ratios count as the same.
_NEAR = 0.01


def ratio_hint(got: Tensor, want: Tensor, bound: Tensor, factors: Factors) -> Iterator[str]:
    """Yield a constant ratio of ``got`` to ``want``, with the size of the run that it equals."""
    # Elsewhere the ratio is noise.
    telling = want.abs() > 10 * bound
    if not telling.any():
        return
    ratios = got[telling] / want[telling]
    ratio = ratios.median().item()
    same = (ratios - ratio).abs() <= _NEAR * max(abs(ratio), _NEAR)
    if same.double().mean() < _MOST or abs(ratio - 1) < _NEAR:
        return
    known = [meaning for meaning, value in _known(factors) if abs(ratio / value - 1) < _NEAR]
    causes = [_CAUSES[meaning] for meaning in known if meaning in _CAUSES]
    if abs(ratio) < _NEAR:
        known = ["nothing was added or updated"]
    elif not known and ratio > 2 and abs(ratio / round(ratio) - 1) < _NEAR:
        causes = [f"a whole number: something is summed {round(ratio)} times"]
    text = f"got / want is {ratio:.4g}" + (f" = {' = '.join(known)}" if known else "")
    yield f"{text}: {'; or '.join(causes)}" if causes else text


def _known(factors: Factors) -> Iterator[tuple[str, float]]:
    for name, value in factors.items():
        if value not in (0, 1):
            yield name, value
            yield f"1 / {name}", 1 / value
    if (ranks := factors.get("ranks", 1)) > 1:
        yield "root of ranks", math.sqrt(ranks)
        yield "1 / root of ranks", 1 / math.sqrt(ranks)
    yield from (("2", 2.0), ("1 / 2", 0.5), ("-1 (a sign)", -1.0))


def token_hints(
    got: Tensor, want: Tensor, bound: Tensor, wrong: Tensor, bounds: Sequence[int]
) -> Iterator[str]:
    """Yield hints on shifts by one and on wrong tokens that are all in one kind of place."""
    # The last token of a document and the first of the next one are not shifted into each other.
    inside = torch.ones(max(0, len(want) - 1), dtype=torch.bool)
    inside[torch.tensor(bounds[1:-1], dtype=torch.long) - 1] = False
    if _mostly_within((got[:-1] - want[1:])[inside], bound[1:][inside]):
        yield "got[t] equals want[t + 1]: values are one token early (alignment)"
    if _mostly_within((got[1:] - want[:-1])[inside], bound[:-1][inside]):
        yield "got[t] equals want[t - 1]: values are one token late (alignment)"
    if len(bounds) < 3:
        return
    first = torch.zeros_like(wrong)
    first[torch.tensor(bounds[:-1])] = True
    if not (wrong & ~first).any():
        yield "only first tokens of documents differ: they predict nothing and carry 0"
    elif not wrong[: bounds[1]].any() and _most_wrong(wrong & ~first, bounds[1:]):
        yield "the first document is right and later ones are not: documents see one another"


def _mostly_within(difference: Tensor, bound: Tensor) -> bool:
    return len(difference) > 2 and (difference.abs() <= bound).double().mean().item() >= _MOST


def _most_wrong(wrong: Tensor, bounds: Sequence[int]) -> bool:
    """Return whether nearly every document of two tokens or more has a wrong token."""
    hit = [bool(wrong[start:stop].any()) for start, stop in pairwise(bounds) if stop - start > 1]
    return bool(hit) and sum(hit) / len(hit) >= _MOST
