"""The coefficient of a KL penalty that follows a target.

Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

from __future__ import annotations

import math

LARGEST_ERROR = 0.2


def next_coefficient(coefficient: float, kl: float, *, target: float, gain: float = 0.1) -> float:
    """Return ``β (1 + K e)`` with ``e = clip((KL - target) / target, -0.2, 0.2)``.

    Args:
        coefficient: β of the step that measured ``kl``.
        kl: nats a completion, the mean over the step's completions of the KL summed over their
            tokens.
        target: nats a completion, above 0.
        gain: K; the paper's is 0.1, so that β changes by 2 % a step at most.

    Returns:
        β of the next step.
    """
    assert math.isfinite(kl), "log-probs are checked where they enter a batch"
    error = max(-LARGEST_ERROR, min(LARGEST_ERROR, (kl - target) / target))
    return coefficient * (1 + gain * error)
