"""Tests of a process's generators: seeding by seed and rank, capture, check, restoration."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from engine_api.errors import CheckpointCorrupt
from engine_api.generators import capture, check, restore, seed_all
from engine_api.torch_defaults import plain_defaults


def draws():
    """Return numbers of each generator that user code draws from.

    Normal numbers are among them, because the generators keep one of those for the next draw.
    """
    python = random.random(), random.gauss(0, 1)
    numpy = np.random.rand(), np.random.randn()  # noqa: NPY002 - the global one
    return *python, *numpy, float(torch.rand(())), float(torch.randn(()))


def test_tensors_are_of_torchs_own_defaults_inside_the_block_alone():
    def look():
        made = torch.zeros(2)
        return made.dtype, made.device.type

    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with plain_defaults():
            assert look() == (torch.float32, "cpu")
        with pytest.raises(ZeroDivisionError), plain_defaults():
            raise ZeroDivisionError
        assert look() == (torch.float64, "meta")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    with plain_defaults():
        assert look() == (torch.float32, "cpu")


def test_generators_come_back_as_they_were():
    # After this call the generators keep a normal number.
    draws()
    state = json.loads(json.dumps(capture("cpu")))
    before = draws()
    check(state, "cpu")
    restore(state, "cpu")
    assert draws() == before


def test_a_seed_and_a_rank_decide_every_generator():
    def drawn(seed, rank):
        seed_all(seed, rank=rank)
        return draws()

    assert drawn(3, 1) == drawn(3, 1)
    kinds = [drawn(seed, rank) for seed in (-1, 0, 1, 2**70) for rank in range(3)]
    for one_generator in zip(*kinds, strict=True):
        assert len(set(one_generator)) == len(kinds), (
            "another seed, or another rank, draws something else"
        )


def damaged(state, path, value):
    """Return a copy of ``state`` with ``value`` at ``path``.

    An empty path is the whole.
    """
    if not path:
        return value
    copy = dict(state) if isinstance(state, dict) else list(state)
    copy[path[0]] = damaged(copy[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ((), None, "expected a mapping"),
        (("python",), [3, [1, 2, 3], None], "'python'"),
        (("python", 2), "0.5", "kept normal number"),
        (("numpy", 2), 10**6, "position in 0 … 624"),
        (("numpy", 2), -1, "position in 0 … 624"),
        (("numpy", 1, 0), 0.5, "integers"),
        (("numpy", 3), 7, "0 or 1"),
        (("torch",), "AAAA", "'torch'"),
        (("torch",), "no base64!", "'torch'"),
    ],
)
def test_a_damaged_state_is_refused_by_the_name_of_its_generator(path, value, told):
    before = capture("cpu")
    with pytest.raises(CheckpointCorrupt, match=told) as caught:
        check(damaged(before, path, value), "cpu", where="step-1/rank-00000.json")
    assert caught.value.where == "step-1/rank-00000.json"
    assert capture("cpu") == before


def test_a_missing_generator_is_refused():
    for name in ("python", "numpy", "torch"):
        with pytest.raises(CheckpointCorrupt, match=f"{name}.*\n.*missing"):
            check({key: value for key, value in capture("cpu").items() if key != name}, "cpu")
