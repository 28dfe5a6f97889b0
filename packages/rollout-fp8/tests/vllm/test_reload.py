"""A reload in which a model copies into its parameters itself."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from engine_api.errors import RolloutError
from rollout_fp8.vllm.private import ReloadByCopies, name_loaders


class Layer(torch.nn.Module):
    """A layer with a parameter that a loader fills, and a parameter and a buffer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.copied = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.zeros(1))


def reload(model: Any, load: Any) -> None:
    """Let ``load`` fill a model while it is reloaded."""
    with torch.no_grad(), ReloadByCopies(model):
        layerwise.initialize_layerwise_reload(model)
        load(model)
        config: Any = SimpleNamespace(dtype=torch.float32)
        layerwise.finalize_layerwise_processing(model, config)


@pytest.fixture
def model() -> Any:
    made = torch.nn.Sequential(Layer())
    layerwise.record_metadata_for_reloading(made)
    return made


def test_copies_without_a_loader_are_in_the_parameters_afterwards(model: Any) -> None:
    def load(model: Any) -> None:
        layer = model[0]
        layer.loaded.weight_loader(layer.loaded, torch.arange(3.0))
        layer.copied.data.copy_(torch.arange(16.0).view(4, 4))
        layer.scale.copy_(torch.tensor([2.5]))

    before = model[0].copied
    for _ in range(2):
        reload(model, load)
        assert torch.equal(model[0].loaded, torch.arange(3.0))
        assert torch.equal(model[0].copied, torch.arange(16.0).view(4, 4))
        assert model[0].scale == 2.5
        assert model[0].copied.data_ptr() == before.data_ptr()


@pytest.mark.parametrize(
    "part", [lambda weight: weight.t(), lambda weight: weight[:2]], ids=["transposed", "rows"]
)
def test_a_copy_into_a_part_is_refused_by_name(model: Any, part: Any) -> None:
    def load(model: Any) -> None:
        target = part(model[0].copied.data)
        target.copy_(torch.ones(target.shape))

    with pytest.raises(RolloutError, match="Layer copies into a part of its copied"):
        reload(model, load)


def test_partial_functions_among_the_loaders_have_a_name(model: Any) -> None:
    model[0].loaded.weight_loader = functools.partial(default_weight_loader)
    layerwise.record_metadata_for_reloading(model)
    name_loaders(model)
    reload(model, lambda model: model[0].loaded.weight_loader(model[0].loaded, torch.ones(3)))
    assert torch.equal(model[0].loaded, torch.ones(3))
