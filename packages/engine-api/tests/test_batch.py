"""Tests of batches: refusals that name field and index, packing and selecting."""

from __future__ import annotations

import pickle

import pytest
import torch

from engine_api import Batch
from engine_api.errors import BatchError


def ids(count: int = 5) -> torch.Tensor:
    return torch.arange(count)


def cu(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int64)


BAD = {
    "ids are a list": ({"input_ids": [1, 2]}, "input_ids", None),
    "ids are padded": ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, "input_ids", None),
    "ids are int32": ({"input_ids": ids().int()}, "input_ids", None),
    "boundaries are a tuple": ({"cu_seqlens": (0, 5)}, "cu_seqlens", None),
    "boundaries are int16": ({"cu_seqlens": cu(0, 5).short()}, "cu_seqlens", None),
    "boundaries are empty": ({"cu_seqlens": cu()}, "cu_seqlens", None),
    "boundaries are a matrix": ({"cu_seqlens": cu(0, 5)[None]}, "cu_seqlens", None),
    "boundaries start late": ({"cu_seqlens": cu(1, 5)}, "cu_seqlens", 0),
    "a document is empty": ({"cu_seqlens": cu(0, 2, 2, 5)}, "cu_seqlens", 2),
    "boundaries fall": ({"cu_seqlens": cu(0, 3, 2, 5)}, "cu_seqlens", 2),
    "boundaries end early": ({"cu_seqlens": cu(0, 2, 4)}, "cu_seqlens", 2),
    "boundaries end late": ({"cu_seqlens": cu(0, 6)}, "cu_seqlens", 1),
    "a field is short": ({"fields": {"advantages": torch.zeros(4)}}, "advantages", None),
    "a field is a matrix": ({"fields": {"advantages": torch.zeros(5, 1)}}, "advantages", None),
    "a field is a list": ({"fields": {"advantages": [0.0] * 5}}, "advantages", None),
    "a field is a numpy array": (
        {"fields": {"advantages": torch.zeros(5).numpy()}},
        "advantages",
        None,
    ),
    "a field has a NaN": (
        {"fields": {"advantages": torch.tensor([0, 0, 0, float("nan"), 0])}},
        "advantages",
        3,
    ),
    "a field has an infinity": (
        {"fields": {"x": torch.tensor([0, float("-inf"), 0, 0, 0])}},
        "x",
        1,
    ),
    "weights are integers": (
        {"fields": {"loss_weight": torch.zeros(5, dtype=torch.int64)}},
        "loss_weight",
        None,
    ),
    "a weight is negative": (
        {"fields": {"loss_weight": torch.tensor([0.0, 1, -1, 0, 1])}},
        "loss_weight",
        2,
    ),
    "a first token carries loss": (
        {"fields": {"loss_weight": torch.tensor([0.0, 1, 1, 1, 1])}},
        "loss_weight",
        2,
    ),
}


@pytest.mark.parametrize(("parts", "field", "index"), BAD.values(), ids=BAD.keys())
def test_bad_parts_are_refused_by_field_and_index(parts, field, index):
    good = {"input_ids": ids(), "cu_seqlens": cu(0, 2, 5)}
    with pytest.raises(BatchError) as caught:
        Batch(**{**good, **parts})
    assert (caught.value.field, caught.value.index) == (field, index)
    assert caught.value.where == f"batch.{field}" + ("" if index is None else f"[{index}]")


def test_a_good_batch_knows_its_sizes():
    batch = Batch(input_ids=ids(), cu_seqlens=cu(0, 2, 5))
    assert (batch.num_tokens, batch.num_documents, batch.lengths, batch.boundaries) == (
        5,
        2,
        [2, 3],
        (0, 2, 5),
    )


def test_boundaries_may_be_int32():
    fields = {"loss_weight": torch.tensor([0.0, 1, 0, 1, 1])}
    batch = Batch(input_ids=ids(), cu_seqlens=cu(0, 2, 5).int(), fields=fields)
    assert batch.select([1]).lengths == [3]


def test_an_empty_batch_is_a_batch():
    batch = Batch.pack([])
    assert (batch.num_tokens, batch.num_documents, batch.lengths) == (0, 0, [])
    assert Batch.concat([]).num_tokens == 0


def test_a_batch_cannot_be_changed(make_batch):
    batch = make_batch([3])
    with pytest.raises(AttributeError):
        batch.input_ids = ids()
    with pytest.raises(TypeError):
        batch.fields["loss_weight"] = ids()


def test_a_missing_field_is_named_with_those_present(make_batch):
    with pytest.raises(BatchError, match="loss_weight") as caught:
        make_batch([3])["advantages"]
    assert caught.value.field == "advantages"


