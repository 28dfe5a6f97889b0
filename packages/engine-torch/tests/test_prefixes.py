"""Trees of documents that begin alike, against each document alone."""

from __future__ import annotations

import random

import pytest
import torch
from attention_reference import random_inputs, reference
from torch import nn

from engine_api.batch import Batch
from engine_api.errors import UnsupportedCapability
from engine_torch import flex
from engine_torch.attention import build_tree_packing, masked_attention, packed_attention
from engine_torch.inputs import pack_inputs, pack_tree
from engine_torch.mixers import divide_mixers
from engine_torch.prefixes import build_tree, mask_of, take_rows

DRAW = random.Random(1)
BATCHES = [
    [[DRAW.randrange(3) for _ in range(DRAW.randrange(1, 9))] for _ in range(DRAW.randrange(1, 10))]
    for _ in range(25)
]
CPU = torch.device("cpu")


def pack(documents: list[list[int]]) -> Batch:
    return Batch.pack([{"input_ids": document} for document in documents])


@pytest.mark.parametrize("documents", BATCHES)
def test_a_tree_has_each_beginning_once(documents: list[list[int]]) -> None:
    batch = pack(documents)
    tree = build_tree(batch)
    beginnings = {tuple(d[: n + 1]) for d in documents for n in range(len(d))}
    assert len(tree.tokens) == len(beginnings)
    ids = batch.input_ids[tree.tokens]
    mask = mask_of(tree.ends)[0, 0]
    for document, rows in zip(documents, tree.rows.split(batch.lengths), strict=True):
        assert ids[rows].tolist() == document
        assert tree.positions[rows].tolist() == list(range(len(document)))
        assert tree.parents[rows].tolist() == [int(rows[0]), *rows[:-1].tolist()]
        for number, row in enumerate(rows):
            # A token sees the tokens of its own document up to itself, and no other.
            assert mask[row].nonzero()[:, 0].tolist() == rows[: number + 1].tolist()


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_in_a_tree(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """flex_attention has no backward pass on a CPU: test_cuda has that."""
    monkeypatch.setattr(flex, "_compiled", lambda function, **_: function)
    documents = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8], [1, 2, 3, 4]]
    tree = build_tree(pack(documents))
    size = len(tree.tokens)
    inputs = random_inputs(size, heads=4, kv_heads=2, width=16, value_width=16, dtype=torch.float32)
    bare = [x.detach() for x in inputs]
    packing = build_tree_packing(tree.ends, kernel, CPU)
    got = packed_attention(nn.Module(), *bare, None, packing=packing)[0].transpose(1, 2)
    for rows in tree.rows.split([len(d) for d in documents]):
        own = [x[:, :, rows].double() for x in bare]
        want = reference(*own, [len(rows)])
        torch.testing.assert_close(got[:, :, rows].double(), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_taken_twice_get_both_gradients(dtype: torch.dtype) -> None:
    index = torch.tensor([2, 0, 2, 2])
    for shape in ((3,), (3, 4)):
        values = torch.randn(shape, dtype=dtype, requires_grad=True)
        taken = take_rows(values, index)
        assert torch.equal(taken, values[index])
        gradient = torch.randn(taken.shape, dtype=dtype)
        taken.backward(gradient)
        want = torch.zeros(shape).index_add(0, index, gradient.float())
        assert values.grad is not None
        # Sums of three normal numbers, rounded to the dtype.
        close = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(values.grad.float(), want, atol=close, rtol=0)


def test_documents_without_a_common_beginning_are_computed_as_they_were() -> None:
    batch = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    tree = pack_tree(batch, kernel="sdpa", multiple=4, device=CPU)
    plain = pack_inputs(batch, group=None, parts=1, part=0, kernel="sdpa", multiple=4, device=CPU)
    assert torch.equal(tree.input_ids, plain.input_ids)
    assert torch.equal(tree.position_ids, plain.position_ids)
    assert torch.equal(tree.first, plain.first)
    same = plain.packing.document[:, None] == plain.packing.document[None, :]
    assert tree.packing.mask is not None
    assert torch.equal(tree.packing.mask[0, 0], same.tril())


def test_no_documents_are_one_of_padding() -> None:
    inputs = pack_tree(Batch.pack([]), kernel="sdpa", multiple=8, device=CPU)
    assert inputs.input_ids.shape == (1, 8)
    assert inputs.align(torch.ones(8), None).shape == (0,)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_layers_that_no_tree_is_computed_with_name_what_they_ask_for() -> None:
    packing = build_tree_packing(torch.tensor([3, 3, 3]), "sdpa", CPU)
    q = torch.zeros(1, 2, 3, 4)
    for asked, words in (
        ({"sliding_window": 2}, "a sliding window"),
        ({"softcap": 3.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
    ):
        with pytest.raises(UnsupportedCapability, match=words):
            packed_attention(nn.Module(), q, q, q, None, packing=packing, **asked)
    with pytest.raises(UnsupportedCapability, match="a selection of tokens"):
        masked_attention(nn.Module(), q, q, q, torch.ones(1, 1, 3, 3) > 0, packing=packing)
    mixer = Mixer()
    documents = divide_mixers(mixer, None)
    documents.set(packing)
    with pytest.raises(UnsupportedCapability, match="a state from token to token"):
        mixer(torch.zeros(1, 3, 4))
