"""Figures of several samples a problem: mean@k, best@k (pass@k), maj@k.

A problem has n samples, c of them correct.

- mean@n: c / n.
- best@k: the probability that one of k samples is correct, ``1 - C(n-c, k) / C(n, k)``: unbiased
  for k <= n (Chen et al. 2021, arXiv:2107.03374, equation 1).
- maj@k: 1 if the answer that most of k samples give is correct (Wang et al. 2022,
  arXiv:2203.11171), averaged over the
  n // k disjoint blocks of k samples, in their order; unbiased too. Samples without an answer do
  not vote; without votes it is 0. Answers with equally many votes give the mean of their
  correctness, as a fair draw does.

All of them are means over problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One sample's answer (None if none was found in it), and whether it is correct."""

    answer: str | None
    correct: bool


def best_at(k: int, samples: int, correct: int) -> float:
    """Return the estimate of best@k for one problem, with ``k <= samples``."""
    assert 1 <= k <= samples, "k samples are chosen from all samples"
    # C(n-c, k) / C(n, k) as a product, which does not overflow.
    missed = 1.0
    for i in range(k):
        missed *= max(0, samples - correct - i) / (samples - i)
    return 1.0 - missed


def majority(votes: Sequence[Vote]) -> float:
    """Return the correctness of the majority's answer, 0 to 1.

    An answer is as correct as the first sample that gives it.
    """
    counts: dict[str, int] = {}
    right: dict[str, bool] = {}
    for vote in votes:
        if vote.answer is not None:
            counts[vote.answer] = counts.get(vote.answer, 0) + 1
            right.setdefault(vote.answer, vote.correct)
    most = max(counts.values(), default=0)
    return fmean(right[a] for a, n in counts.items() if n == most) if counts else 0.0


def majority_at(k: int, votes: Sequence[Vote]) -> float:
    """Return maj@k of one problem."""
    return fmean(majority(votes[at : at + k]) for at in range(0, len(votes) - k + 1, k))


def figures_at_k(problems: Sequence[Sequence[Vote]]) -> dict[str, float]:
    """Return ``mean@n``, and ``best@k`` and ``maj@k`` for k of 2, 4, 8, … and n.

    It is empty for one sample a problem. ``problems`` has n votes for each problem. ``maj@k`` is
    there only where some sample has an answer.
    """
    n = len(problems[0])
    if n == 1:
        return {}
    correct = [sum(vote.correct for vote in votes) for votes in problems]
    figures = {f"mean@{n}": fmean(c / n for c in correct)}
    chosen = [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]
    figures |= {f"best@{k}": fmean(best_at(k, n, c) for c in correct) for k in chosen}
    if any(vote.answer is not None for votes in problems for vote in votes):
        figures |= {f"maj@{k}": fmean(majority_at(k, votes) for votes in problems) for k in chosen}
    return figures