@pytest.mark.parametrize(("token", "index"), [(-1, 1), (7, 1)])
def test_ids_outside_the_vocabulary_are_found(token, index):
    batch = Batch(input_ids=torch.tensor([0, token, 9]), cu_seqlens=cu(0, 3))
    with pytest.raises(BatchError) as caught:
        batch.check_vocabulary(7)
    assert (caught.value.field, caught.value.index) == ("input_ids", index)


def test_pack_refuses_documents_that_differ():
    document = {"input_ids": [1, 2], "x": [0.0, 1.0]}
    for other, field in (
        ({"input_ids": [1]}, "documents"),
        ({"input_ids": [1], "x": [0.0, 0.0]}, "x"),
    ):
        with pytest.raises(BatchError) as caught:
            Batch.pack([document, other])
        assert (caught.value.field, caught.value.index) == (field, 1)
    with pytest.raises(BatchError, match="input_ids is missing"):
        Batch.pack([{"x": [0.0]}])


def test_select_and_concat_are_inverse(make_batch):
    batch = make_batch([3, 1, 4, 2])
    parts = [batch.select([i]) for i in range(4)]
    whole = Batch.concat(parts)
    assert torch.equal(whole.input_ids, batch.input_ids)
    assert torch.equal(whole.cu_seqlens, batch.cu_seqlens)
    assert torch.equal(whole.loss_weight, batch.loss_weight)
    swapped = batch.select([2, 0])
    assert swapped.lengths == [4, 3]
    assert (
        swapped.input_ids.tolist() == batch.input_ids[4:8].tolist() + batch.input_ids[:3].tolist()
    )


def test_concat_refuses_other_fields(make_batch):
    with pytest.raises(BatchError) as caught:
        Batch.concat([make_batch([2]), make_batch([2]).with_fields(extra=torch.zeros(2))])
    assert (caught.value.field, caught.value.index) == ("fields", 1)


def test_moving_and_pickling_keep_everything(make_batch):
    batch = make_batch([3, 2]).with_fields(advantages=torch.ones(5))
    for other in (batch.to("cpu"), pickle.loads(pickle.dumps(batch))):
        assert other.boundaries == batch.boundaries
        assert torch.equal(other.input_ids, batch.input_ids)
        assert set(other.fields) == {"loss_weight", "advantages"}


# --- experts of each token ------------------------------------------------------------------------


def experts(*tokens: int, layers: int = 2) -> torch.Tensor:
    """Return ``[T, layers, 1]``, one number for each token."""
    return torch.tensor(tokens, dtype=torch.int8)[:, None, None].expand(-1, layers, 1)


def test_experts_follow_their_tokens_through_everything() -> None:
    rows = [(1, 2, 3), (4, 5)]
    packed = Batch.pack([{"input_ids": list(row), "routed_experts": experts(*row)} for row in rows])
    assert packed["routed_experts"].dtype == torch.int8
    swapped = packed.select([1, 0])
    both = Batch.concat([swapped, packed])
    copies = (
        both.to("cpu"),
        pickle.loads(pickle.dumps(both)),
        both.with_computed(more=both.input_ids),
    )
    for batch in (packed, swapped, both, *copies):
        assert batch["routed_experts"].shape == (batch.num_tokens, 2, 1)
        assert torch.equal(batch["routed_experts"][:, 1, 0].long(), batch.input_ids)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (experts(1, 2, 3)[:, :, 0], r"shape \(3, 2\), not \[3, layers, experts per token\]"),
        (experts(1, 2).float(), "shape"),
        (experts(1, 2, 3).float(), "float32 is no signed integer"),
        (experts(1, 2, 3).to(torch.uint8), "uint8 is no signed integer"),
    ],
)
def test_experts_of_another_form_are_refused(given: torch.Tensor, problem: str) -> None:
    with pytest.raises(BatchError, match=problem) as caught:
        Batch(input_ids=ids(3), cu_seqlens=cu(0, 3), fields={"routed_experts": given})
    assert caught.value.field == "routed_experts"
    assert caught.value.remedy


def test_experts_of_different_models_are_not_joined() -> None:
    one, other = ({"input_ids": [1], "routed_experts": experts(1, layers=n)} for n in (1, 2))
    with pytest.raises(BatchError, match=r"are \(2, 1\), and \(1, 1\) before") as caught:
        Batch.pack([one, other])
    assert caught.value.index == 1
    with pytest.raises(BatchError, match="before"):
        Batch.concat([Batch.pack([one]), Batch.pack([other])])
