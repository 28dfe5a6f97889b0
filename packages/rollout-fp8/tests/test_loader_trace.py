"""Tests of the trace of a server's loader: what is followed, what is refused, what is kept."""

from __future__ import annotations

import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_parts import CPU, InProcess, stream_of

from engine_api.errors import RolloutError
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.install.session import SyncSession
from rollout_fp8.install.trace import LoaderTrace
from rollout_fp8.phases import Phases

Size = tuple[int, ...]


class Collects(torch.nn.Module):
    """Server that collects all tensors before it loads any, as vLLM's Granite with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.halves = torch.nn.Parameter(torch.zeros(2, 5), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights of the model."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name == "fused":
                found["upper"], found["lower"] = tensor.chunk(2)
            else:
                found[name] = tensor.t().contiguous() if name == "second" else tensor
        self.halves.data[1].copy_(found["upper"][0])
        self.halves.data[0].copy_(found["lower"][0])
        self.first.data.copy_(found["first"])
        self.second.data.copy_(found["second"])


def draw_weights() -> dict[str, torch.Tensor]:
    """Return random weights of the server."""
    return {"first": torch.randn(4, 6), "second": torch.randn(4, 3), "fused": torch.randn(2, 5)}


def test_a_loader_that_collects_all_tensors_first_is_followed() -> None:
    model: Any = Collects()
    session = SyncSession(InProcess([model]))
    for version in range(2):
        weights = draw_weights()
        assert session.run(stream_of(weights, fp8=False), version).audited
        assert torch.equal(model.first, weights["first"])
        assert torch.equal(model.second, weights["second"].t())
        assert torch.equal(model.halves, weights["fused"].flip(0))


def test_what_a_server_does_with_its_parameters_after_loading_is_not_followed() -> None:
    class Moves(Collects):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.first.data.copy_(self.first.data.flip(0))

    model: Any = Moves()
    weights = draw_weights()
    stream = stream_of(weights, fp8=False)
    with pytest.raises(RolloutError, match="the server rearranges weights after loading"):
        Receiver(model, stream.plan, model.load_weights)


def test_lists_may_be_changed_in_place_while_a_server_loads() -> None:
    class Clears(Collects):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            def come() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    torch._foreach_zero_([torch.ones(2), torch.ones(3)])
                    yield name, tensor

            super().load_weights(come())
            torch._foreach_zero_([torch.ones(2)])

    model: Any = Clears()
    weights = draw_weights()
    assert SyncSession(InProcess([model])).run(stream_of(weights, fp8=False), 0).audited


def test_a_list_with_a_tensor_that_came_is_refused() -> None:
    class Doubles(Collects):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            found = dict(weights)
            torch._foreach_mul_([found["first"], torch.ones(2)], 2.0)
            super().load_weights(iter(found.items()))

    model: Any = Doubles()
    weights = draw_weights()
    stream = stream_of(weights, fp8=False)
    with pytest.raises(RolloutError, match="cannot follow how the server loads first"):
        Receiver(model, stream.plan, model.load_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_of_a_parameter_is_computed_in_its_dtype(dtype: torch.dtype) -> None:
    class Decays(torch.nn.Module):
        """Server that computes in the parameter, as vLLM's Mamba 2 does."""

        def __init__(self) -> None:
            super().__init__()
            self.decay = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.decay.data.copy_(tensor)
                self.decay.data.copy_(-torch.exp(self.decay.data.float()))

    model: Any = Decays()
    session = SyncSession(InProcess([model]))
    for version in range(2):
        logarithm = torch.randn(6).to(dtype)
        session.run(stream_of({"log": logarithm.float()}, fp8=False, dtype=dtype), version)
        assert torch.equal(model.decay, -torch.exp(logarithm.float()))


