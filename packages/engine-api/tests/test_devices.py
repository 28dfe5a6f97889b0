"""Copies of tensors to a device and back.

The meta device stands for one whose copies need pinned memory, and fake tensors for those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine_api.batch import Batch
from engine_api.devices import (
    SIMULATED_CUDA,
    Accelerator,
    device_of,
    move_tensor,
    register_device,
)


class Copies(TorchDispatchMode):
    """A record of copies: target, whether the source was pinned, and whether the copy waited."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.seen: list[tuple[str, bool, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            was_pinned = any(args[0] is one for one in self.pinned)
            waits = not given.get("non_blocking", False)
            self.seen.append((str(given["device"]), was_pinned, waits))
        return func(*args, **given)


@pytest.fixture
def copies(monkeypatch) -> Iterator[Copies]:
    """Record copies, and pin memory in name alone, because a build of torch for CPUs cannot."""
    with Copies() as recorded:

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            # As torch does: memory of the same strides, which is then written.
            copy = torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
            recorded.pinned.append(copy)
            return copy

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        yield recorded


class Pinning(Accelerator):
    name = "meta"


def test_a_copy_to_a_device_is_pinned_and_does_not_wait(copies, monkeypatch):
    monkeypatch.setattr("engine_api.devices._DEVICES", {})
    register_device(Pinning())
    assert move_tensor(torch.zeros(3), "meta").device.type == "meta"
    assert copies.seen == [("meta", True, False)]


@pytest.mark.parametrize("view", [lambda x: x[:1].expand(5), lambda x: x[::2]])
def test_a_view_whose_memory_cannot_be_pinned_is_copied_first(copies, monkeypatch, view):
    monkeypatch.setattr("engine_api.devices._DEVICES", {})
    register_device(Pinning())
    move_tensor(view(torch.zeros(6)), "meta")
    assert copies.seen == [("meta", True, False)]
    assert copies.pinned[0].is_contiguous()


def test_a_device_of_which_nothing_is_known_gets_plain_copies(copies):
    move_tensor(torch.zeros(3), "meta")
    assert copies.seen == [("meta", False, True)]


def test_a_tensor_stays_where_it_is(copies):
    given = torch.zeros(3)
    assert move_tensor(given, device_of("cpu").current()) is given
    assert not copies.seen


def test_a_batch_that_comes_to_the_host_is_there(copies):
    """Else torch copies in the background into memory that the caller reads at once."""
    batch = Batch.pack([{"input_ids": [1, 2, 3], "loss_weight": [0.0, 1.0, 1.0]}])
    assert batch.boundaries == (0, 3)
    with FakeTensorMode():
        for name in ("input_ids", "cu_seqlens"):
            object.__setattr__(batch, name, torch.zeros(3, device="cuda"))
        object.__setattr__(batch, "fields", {"loss_weight": torch.zeros(3, device="cuda")})
        batch.to("cpu")
    assert copies.seen == [("cpu", False, True)] * 3


def test_memory_of_the_host_that_stands_in_for_cuda_is_not_pinned(monkeypatch):
    assert device_of("cuda").pins_memory
    monkeypatch.setenv(SIMULATED_CUDA, "1")
    assert not device_of("cuda").pins_memory
