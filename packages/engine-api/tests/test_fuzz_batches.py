"""Fuzz tests of batches.

Arbitrary arguments give a ``Batch`` that keeps its promises, or a ``BatchError`` that names the
field.
"""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_api import Batch
from engine_api.errors import BatchError
from engine_api.tensors import DTYPES

# Of torch, where such tensors are made.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*quantize", "ignore:.*torchao"
)
VOCABULARY = 11
HUGE = 10**400

scalars = st.one_of(
    st.integers(-2, VOCABULARY + 1),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(
        [
            HUGE,
            2**63,
            -(2**63),
            2**64,
            1e300,
            Fraction(1, 3),
            1j,
            np.int64(3),
            np.float32(0.5),
            np.bool_(True),
        ]
    ),
)
junk = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=2), scalars, max_size=2),
    st.builds(object),
    st.just(range(4)),
    st.just(float),
)


# Functions from a plain tensor to one that an engine cannot index, copy or hash, or to one of a
# different shape or dtype, by kind.
STRANGE = {
    "sparse": lambda whole: whole.float().to_sparse(),
    "meta": lambda whole: whole.to("meta"),
    "nested": lambda whole: torch.nested.nested_tensor([whole.float(), whole.float()]),
    "jagged": lambda whole: torch.nested.nested_tensor(
        [whole.float(), whole.float()], layout=torch.jagged
    ),
    "gradient": lambda whole: whole.float().requires_grad_(),
    "parameter": lambda whole: torch.nn.Parameter(whole.float()),
    "complex": lambda whole: whole.to(torch.complex64),
    "quantized": lambda whole: torch.quantize_per_tensor(whole.float(), 1.0, 0, torch.quint8),
    "float8": lambda whole: whole.float().to(torch.float8_e4m3fn),
    "scalar": lambda _: torch.tensor(3),
    "matrix": lambda whole: torch.stack([whole, whole], dim=1),
    "uint64": lambda whole: whole.to(torch.uint64),
}


@st.composite
def tensors(draw: st.DrawFn, size: int) -> torch.Tensor:
    """Draw a tensor of about ``size`` values, of any dtype, shape, layout and storage."""
    if draw(st.booleans()):
        return STRANGE[draw(st.sampled_from(sorted(STRANGE)))](torch.arange(max(size, 1)))
    values = draw(st.lists(st.floats(-2, VOCABULARY + 1), min_size=size, max_size=size))
    tensor = torch.tensor(values, dtype=torch.float64)
    tensor = tensor.to(
        getattr(torch, draw(st.sampled_from([*DTYPES, "int64", "float32", "float32"])))
    )
    change = draw(st.sampled_from(["", "", "strided", "expanded", "nan", "longer", "shorter"]))
    if change == "strided":
        tensor = torch.stack([tensor, tensor], dim=1)[:, 0]
    elif change == "expanded" and size:
        tensor = tensor[:1].expand(size)
    elif change == "nan" and size and tensor.is_floating_point():
        tensor[draw(st.integers(0, size - 1))] = draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    elif change == "longer":
        tensor = torch.cat([tensor, tensor[:1]])
    elif change == "shorter":
        tensor = tensor[1:]
    return tensor


@st.composite
def boundaries(draw: st.DrawFn, size: int) -> object:
    """Draw ``cu_seqlens`` that are right half of the time, and wrong in some way if not."""
    inner = sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=3)) - {size})
    ends = [0, *inner, size] if size else [0]
    wrong = draw(st.sampled_from(["", "", "", "", "falls", "starts", "ends", "junk", "tensor"]))
    if wrong == "falls":
        ends = draw(st.permutations([*ends, *ends[-1:]]))
    elif wrong == "starts":
        ends = [draw(st.integers(-2, 3)), *ends[1:]]
    elif wrong == "ends":
        ends = [*ends[:-1], size + draw(st.integers(-3, 3))]
    elif wrong == "junk":
        return draw(junk)
    elif wrong == "tensor":
        return draw(tensors(size))
    return torch.tensor(ends, dtype=draw(st.sampled_from([torch.int64, torch.int32])))


@st.composite
def parts(draw: st.DrawFn) -> dict[str, object]:
    """Draw the three arguments of a ``Batch``."""
    size = draw(st.integers(0, 6))
    good_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size).map(
        lambda ids: torch.tensor(ids, dtype=torch.int64)
    )
    names = st.one_of(st.sampled_from(["loss_weight", "advantages", "mask", "input_ids"]), scalars)
    fields = st.dictionaries(names, st.one_of(tensors(size), tensors(size), junk), max_size=2)
    return {
        "input_ids": draw(st.one_of(good_ids, good_ids, good_ids, tensors(size), junk)),
        "cu_seqlens": draw(boundaries(size)),
        "fields": draw(st.one_of(fields, fields, fields, junk)),
    }


