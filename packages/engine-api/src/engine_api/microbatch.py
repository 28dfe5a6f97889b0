"""Distribution of documents by token budget, over micro-batches and over ranks.

The functions are pure functions of lengths, so that every rank computes the same split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine_api.errors import BatchError

Bins = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelBudget:
    """The rows of pixels of each document, and the most of them that a micro-batch takes."""

    rows: Sequence[int]
    most: int

    def holds(self, documents: Iterable[int]) -> bool:
        """Return whether a micro-batch takes the images of these documents together."""
        return sum(self.rows[i] for i in documents) <= self.most


def least_bins(lengths: Sequence[int], max_tokens: int, pixels: PixelBudget | None = None) -> Bins:
    """Return few bins with at most ``max_tokens`` tokens each, by first-fit-decreasing.

    With ``pixels`` a bin is within that budget, too.

    Raises ``BatchError`` for a document that is beyond a budget alone.
    """
    check_budget(lengths, max_tokens, pixels)
    bins: Bins = []
    loads: list[int] = []
    for index in _longest_first(lengths):
        fits = next(
            (
                b
                for b, load in enumerate(loads)
                if load + lengths[index] <= max_tokens
                and (pixels is None or pixels.holds([*bins[b], index]))
            ),
            None,
        )
        if fits is None:
            bins.append([index])
            loads.append(lengths[index])
        else:
            bins[fits].append(index)
            loads[fits] += lengths[index]
    return [sorted(b) for b in bins]


def split_micro_batches(
    lengths: Sequence[int], max_tokens: int, count: int, pixels: PixelBudget | None = None
) -> Bins:
    """Return exactly ``count`` bins within the budgets, as even in tokens as possible.

    Some bins may be empty. ``count`` is the largest need over all ranks, and therefore at least
    ``len(least_bins(lengths, max_tokens, pixels))``.
    """
    least = least_bins(lengths, max_tokens, pixels)
    assert count >= len(least), f"{len(least)} micro-batches needed, {count} agreed on"
    even = balance(lengths, count)
    fits = all(sum(lengths[i] for i in b) <= max_tokens for b in even)
    if fits and (pixels is None or all(pixels.holds(b) for b in even)):
        return even
    return least + [[] for _ in range(count - len(least))]


def balance(lengths: Sequence[int], parts: int, cost: Callable[[int], float] = float) -> Bins:
    """Return ``parts`` bins of about equal summed ``cost(length)``.

    The longest document goes first into the lightest bin (longest-processing-time-first, Graham
    1969), which gives at most 4/3 of the optimum. Ties go to the lowest bin, so the result is the
    same on every rank.
    """
    bins: Bins = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for index in _longest_first(lengths):
        lightest = min(range(parts), key=lambda b: (loads[b], b))
        bins[lightest].append(index)
        loads[lightest] += cost(lengths[index])
    return [sorted(b) for b in bins]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def check_budget(
    lengths: Sequence[int], max_tokens: int, pixels: PixelBudget | None = None
) -> None:
    """Raise ``BatchError`` for a document that is beyond a budget alone."""
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise BatchError(
                "cu_seqlens",
                f"document {index} has {length} tokens, the budget is {max_tokens}",
                index=index,
                why="a document is never cut",
                remedy="raise memory.max_tokens or shorten the document",
            )
        if pixels is not None and not pixels.holds([index]):
            raise BatchError(
                "media.pixels",
                f"document {index} has {pixels.rows[index]} rows of pixels, "
                f"the budget is {pixels.most}",
                index=index,
                why="a document is never cut",
                remedy="raise memory.max_patches, or make the document's images smaller or fewer",
            )
