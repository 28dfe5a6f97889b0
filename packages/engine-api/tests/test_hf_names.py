"""Tests of the pieces of fused parameters, one by one and all at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from engine_api.hf_names import Piece, Views  # noqa: E402 - needs torch
from engine_api.weights import assemble  # noqa: E402 - the same

# Of a parameter [4, 6, 5]: first index and size in each dimension.
BOXES = {
    "all": ((0, 0, 0), (4, 6, 5)),
    "experts": ((1, 0, 0), (2, 6, 5)),
    "one": ((3, 0, 0), (1, 6, 5)),
    "no expert": ((2, 0, 0), (0, 6, 5)),
    "rows of both": ((0, 2, 0), (4, 3, 5)),
    "rows of one": ((1, 3, 0), (3, 2, 5)),
    "no row": ((0, 6, 0), (4, 0, 5)),
    "columns": ((0, 0, 2), (4, 6, 2)),
    "a corner": ((2, 1, 3), (2, 4, 2)),
}


def fused_pieces() -> list[Piece]:
    return [
        Piece(name=f"{e}.{kind}", shape=(3, 5), expert=e, rows=rows)
        for e in range(4)
        for kind, rows in (("gate", (0, 3)), ("up", (3, 6)))
    ]


@pytest.mark.parametrize("box", BOXES)
def test_all_views_at_once_are_the_views_one_by_one(box: str) -> None:
    whole = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    offset, shape = BOXES[box]
    held = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
    pieces = fused_pieces()
    found = Views(pieces, offset, held.shape).of(held)
    for piece, view in zip(pieces, found, strict=True):
        want = piece.view(held, offset)
        assert view.shape == want.shape and view.stride() == want.stride(), piece
        assert view.numel() == 0 or view.data_ptr() == want.data_ptr(), piece
        spec = piece.spec(offset, shape, replica=1)
        assert spec.shape == view.shape, piece
        assert torch.equal(view, piece.view(whole)[spec.slices]), piece
        assert spec.is_empty or spec.replica == 1
    assert sum(view.numel() for view in found) == held.numel()


@pytest.mark.parametrize("cuts", [(2, 4, 5), (3, 6, 5), (4, 2, 3), (1, 5, 2)], ids=str)
def test_boxes_of_a_grid_make_up_each_piece(cuts: tuple[int, ...]) -> None:
    whole = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    starts = [(0, cut) for cut in cuts]
    sizes = [(cut, size - cut) for cut, size in zip(cuts, whole.shape, strict=True)]
    for piece in fused_pieces():
        parts = []
        for corner in range(8):
            at = [corner >> dim & 1 for dim in range(3)]
            offset = [starts[dim][i] for dim, i in enumerate(at)]
            shape = [sizes[dim][i] for dim, i in enumerate(at)]
            held = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
            parts.append((piece.view(held, offset), piece.spec(offset, shape, 0)))
        assert torch.equal(assemble(parts), piece.view(whole)), piece


def test_a_parameter_that_is_one_piece_is_itself() -> None:
    whole = torch.ones(3, 2)
    (found,) = Views([Piece(name="w", shape=(3, 2))], (), whole.shape).of(whole)
    assert found is whole


@pytest.mark.parametrize(("offset", "size"), [(0, 8), (0, 3), (2, 3), (3, 5), (7, 1), (8, 0)])
def test_a_parameter_that_is_saved_in_parts_of_its_rows(offset: int, size: int) -> None:
    """Three convolutions are one in memory (OLMo-Hybrid), of unequal sizes."""
    whole = torch.arange(16.0).reshape(8, 2)
    pieces = [
        Piece(name="q", shape=(2, 2), rows=(0, 2)),
        Piece(name="k", shape=(1, 2), rows=(2, 3)),
        Piece(name="v", shape=(5, 2), rows=(3, 8)),
    ]
    held = whole[offset : offset + size]
    found = Views(pieces, (offset, 0), held.shape).of(held)
    for piece, view in zip(pieces, found, strict=True):
        spec = piece.spec((offset, 0), (size, 2), replica=0)
        assert spec.shape == view.shape
        assert torch.equal(view, piece.view(whole)[spec.slices])
    assert sum(view.numel() for view in found) == held.numel()
