"""Distribution of documents by token budget, over micro-batches and over ranks.

The functions are pure functions of lengths, so that every rank computes the same split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_api.errors import BatchError

Bins = list[list[int]]


def least_bins(lengths: Sequence[int], max_tokens: int) -> Bins:
    """Return few bins with at most ``max_tokens`` tokens each, by first-fit-decreasing.

    Raises ``BatchError`` for a document longer than the budget.
    """
    check_budget(lengths, max_tokens)
    bins: Bins = []
    loads: list[int] = []
    for index in _longest_first(lengths):
        fits = next(
            (b for b, load in enumerate(loads) if load + lengths[index] <= max_tokens), None
        )
        if fits is None:
            bins.append([index])
            loads.append(lengths[index])
        else:
            bins[fits].append(index)
            loads[fits] += lengths[index]
    return [sorted(b) for b in bins]


def split_micro_batches(lengths: Sequence[int], max_tokens: int, count: int) -> Bins:
    """Return exactly ``count`` bins within the budget, as even as possible.

    Some bins may be empty. ``count`` is the largest need over all ranks, and therefore at least
    ``len(least_bins(lengths, max_tokens))``.
    """
    least = least_bins(lengths, max_tokens)
    assert count >= len(least), f"{len(least)} micro-batches needed, {count} agreed on"
    even = balance(lengths, count)
    if all(sum(lengths[i] for i in b) <= max_tokens for b in even):
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


def check_budget(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise ``BatchError`` for a document longer than the budget."""
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise BatchError(
                "cu_seqlens",
                f"document {index} has {length} tokens, the budget is {max_tokens}",
                index=index,
                why="a document is never cut",
                remedy="raise memory.max_tokens or shorten the document",
            )
