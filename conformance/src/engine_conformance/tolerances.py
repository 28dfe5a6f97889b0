"""The suite's tolerances: one table, quantity by dtype, each number derived where it is defined.

They belong to the suite, never to an engine, and hold for the suite's own fixtures,
from whose scale they are derived: hidden states of size 1, logits of standard deviation
4.

The derivation: ``u`` is the unit roundoff. A sum of K products accumulated in the same
precision is off by about ``sqrt(K) u`` relative to the sum's size (Higham and Mary
2019, "A new approach to probabilistic rounding error analysis", theorem 2.4); K is 64
to 128 here, hence ``sqrt(128)``. 16-bit products are accumulated in float32 and rounded
once, hence 1. A layer has about 8 roundings in sequence (norm, projection, scores, mix,
projection, norm, up, down), which add up as a random walk: ``sqrt(8 * layers)``. Their
product, ``noise``, is the relative error of a hidden state.

A gradient's element is a sum over tokens of products of an output's error and an input. Each
product is off by backward's roundings, twice forward's, and by the error of the loss's own
derivative: of a softmax, or of a policy's ratio, that is as large as a logit's. They are
independent from token to token, so that they add up as the tokens' products do, to an error
relative to the `spread` of the gradient (its row's, its column's and its own root of the mean
square), whatever remains of the element itself: where tokens cancel, as under advantages of either
sign, the element may be a thousandth of its error's unit. The derivation is the same in every
precision.

Adam divides a gradient by the root of its own history: an error relative to the spread turns into
one relative to the element, which may be of any size. Weights are therefore compared in units of
what an error of the gradient within its bound does to this very weight (`TrainResult.sensitivity`).

docs/tolerances.md shows how near right engines come to these bounds over seeds and kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine_conformance.oracle.train import TrainResult, spreads

__all__ = [
    "Quantity",
    "Tolerance",
    "gradient_tolerances",
    "moment_tolerance",
    "tolerance",
    "weight_tolerance",
]

Quantity = Literal[
    "log_probs",
    "entropy",
    "values",
    "router_logits",
    "loss",
    "grad_norm",
    "ratio_grad_norm",
    "export",
]

# Products in the longest sum.
_LENGTH = 128
# Standard deviations in the fixtures.
_LOGIT_STD = 4.0
_VALUE_STD = 1.0
_ROUTER_STD = 2.0
# The largest error of thousands of tokens, in standard deviations.
_SIGMAS = 4.0
# The largest error of the 1e5 elements of a gradient, in standard deviations.
_LARGEST = 4.5
# Adam's own arithmetic in float32, relative to an update: its moments, root and quotient.
_ADAM = 1e-3
# A weight that moves in the opposite direction is off by two paths, which is a margin of 0.8.
_OPPOSITE = 2.5
# Kernels differ in the order and number of roundings.
_SAFETY = 2.0

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
    """The bound ``|got - want| <= atol + rtol * |want|``.

    Both zero means bit for bit.
    """

    atol: float = 0.0
    rtol: float = 0.0

    def bound(self, want: Tensor) -> Tensor:
        """Return the largest error allowed at each element."""
        return self.atol + self.rtol * want.abs()


def tolerance(
    quantity: Quantity, dtype: torch.dtype = torch.float32, *, layers: int = 2
) -> Tolerance:
    """Return the tolerance of a quantity computed in ``dtype``.

    Parameters and gradients are summed in float32 or more.

    ========= ======== ======== ======== ========= ========= =========
    2 layers  log_prob value    router   loss      grad_norm export
    ========= ======== ======== ======== ========= ========= =========
    float32   8.6e-5   2.2e-5   4.3e-5   4.3e-5    1.1e-5    bitwise
    bfloat16  0.5      0.13     0.25     0.25      0.063     bitwise
    ========= ======== ======== ======== ========= ========= =========

    All are absolute but grad_norm's, which is relative; entropy has log_prob's. The
    gradient norm of a loss of ratios that are not one has the sum of grad_norm's and
    log_prob's, relative.

    Raises:
        KeyError: if the dtype or the quantity is not in the table.
    """
    noise = _noise(dtype, layers)
    worst = _SAFETY * _SIGMAS * noise
    return {
        # An error of the hidden state scales with the logits; a logit and the log-sum-exp share it.
        "log_probs": Tolerance(atol=worst * _LOGIT_STD),
        # dH = -sum p (log p + H) dlogit: the spread of log p under p is below the logits'.
        "entropy": Tolerance(atol=worst * _LOGIT_STD),
        "values": Tolerance(atol=worst * _VALUE_STD),
        # Two logits, each off by at most this, swap only if they are closer than twice this.
        "router_logits": Tolerance(atol=worst * _ROUTER_STD),
        # A weighted mean of few tokens; absolute, since a policy loss may cancel to nothing.
        "loss": Tolerance(atol=worst * _LOGIT_STD / 2),
        # Backward has twice the roundings of forward. No sigmas: a norm averages over elements, so
        # only the error that all elements share is left. Must stay below 3.5e-5 in float32:
        # gradients accumulated in bfloat16 are off by that much at an identical loss.
        "grad_norm": Tolerance(rtol=2 * _SAFETY * noise),
        # A ratio of probabilities is off by the error of a log-prob, relative to itself, and so is
        # its token's gradient. One token may be most of the gradient, where others are clipped.
        "ratio_grad_norm": Tolerance(rtol=2 * _SAFETY * noise + worst * _LOGIT_STD),
        # Weights are copied, not computed.
        "export": Tolerance(),
    }[quantity]


def weight_tolerance(
    result: TrainResult, dtype: torch.dtype = torch.float32, *, layers: int = 2
) -> dict[str, Tensor]:
    """Return the largest error of each weight after the steps of ``result``, absolute, by name.

    Three parts, with the sum of the learning rates as the unit of length:

    - a base: 1e-3 of it in float32, where Adam's own arithmetic loses most; in 16-bit types the
      error that all elements of an update share, which is the gradient norm's tolerance;
    - the gradient's error times `TrainResult.sensitivity`, at most 2.5: a weight whose gradient
      nearly vanishes moves by one learning rate in a direction that rounding decides. Without this
      part one weight in 100 000 fails in float32 by chance, or the base must be so wide that it
      hides defects. Where it is at its maximum, as for many weights in bfloat16, a margin of 0.8
      means that a weight moved in the opposite direction, which is allowed;
    - one rounding per step of the weight itself, which is float32 whatever the computation is in.

    The gradient's error is relative to its `spread`: see `gradient_tolerances`.
    """
    path = result.path_length
    base = path * max(_ADAM, 2 * _SAFETY * _noise(dtype, layers))
    error = _gradient_error(dtype, layers)
    stored = len(result.steps) * max(2.0**-53, min(_PRECISION[dtype][0], 2.0**-24))
    bounds: dict[str, Tensor] = {}
    for name, slope in result.sensitivity.items():
        moved = (error * slope).clamp(max=_OPPOSITE * path)
        bounds[name] = base + moved + stored * result.params[name].abs()
    return bounds


def gradient_tolerances(
    grads: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, *, layers: int = 2
) -> dict[str, Tensor]:
    """Return the largest error of each element of each gradient, absolute, by name.

    An element is a sum over tokens of products with independent errors: backward's,
    with twice the roundings of forward (``sqrt(2) noise``), and the loss's own, whose
    derivative moves by as much as a logit does (``_LOGIT_STD noise``); at the largest
    of 1e5 elements (4.5 sigmas), relative to the gradient's `spread`
    (`spreads`).

    For 2 layers it is 1.0e-4 in float32 and 0.60 in bfloat16. Seen in float32 under a
    clipped policy loss, where old log-probs enter: 3.3e-5, and 1.2e-5 under the
    likelihood. Seen in bfloat16, over 70 batches and seven models: 0.43.
    """
    error = _gradient_error(dtype, layers)
    units = spreads({name: grad.square() for name, grad in grads.items()})
    return {name: error * unit for name, unit in units.items()}


def moment_tolerance(
    result: TrainResult, dtype: torch.dtype = torch.float32, *, layers: int = 2
) -> dict[str, dict[str, Tensor]]:
    """Return the largest error of Adam's moments after ``result``, by field and name.

    The errors of the steps' gradients are independent, as in `gradient_tolerances`:
    ``(1 - beta1) e`` of the first moment, with ``e`` relative to the root of the sum of
    squares that the second one holds, and by the derivative of a square twice that
    times the element of the second.
    """
    second = result.optimizer.exp_avg_sq
    beta1, beta2 = result.config.betas
    error = {n: _gradient_error(dtype, layers) * unit for n, unit in spreads(second).items()}
    return {
        "exp_avg": {n: (1 - beta1) / math.sqrt(1 - beta2) * e for n, e in error.items()},
        "exp_avg_sq": {n: e * (2 * second[n].sqrt() + e) for n, e in error.items()},
    }


def _gradient_error(dtype: torch.dtype, layers: int) -> float:
    """Return the largest error of a gradient's elements, relative to the gradient's `spread`."""
    return _SAFETY * _LARGEST * math.hypot(math.sqrt(2), _LOGIT_STD) * _noise(dtype, layers)


def _noise(dtype: torch.dtype, layers: int) -> float:
    unit, growth = _PRECISION[dtype]
    return unit * growth * math.sqrt(8 * layers)
