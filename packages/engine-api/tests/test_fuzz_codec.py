"""Fuzz tests of the codec.

Decoding arbitrary bytes gives data or a ``CodecError``, and encoded values decode to equal ones.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_api.codec import MAGIC, CodecError, decode, encode, register


@register
@dataclass(frozen=True)
class Box:
    size: int
    inner: object = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative")


@register
class Pair(NamedTuple):
    left: object
    right: object


@register
class Colour(Enum):
    RED = "red"


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
]
keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()), st.none()
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=())),  # lone surrogates too
    st.binary(),
    st.sampled_from(
        [Colour.RED, Path("/a/b"), torch.float16, torch.Size([2, 3]), np.float32(0.1), np.int64(3)]
    ),
    st.lists(st.floats(), min_size=16),
    st.lists(st.integers(), min_size=16),
    st.builds(
        lambda d, s: torch.zeros(s, dtype=d),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    st.builds(np.arange, st.integers(0, 5)),
    st.sets(st.integers()),
    st.frozensets(st.text()),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.builds(Box, st.integers(0), inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            return (
                a.dtype == b.dtype
                and a.shape == b.shape
                and bytes(a.reshape(-1).view(torch.uint8).numpy())
                == bytes(b.reshape(-1).view(torch.uint8).numpy())
                if a.numel()
                else a.shape == b.shape and a.dtype == b.dtype
            )
        case np.ndarray():
            return a.dtype == b.dtype and np.array_equal(a, b)
        case float() | np.floating():
            return (math.isnan(a) and math.isnan(b)) or (
                a == b and math.copysign(1, a) == math.copysign(1, b)
            )
        case Box():
            return a.size == b.size and same(a.inner, b.inner)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case dict():
            return len(a) == len(b) and all(
                same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
            )
        case _:
            return a == b


@fuzz()
@given(values)
def test_a_value_comes_back_equal_and_of_its_type(value):
    assert same(decode(encode(value)), value)


@fuzz()
@given(st.one_of(st.binary(), st.binary().map(lambda tail: MAGIC + tail)))
def test_foreign_bytes_are_a_typed_error(message):
    with pytest.raises(CodecError):
        decode(message)


@pytest.mark.slow
@fuzz()
@given(values, st.data())
def test_a_damaged_message_is_a_typed_error_or_data(value, data):
    message = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode(message[: data.draw(st.integers(0, len(message)))])


TAGS = [
    "float",
    "floats",
    "ints",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "bytes",
    "path",
    "dtype",
    "size",
    "tensor",
    "array",
    "scalar",
    "class",
    "os.system",
    None,
    3,
]
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 99),
        st.text(max_size=9),
        st.sampled_from(["float32", "O", "<f4", "V8"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.fixed_dictionaries({"$": st.sampled_from(TAGS)}, optional=dict.fromkeys("vbcds", inner)),
    ),
    max_leaves=8,
)


@fuzz()
@given(plain, st.binary(max_size=32))
def test_json_that_nobody_encoded_is_a_typed_error_or_data(tree, tail):
    head = json.dumps(tree).encode()
    with contextlib.suppress(CodecError):
        decode(MAGIC + len(head).to_bytes(8, "little") + head + tail)
