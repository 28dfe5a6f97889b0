"""The suite's tolerances: one table, quantity by dtype, each number derived where it stands.

They belong to the suite, never to an engine, and hold for the suite's own fixtures, whose scale
they are derived from: hidden states of size 1, logits of standard deviation 4.

The derivation. ``u`` is the unit roundoff. A sum of K products accumulated in the same precision is
off by about ``sqrt(K) u`` relative to the sum's size (Higham and Mary 2019, "A new approach to
probabilistic rounding error analysis", theorem 2.4); K is 64 to 128 here, hence ``sqrt(128)``.
16-bit products are accumulated in float32 and rounded once, hence 1. A layer has about 8 roundings in
sequence (norm, projection, scores, mix, projection, norm, up, down), which add up as a random walk:
``sqrt(8 * layers)``. Their product, ``noise``, is the relative error of a hidden state.

Seen with float32 and bfloat16 models of transformers, 2 and 8 layers: the worst log-probability is
off by a tenth to a half of its tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine_conformance.oracle.train import TrainResult

__all__ = ["Quantity", "Tolerance", "tolerance", "weight_tolerance"]

Quantity = Literal["log_probs", "entropy", "values", "router_logits", "loss", "grad_norm", "export"]

_LENGTH = 128  # products in the longest sum
_LOGIT_STD, _VALUE_STD, _ROUTER_STD = 4.0, 1.0, 2.0  # of the fixtures
_SIGMAS = 4.0  # the worst of thousands of tokens
_LARGEST = 4.5  # sigmas: the worst of the 1e5 elements of a gradient
_ROWS = 2.0  # a row's size over its tensor's
_SAFETY = 2.0  # kernels differ in the order and number of roundings

_SAME = math.sqrt(_LENGTH)
# dtype: (unit roundoff, growth of a sum's error)
_PRECISION: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (2.0**-53, _SAME),
    torch.float32: (2.0**-24, _SAME),
    torch.float16: (2.0**-11, 1.0),
    torch.bfloat16: (2.0**-8, 1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """``|got - want| <= atol + rtol * |want|``; both zero means bit for bit."""

    atol: float = 0.0
    rtol: float = 0.0

    def bound(self, want: Tensor) -> Tensor:
        """The largest error allowed at each element."""
        return self.atol + self.rtol * want.abs()


def tolerance(quantity: Quantity, dtype: torch.dtype = torch.float32, *, layers: int = 2) -> Tolerance:
    """The tolerance of a quantity computed in ``dtype`` (parameters and gradients summed in float32 or more).

    ========= ======== ======== ======== ========= ========= =========
    2 layers  log_prob value    router   loss      grad_norm export
    ========= ======== ======== ======== ========= ========= =========
    float32   8.6e-5   2.2e-5   4.3e-5   4.3e-5    1.1e-5    bitwise
    bfloat16  0.5      0.13     0.25     0.25      0.063     bitwise
    ========= ======== ======== ======== ========= ========= =========

    (absolute, but for grad_norm, which is relative; entropy as log_prob)

    Raises:
        KeyError: on a dtype or quantity that is not in the table.
    """
    noise = _noise(dtype, layers)
    worst = _SAFETY * _SIGMAS * noise
    return {
        # An error of the hidden state scales with the logits; one logit and the log-sum-exp share it.
        "log_probs": Tolerance(atol=worst * _LOGIT_STD),
        # dH = -sum p (log p + H) dlogit: the spread of log p under p is below the logits'.
        "entropy": Tolerance(atol=worst * _LOGIT_STD),
        "values": Tolerance(atol=worst * _VALUE_STD),
        # Two logits, each off by at most this, change places only if they are closer than twice this.
        "router_logits": Tolerance(atol=worst * _ROUTER_STD),
        # A weighted mean of few tokens; absolute, since a policy loss may cancel to nothing.
        "loss": Tolerance(atol=worst * _LOGIT_STD / 2),
        # Backward has twice the roundings of forward. No sigmas: a norm averages over elements, so what
        # is left is what all share. Must stay below 3.5e-5 in float32: gradients accumulated in
        # bfloat16 are off by that much at an identical loss.
        "grad_norm": Tolerance(rtol=2 * _SAFETY * noise),
        # Weights are copied, not computed.
        "export": Tolerance(),
    }[quantity]


def weight_tolerance(result: TrainResult, dtype: torch.dtype = torch.float32, *, layers: int = 2) -> dict[str, Tensor]:
    """The largest error of each weight after the steps of ``result``, absolute, by name.

    Three parts, with the sum of the learning rates as the unit of length:

    - a base: 1e-3 of it in float32, where Adam's own arithmetic is what loses most; in 16-bit types the error that all
      elements of an update share, which is the gradient norm's tolerance;
    - the gradient's error times `TrainResult.sensitivity`, at most 2: a weight whose gradient nearly
      vanishes moves by one learning rate in a direction that rounding decides. Without this part one weight
      in 100 000 fails in float32 by chance, or the base must be so wide that it hides defects. Where it is at its
      most, as for many weights in bfloat16, a margin near 1 means that a weight moved the other way, which it may;
    - one rounding a step of the weight itself, which is float32 whatever the computation is in.

    The gradient's error, relative to its tensor's root mean square, is ``noise`` in float32 (seen: 0.2 of it). In
    16-bit types an element is a sum over tokens of products with independent errors: backward's, with twice the
    roundings of forward (``sqrt(16 * layers) u``), at the largest of 1e5 elements (4.5 sigmas), in rows whose tokens
    are up to twice the tensor's size: 102 u for 2 layers, that is 0.40. Seen: 0.18.
    """
    unit, growth = _PRECISION[dtype]
    noise, wide = _noise(dtype, layers), growth > 1
    base = 1e-3 if wide else 2 * _SAFETY * noise
    error = _SAFETY * noise * (1.0 if wide else _LARGEST * math.sqrt(2) * _ROWS)
    path, steps = result.path_length, len(result.steps)
    stored = steps * max(2.0**-53, min(unit, 2.0**-24))
    return {
        name: base * path + (error * slope).clamp(max=2 * path) + stored * result.params[name].abs()
        for name, slope in result.sensitivity.items()
    }


def _noise(dtype: torch.dtype, layers: int) -> float:
    unit, growth = _PRECISION[dtype]
    return unit * growth * math.sqrt(8 * layers)