class Rearranges(torch.nn.Module):
    """Server that copies what a function makes of each tensor."""

    def __init__(self, rearrange: Callable[[torch.Tensor], torch.Tensor], shape: Size) -> None:
        super().__init__()
        self.rearrange = rearrange
        self.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights of the model."""
        for _, tensor in weights:
            self.weight.data.copy_(self.rearrange(tensor))


def check_followed(rearrange: Callable[[torch.Tensor], torch.Tensor], shape: Size) -> None:
    """Compare what two syncs serve with what the loader makes of the tensors.

    An audit counts each element of a tensor once. A server of some of them has none.
    """
    made = rearrange(torch.zeros(shape))
    served: Any = Rearranges(rearrange, tuple(made.shape))
    session = SyncSession(InProcess([served]))
    for version in range(2):
        weight = torch.randn(shape)
        stream = stream_of({"weight": weight}, fp8=False)
        if made.numel() == math.prod(shape):
            assert session.run(stream, version).audited
        else:
            Receiver(served, stream.plan, served.load_weights).sync(stream, Phases(CPU))
        assert torch.equal(served.weight, rearrange(weight))


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda tensor: tensor.reshape(-1)[::2],
        lambda tensor: tensor.view(-1, 2)[:, 0],
        lambda tensor: tensor.reshape(-1)[1:6].clone().clone(),
    ],
    ids=["every second element", "first of pairs", "copies of elements of several rows"],
)
def test_a_view_that_is_not_cut_along_axes_is_refused_by_its_strides(rearrange: Any) -> None:
    model: Any = Rearranges(rearrange, tuple(rearrange(torch.zeros(4, 3)).shape))
    stream = stream_of({"weight": torch.randn(4, 3)}, fp8=False)
    with pytest.raises(RolloutError, match=r"cannot follow[^~]*a view .* with strides"):
        Receiver(model, stream.plan, model.load_weights)


@pytest.mark.parametrize(
    "rearrange",
    [
        # vLLM's GPT-NeoX puts the queries of all heads before their keys.
        lambda tensor: tensor.view(2, 3, 2, 5).transpose(0, 1).reshape(12, 5),
        lambda tensor: tensor.view(2, 3, 2, 5).transpose(0, 1).reshape(12, 5)[4:8],
        lambda tensor: tensor.view(2, 3, 2, 5).transpose(1, 2).reshape(12, 5).t(),
        lambda tensor: tensor[1::2],
        lambda tensor: tensor.view(3, 4, 5)[:, 1:3].reshape(6, 5)[2:4],
        lambda tensor: tensor.view(12, 1, 5).transpose(1, 2).contiguous().view(4, 15),
    ],
    ids=["heads", "one of three", "pairs, turned", "every second row", "parts", "other rows"],
)
def test_a_loader_that_reorders_parts_is_followed(rearrange: Any) -> None:
    check_followed(rearrange, (12, 5))


_STEPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "turn": lambda tensor, at: tensor.transpose(at % tensor.dim(), -1),
    "split": lambda tensor, at: tensor.unflatten(
        at % tensor.dim(), (-1, 2 if tensor.shape[at % tensor.dim()] % 2 == 0 else 1)
    ),
    "cut": lambda tensor, at: tensor.narrow(
        at % tensor.dim(), 0, (tensor.shape[at % tensor.dim()] + 1) // 2
    ),
    "flatten": lambda tensor, at: tensor.flatten(at % tensor.dim()),
    "every second": lambda tensor, at: tensor.transpose(at % tensor.dim(), 0)[::2],
    "every third": lambda tensor, at: tensor.transpose(at % tensor.dim(), 0)[1::3],
    "pairs": lambda tensor, at: tensor.reshape(-1, 2 if tensor.numel() % 2 == 0 else 1),
    "nothing": lambda tensor, at: tensor.narrow(0, 0, 0) if at == 3 else tensor,
    "copy": lambda tensor, at: tensor.contiguous(),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(_STEPS)), st.integers(0, 3)), max_size=6))
def test_whatever_a_loader_does_by_views_and_copies_is_followed_or_refused(
    steps: list[tuple[str, int]],
) -> None:
    def rearrange(tensor: torch.Tensor) -> torch.Tensor:
        for name, at in steps:
            tensor = _STEPS[name](tensor, at)
        return tensor

    try:
        check_followed(rearrange, (6, 4, 2))
    except RolloutError as error:
        # A view that cuts elements of several rows is refused.
        refused = str(error)
        empty = not rearrange(torch.zeros(6, 4, 2)).numel()
        if "cannot follow how the server loads weight" not in refused and not empty:
            raise


@pytest.mark.slow
def test_a_loader_that_reorders_single_rows_is_refused_by_what_was_done() -> None:
    def rearrange(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4)

    check_followed(rearrange, (2048, 4))
    model: Any = Rearranges(rearrange, (2052, 4))
    stream = stream_of({"weight": torch.randn(2052, 4)}, fp8=False)
    with pytest.raises(RolloutError) as caught:
        Receiver(model, stream.plan, model.load_weights)
    assert "cannot follow how the server loads weight" in str(caught.value)
    assert "a view [2052, 4] with strides (4, 1) of [2, 1026, 4]" in str(caught.value)
    assert "consists of more than 1024 boxes" in str(caught.value)


def test_a_trace_keeps_no_tensor_that_the_loader_does_not_keep() -> None:
    trace = LoaderTrace(dict)
    kept: list[weakref.ref[Any]] = []

    def come() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            tensor = torch.zeros(3)
            kept.append(weakref.ref(tensor.untyped_storage()))
            yield name, tensor
            del tensor
            gc.collect()

    with trace:
        deque(trace.watch(come()), maxlen=0)
    assert [one() for one in kept] == [None] * 3
