"""Tests of the codec: messages between processes are JSON and buffers, never a pickle."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine_api.codec import MAGIC, CodecError, decode, encode, register
from engine_api.manifest import Entry, Shard
from engine_api.weights import ShardSpec


class Runs:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    with pytest.raises(CodecError, match="not a message of this run"):
        decode(pickle.dumps(Runs(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        ({"a": [1, print]}, "value['a'][1]", "builtin_function_or_method"),
        (ValueError("x"), "value", "ValueError"),
        ([torch.zeros(2, device="meta")], "value[0]", "meta"),
        (torch.zeros(2).to_sparse(), "value", "sparse"),
        (bytearray(b"x"), "value", "bytearray"),
    ],
)
def test_what_has_no_form_is_refused_with_its_place(value, place, what):
    with pytest.raises(CodecError) as caught:
        encode(value)
    assert caught.value.what == f"{place} cannot be sent"
    assert what in caught.value.why


def test_a_value_that_contains_itself_is_refused():
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(CodecError, match="contains itself"):
        encode(ring)


@dataclass
class Stranger:
    x: int


def test_only_registered_classes_are_made():
    with pytest.raises(CodecError, match="Stranger"):
        encode(Stranger(1))
    head = b'{"$":"class","c":"os.system","v":"true"}'
    with pytest.raises(CodecError, match=r"os\.system"):
        decode(MAGIC + len(head).to_bytes(8, "little") + head)
    with pytest.raises(TypeError, match="not a dataclass"):
        register(Runs)


def test_a_checkpoint_entry_keeps_its_tuples():
    entry = Entry(
        dtype="float32", shape=(4, 2), shards=(Shard(file="a", offset=(0, 0), shape=(4, 2)),)
    )
    assert decode(encode({"model.x": entry})) == {"model.x": entry}
    box = ShardSpec(global_shape=(4,), offset=(2,), shape=(2,), replica=1)
    assert decode(encode([("x", box, torch.bfloat16)])) == [("x", box, torch.bfloat16)]


def test_a_tensor_with_a_gradient_arrives_without_it():
    found = decode(encode(torch.ones(3, requires_grad=True) * 2))
    assert torch.equal(found, torch.full((3,), 2.0))
    assert not found.requires_grad