def assert_promises(batch: Batch) -> None:
    """Check the promises of ``Batch``'s docstring, and all operations that engines use."""
    assert batch.input_ids.dtype == torch.int64
    assert batch.boundaries[0] == 0
    assert batch.boundaries[-1] == batch.num_tokens
    assert all(length > 0 for length in batch.lengths)
    for value in batch.fields.values():
        assert tuple(value.shape) == (batch.num_tokens,)
        assert not value.is_floating_point() or bool(value.isfinite().all())
    if "loss_weight" in batch.fields:
        firsts = [batch.boundaries[i] for i in range(batch.num_documents)]
        assert bool((batch.loss_weight >= 0).all())
        assert not batch.loss_weight[firsts].any()
    backwards = list(reversed(range(batch.num_documents)))
    assert batch.select(backwards).select(backwards).input_ids.tolist() == batch.input_ids.tolist()
    assert Batch.concat([batch, batch]).num_tokens == 2 * batch.num_tokens
    assert pickle.loads(pickle.dumps(batch)).boundaries == batch.boundaries
    assert batch.to("cpu").lengths == batch.lengths


def outcome(make) -> Batch | BatchError:
    """Return the batch or the error that refuses it.

    Any other exception fails the test.
    """
    try:
        return make()
    except BatchError as error:
        return error


def made_or_refused(make) -> Batch | None:
    made = outcome(make)
    if isinstance(made, BatchError):
        assert made.field
        assert f"batch.{made.field}" in str(made)
        return None
    assert_promises(made)
    return made


@fuzz()
@given(parts())
@example(
    {
        "input_ids": torch.tensor([1, 2]),
        "cu_seqlens": torch.tensor([0, 2]),
        "fields": {"input_ids": torch.ones(2)},
    }
)
@example({"input_ids": torch.tensor([1, 2]), "cu_seqlens": torch.tensor([0, 2]), "fields": None})
def test_a_batch_keeps_its_promises_or_is_refused_by_field(given_parts):
    batch = made_or_refused(lambda: Batch(**given_parts))
    if batch is not None:
        outside = [
            i for i, token in enumerate(batch.input_ids.tolist()) if not 0 <= token < VOCABULARY
        ]
        refused = outcome(lambda: batch.check_vocabulary(VOCABULARY))
        assert getattr(refused, "index", None) == (outside[0] if outside else None)


@st.composite
def documents(draw: st.DrawFn) -> object:
    """Draw arguments of ``Batch.pack``: mappings of columns, mostly of the same length."""
    names = draw(
        st.sampled_from([["input_ids"], ["input_ids", "loss_weight"], ["input_ids", "x"], ["x"]])
    )
    rows: list[object] = []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 4))
        ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size)
        numbers = st.lists(st.floats(0, 1), min_size=size, max_size=size)
        arrays = st.one_of(
            ids.map(np.array),
            numbers.map(np.array),
            ids.map(lambda v: np.array(v, dtype=np.int32)[::-1]),
        )
        odd = st.one_of(
            st.lists(scalars, min_size=size, max_size=size), arrays, tensors(size), junk
        )
        row = {
            name: draw(st.one_of(ids if name == "input_ids" else numbers, odd)) for name in names
        }
        rows.append(draw(st.one_of(st.just(row), st.just(row), st.just(row), junk)))
    return draw(st.one_of(st.just(rows), st.just(rows), st.just(rows), junk))


@pytest.mark.slow
@fuzz()
@given(documents())
@example([{"input_ids": [1.5, 2.0]}])
@example([{"input_ids": [True, False]}])
@example([{"input_ids": [1]}, {"input_ids": torch.tensor([True])}])
@example([{"input_ids": "12"}])
@example([{"input_ids": np.array([1.5])}])
@example(None)
def test_what_is_packed_is_what_was_given(rows):
    batch = made_or_refused(lambda: Batch.pack(rows))
    if batch is None:
        return
    ids = [int(i) for row in rows for i in row["input_ids"]]
    assert batch.input_ids.tolist() == ids, "an id is never rounded"
    assert not any(isinstance(i, bool | float) for row in rows for i in row["input_ids"])


@fuzz()
@given(st.lists(st.one_of(st.integers(-4, 4), scalars), max_size=3))
def test_only_documents_that_are_there_are_selected(chosen):
    batch = Batch.pack([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    picked = made_or_refused(lambda: batch.select(chosen))
    if picked is not None:
        assert picked.lengths == [(2, 1)[i] for i in chosen]


@pytest.mark.parametrize("device", ["abacus", "meta", 3.5, None])
def test_a_batch_moves_to_a_device_that_holds_values_only(device):
    with pytest.raises(BatchError, match=r"batch\.device"):
        Batch.pack([{"input_ids": [1, 2]}]).to(device)
