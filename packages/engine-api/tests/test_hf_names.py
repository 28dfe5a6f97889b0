"""Tests of the pieces of fused parameters, one by one and all at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from engine_api.hf_names import Piece, views  # noqa: E402 - needs torch


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 2), (3, 1), (2, 0)])
def test_all_views_at_once_are_the_views_one_by_one(first: int, count: int) -> None:
    whole = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    pieces = [
        Piece(name=f"{e}.{kind}", shape=(3, 5), expert=e, rows=rows)
        for e in range(4)
        for kind, rows in (("gate", (0, 3)), ("up", (3, 6)))
    ]
    held = whole[first : first + count]
    found = views(pieces, held, first)
    for piece, view in zip(pieces, found, strict=True):
        want = piece.view(held, first)
        assert view.shape == want.shape and view.stride() == want.stride(), piece
        assert view.numel() == 0 or view.data_ptr() == want.data_ptr(), piece
    assert sum(view.numel() for view in found) == held.numel()


def test_a_parameter_that_is_one_piece_is_itself() -> None:
    whole = torch.ones(3, 2)
    (found,) = views([Piece(name="w", shape=(3, 2))], whole)
    assert found is whole
