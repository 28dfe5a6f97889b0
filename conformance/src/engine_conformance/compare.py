"""Comparisons per token and per weight, never of means, whose failures name place and likely cause.

Each returns the margin: the largest error over its tolerance, which tells 0.02 from
0.97.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_conformance.hints import Factors, ratio_hint, token_hints
from engine_conformance.tolerances import Tolerance

__all__ = [
    "ConformanceFailure",
    "assert_bitwise",
    "assert_close_per_token",
    "assert_covered_once",
    "assert_names",
    "assert_scalar_close",
    "assert_weights_close",
]


class ConformanceFailure(AssertionError):
    """A quantity that differs from what the contract says.

    ``margin`` is the largest error over its tolerance (infinite for a wrong name, shape
    or bit), ``where`` its location, ``hints`` likely causes.
    """

    def __init__(
        self,
        quantity: str,
        problem: str,
        *,
        margin: float = math.inf,
        where: str = "",
        hints: Sequence[str] = (),
    ) -> None:
        self.quantity = quantity
        self.margin = margin
        self.where = where
        self.hints = tuple(hints)
        self._problem = problem
        at = f" at {where}" if where else ""
        super().__init__("\n  likely: ".join([f"{quantity}{at}: {problem}", *self.hints]))

    def with_hint(self, hint: str) -> ConformanceFailure:
        """Return the same failure with one more likely cause, which comes first."""
        return ConformanceFailure(
            self.quantity,
            self._problem,
            margin=self.margin,
            where=self.where,
            hints=(hint, *self.hints),
        )


def assert_scalar_close(
    name: str, got: float, want: float, tol: Tolerance, *, factors: Factors | None = None
) -> float:
    """Compare one number, as a loss or a gradient norm, and return the margin.

    Args:
        name: the quantity, as the message names it.
        got: the engine's value.
        want: the oracle's value.
        tol: see `engine_conformance.tolerances`.
        factors: sizes of the run that a ratio may equal: ``{"dp size": 2, "micro-batches": 3}``.

    Raises:
        ConformanceFailure: if they differ by more than the tolerance.
    """
    actual = _float64(got).reshape(1)
    exact = _float64(want).reshape(1)
    bound = tol.bound(exact)
    error, margins = _margins(actual, exact, bound)
    margin = margins.item()
    if margin > 1:
        hints = list(ratio_hint(actual, exact, bound, factors or {}))
        raise ConformanceFailure(
            name, _problem(got, want, error, margin), margin=margin, hints=hints
        )
    return margin


def assert_close_per_token(
    name: str,
    got: Any,
    want: Any,
    tol: Tolerance,
    *,
    cu_seqlens: Any = None,
    keep: Any = None,
    factors: Factors | None = None,
) -> float:
    """Compare a per-token quantity ``[T]`` and return the margin.

    See `assert_scalar_close` for the other arguments.

    Args:
    Args:
        cu_seqlens: ``[D + 1]``, to name the document and the position in it.
        keep: boolean ``[T]``: tokens to compare; all if absent.

    Raises:
        ConformanceFailure: if the shape differs, or a token by more than the tolerance.
    """
    got = _float64(got)
    want = _float64(want)
    _assert_shape(name, got, want)
    bound = tol.bound(want)
    kept = torch.ones_like(want, dtype=torch.bool) if keep is None else torch.as_tensor(keep).cpu()
    _, margins = _margins(got, want, bound)
    margins = torch.where(kept, margins, 0.0)
    worst = int(margins.argmax()) if len(margins) else 0
    margin = margins[worst].item() if len(margins) else 0.0
    if margin <= 1:
        return margin
    error = (got[worst] - want[worst]).abs()
    wrong = margins > 1
    problem = _problem(got[worst].item(), want[worst].item(), error, margin)
    problem += f"; {int(wrong.sum())} of {int(kept.sum())} tokens differ"
    hints = [*ratio_hint(got[kept], want[kept], bound[kept], factors or {})]
    hints += token_hints(got, want, bound, wrong, _bounds(cu_seqlens))
    where = _token_location(worst, _bounds(cu_seqlens))
    raise ConformanceFailure(name, problem, margin=margin, where=where, hints=hints)


def assert_weights_close(
    got: Mapping[str, Any],
    want: Mapping[str, Tensor],
    tol: Tolerance | Mapping[str, Tensor],
    *,
    name: str = "weights",
    start: Mapping[str, Any] | None = None,
    factors: Factors | None = None,
) -> float:
    """Compare every element of every tensor and return the margin.

    See `assert_scalar_close` for the other arguments.

    Args:
    Args:
        tol: one tolerance, or the largest error of each element by name (`weight_tolerance`).
        start: the weights before the steps; then hints speak of the update's size.

    Raises:
        ConformanceFailure: if names or shapes differ, or an element by more than its tolerance.
    """
    assert_names(name, got, want)
    worst = 0.0
    location = ""
    problem = ""
    hints: list[str] = []
    for key, expected in want.items():
        have = _float64(got[key])
        exact = _float64(expected)
        _assert_shape(f"{name} {key}", have, exact)
        bound = tol.bound(exact) if isinstance(tol, Tolerance) else _float64(tol[key])
        error, margins = _margins(have, exact, bound)
        index = int(margins.argmax())
        margin = margins.flatten()[index].item()
        if margin <= worst:
            continue
        worst = margin
        location = f"{key}{_subscript(index, exact.shape)}"
        actual_element = have.flatten()[index].item()
        exact_element = exact.flatten()[index].item()
        problem = _problem(actual_element, exact_element, error.flatten()[index], margin)
        problem += f"; {int((margins > 1).sum())} of {exact.numel()} elements differ"
        origin = torch.zeros_like(exact) if start is None else _float64(start[key])
        hints = [*ratio_hint(have - origin, exact - origin, bound, factors or {})]
    if worst > 1:
        raise ConformanceFailure(name, problem, margin=worst, where=location, hints=hints)
    return worst


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, ``[n, itemsize]``."""
    # A copy, since a tensor of one element may have any stride, which a view to bytes refuses.
    return tensor.reshape(-1, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_bitwise(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], *, name: str = "export"
) -> float:
    """Compare names, dtypes, shapes and bits (so that -0.0 differs from 0.0) and return 0.

    Raises:
        ConformanceFailure: at the first tensor that differs.
    """
    assert_names(name, got, want)
    for key, expected in want.items():
        have = got[key].detach().cpu().contiguous()
        exact = expected.detach().cpu().contiguous()
        if have.dtype != exact.dtype:
            raise ConformanceFailure(name, f"dtype {have.dtype}, expected {exact.dtype}", where=key)
        _assert_shape(f"{name} {key}", have, exact)
        have_bytes, exact_bytes = (_view_bytes(tensor) for tensor in (have, exact))
        differ = (have_bytes != exact_bytes).any(dim=-1)
        if differ.any():
            index = int(differ.nonzero()[0])
            problem = (
                f"got {have.flatten()[index].item()!r}, want {exact.flatten()[index].item()!r}; "
                f"{int(differ.sum())} of {differ.numel()} elements differ"
            )
            raise ConformanceFailure(name, problem, where=f"{key}{_subscript(index, exact.shape)}")
    return 0.0


