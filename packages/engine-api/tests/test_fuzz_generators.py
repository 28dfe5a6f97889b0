"""Fuzz tests of the state of generators.

An arbitrary state is refused before anything changes, or restored.
"""

from __future__ import annotations

import base64
import json
import random

import numpy as np
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_api.errors import CheckpointCorrupt
from engine_api.generators import capture, check, restore, seed_all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value, at=()):
    """Yield the path of each value inside ``value``, of a long list only its ends."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    if isinstance(value, list):
        ends = {0, 1, len(value) - 2, len(value) - 1} & set(range(len(value)))
        for index in sorted(ends) if len(value) > 9 else range(len(value)):
            yield from places(value[index], (*at, index))


seed_all(0)
WHOLE = json.loads(json.dumps(capture("cpu")))
PATHS = list(places(WHOLE))


def refused_or_restored(state):
    before = capture("cpu")
    try:
        check(state, "cpu")
    except CheckpointCorrupt:
        assert capture("cpu") == before
        return
    assert capture("cpu") == before
    restore(state, "cpu")
    _ = random.gauss(0, 1), np.random.randn(700), torch.randn(700)  # noqa: NPY002 - none reads beside its memory
    seed_all(0)


@fuzz()
@given(path=st.sampled_from(PATHS), value=JSON)
def test_a_state_with_another_value_is_refused_before_anything_changes_or_restored(path, value):
    state = json.loads(json.dumps(WHOLE))
    if not path:
        refused_or_restored(value)
        return
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    refused_or_restored(state)


@fuzz()
@given(at=st.integers(0), byte=st.integers(0, 255))
def test_a_flipped_byte_of_torchs_state_is_refused_before_anything_changes_or_restored(at, byte):
    data = bytearray(base64.b64decode(WHOLE["torch"]))
    data[at % len(data)] = byte
    refused_or_restored(WHOLE | {"torch": base64.b64encode(data).decode()})
