"""Reference decoding in float64: the distribution of each generated token, and greedy decoding.

Nothing is cached: each distribution comes from a whole forward pass over prompt and
completion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_conformance.oracle.model import OracleModel

__all__ = ["Greedy", "completion_log_probs", "greedy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """The greedy completion of a prompt."""

    tokens: tuple[int, ...]
    """The likeliest tokens one after another."""
    lead: float
    """Smallest lead of a chosen token over the second likeliest, in nats."""

    def until(self, stops: Collection[int], limit: int) -> list[int]:
        """Return the tokens up to the first stop token (included), and at most ``limit`` tokens."""
        tokens = self.tokens[:limit]
        ends = [place + 1 for place, token in enumerate(tokens) if token in stops]
        return list(tokens[: ends[0]] if ends else tokens)


def completion_log_probs(
    oracle: OracleModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Return the log-probs ``[len(tokens), V]`` that each token of a completion was drawn from.

    Args:
        oracle: a language model.
        prompt: at least one token.
        tokens: the completion; row i is conditioned on the prompt and ``tokens[:i]``.
        temperature: divides the logits; positive.
    """
    with torch.no_grad():
        logits = oracle.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)


def greedy(oracle: OracleModel, prompt: Sequence[int], steps: int) -> Greedy:
    """Return ``steps`` tokens, each the likeliest one.

    No stop token ends the completion early.
    """
    tokens: list[int] = []
    lead = math.inf
    for _ in range(steps):
        with torch.no_grad():
            best = oracle.logits([*prompt, *tokens])[-1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return Greedy(tokens=tuple(tokens), lead=lead)