def assert_names(name: str, got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Check that the names are the same, no more and no fewer.

    Raises:
        ConformanceFailure: with the names that only one side has, and which side.
    """
    missing = sorted(set(want) - set(got))
    unexpected = sorted(set(got) - set(want))
    if missing or unexpected:
        sides = {
            "only the expected side (the oracle, a file or an earlier export)": missing,
            "only the engine under test": unexpected,
        }
        problem = "; ".join(
            f"{side} has {len(names)}: {names[:5]}" for side, names in sides.items() if names
        )
        raise ConformanceFailure(f"{name} names", problem)


def assert_covered_once(name: str, counts: Tensor, boxes: Mapping[str, Any], *, where: str) -> None:
    """Check that boxes cover each element of a tensor exactly once.

    Args:
        name: the quantity, as the message names it.
        counts: the number of boxes that each element is in.
        boxes: the slices of each box, by the name of its holder.
        where: the tensor's name.

    Raises:
        ConformanceFailure: with the numbers of elements in no box and in several, and the holders.
    """
    none = int((counts == 0).sum())
    several = counts > 1
    twice = int(several.sum())
    if not none and not twice:
        return
    problems = [f"{none} of {counts.numel()} elements are in no box"] if none else []
    hints = list[str]()
    if twice:
        holders = [holder for holder, box in boxes.items() if bool(several[box].any())]
        problems.append(
            f"{twice} of {counts.numel()} elements are in several boxes: of {', '.join(holders)}"
        )
        hints.append(
            "holders of the same box all say replica 0: number the copies 0, 1, … "
            "(ShardSpec.replica), since only replica 0 is stored"
        )
    raise ConformanceFailure(name, "; ".join(problems), where=where, hints=hints)


def _margins(got: Tensor, want: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors, and the errors over their tolerances.

    The latter is infinite where ``got`` is not finite, or where there is an error and
    no tolerance.
    """
    error = (got - want).abs()
    # Without the condition a zero error over a zero tolerance would be NaN.
    margins = torch.where(error == 0, 0.0, error / bound)
    return error, torch.where(margins.isnan(), math.inf, margins)


def _problem(got: float, want: float, error: Any, margin: float) -> str:
    return f"got {got:.9g}, want {want:.9g}, error {float(error):.2g} ({margin:.3g}x tolerance)"


def _assert_shape(name: str, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise ConformanceFailure(name, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")


def _float64(array: Any) -> Tensor:
    return torch.as_tensor(array).detach().to(device="cpu", dtype=torch.float64)


def _bounds(cu_seqlens: Any) -> list[int]:
    return [] if cu_seqlens is None else torch.as_tensor(cu_seqlens).tolist()


def _token_location(token: int, bounds: Sequence[int]) -> str:
    if not bounds:
        return f"token {token}"
    document = sum(bound <= token for bound in bounds) - 1
    return f"token {token} (document {document}, position {token - bounds[document]})"


def _subscript(index: int, shape: Sequence[int]) -> str:
    if not shape:
        return ""
    place = torch.unravel_index(torch.tensor(index), tuple(shape))
    return f"[{', '.join(str(int(i)) for i in place)}]"
