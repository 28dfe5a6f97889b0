"""Tests of an engine's defaults (refusals by call, plain hooks) and of optimizers by name."""

from __future__ import annotations

import pytest
import torch

from engine_api.config import OptimizerConfig
from engine_api.errors import (
    CheckpointMismatch,
    ConfigError,
    EngineStateError,
    UnsupportedCapability,
)
from engine_api.optimizers import (
    TrainedWeight,
    build_optimizer,
    check_fields,
    group_weights,
    set_rate,
    state_dtypes,
    state_fields,
)


@pytest.mark.parametrize(
    ("call", "capability"),
    [
        (lambda e: e.to("cpu"), "offload"),
        (lambda e: e.save_hf("folder"), "save-hf"),
        (lambda e: e.get_per_tensor_param_shard(), "export-shards"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(make_engine, call, capability):
    engine = make_engine()
    with pytest.raises(UnsupportedCapability) as caught:
        call(engine)
    assert caught.value.capability == capability
    assert caught.value.remedy
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        call(engine)


def test_a_declared_member_that_is_not_there_is_the_engines_error(make_engine):
    with pytest.raises(AssertionError, match="save-hf is declared"):
        make_engine(capabilities=["save-hf"]).save_hf("folder")


@pytest.mark.parametrize(
    ("config", "field", "told"),
    [
        ({"name": "torch.optim.NoSuch"}, "optimizer.name", "cannot be imported"),
        ({"name": "AdamW"}, "optimizer.name", "cannot be imported"),
        ({"name": "torch.nn.Linear"}, "optimizer.name", "not a torch optimizer"),
        ({"kwargs": {"no_such": 1}}, "optimizer.kwargs", "refuses its arguments"),
    ],
)
def test_an_optimizer_that_is_not_there_is_refused(config, field, told):
    with pytest.raises(ConfigError, match=told) as caught:
        build_optimizer(OptimizerConfig(**config), [torch.nn.Parameter(torch.zeros(2))])
    assert caught.value.field == field


def make_weights():
    shapes = {
        "embed.weight": (4, 2),
        "norm.weight": (2,),
        "q_proj.bias": (2,),
        "experts.down_proj_bias": (3, 2),
        "experts.down_proj": (3, 2, 2),
        "visual.merger.weight": (2, 2),
    }
    return [
        # A rank's range of a weight may be flat.
        TrainedWeight(
            tensor=torch.nn.Parameter(torch.ones(5)),
            name=name,
            dims=len(shape),
            part="vision" if name.startswith("visual.") else "",
        )
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("name", ["adamw", "torch.optim.SGD"])
def test_groups_say_what_decays_and_at_which_rate(name):
    config = OptimizerConfig(
        name=name, lr=0.5, weight_decay=0.1, decay="matrices", part_lr={"vision": 0.125}
    )
    weights = make_weights()
    optimizer = build_optimizer(config, group_weights(config, weights))
    set_rate(optimizer, 0.2)
    names = {id(one.tensor): one.name for one in weights}
    found = {
        names[id(tensor)]: (group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
        for tensor in group["params"]
    }
    assert found == {
        "embed.weight": (0.1, 0.2),
        "norm.weight": (0.0, 0.2),
        "q_proj.bias": (0.0, 0.2),
        "experts.down_proj_bias": (0.0, 0.2),
        "experts.down_proj": (0.1, 0.2),
        "visual.merger.weight": (0.1, 0.05),
    }
    assert len(optimizer.param_groups) == 3


def test_an_optimizer_of_no_weights_is_refused():
    config = OptimizerConfig()
    with pytest.raises(ConfigError, match="refuses its arguments"):
        build_optimizer(config, group_weights(config, []))


def test_without_either_option_there_is_one_group():
    config = OptimizerConfig(lr=0.5, weight_decay=0.1)
    optimizer = build_optimizer(config, group_weights(config, make_weights()))
    (group,) = optimizer.param_groups
    set_rate(optimizer, 0.2)
    assert (len(group["params"]), group["weight_decay"], group["lr"]) == (6, 0.1, 0.2)


def test_the_state_of_another_optimizer_is_refused():
    adamw = build_optimizer(OptimizerConfig(), [torch.nn.Parameter(torch.zeros(2))])
    assert state_fields(adamw) == {"exp_avg", "exp_avg_sq", "step"}
    assert not adamw.state, "the probe leaves nothing behind"
    check_fields(adamw, ["model.a", *(f"optim.a.{field}" for field in state_fields(adamw))])
    with pytest.raises(CheckpointMismatch, match="momentum_buffer"):
        check_fields(adamw, ["optim.a.momentum_buffer"])


def test_the_dtypes_of_state_follow_those_of_weights():
    adamw = build_optimizer(OptimizerConfig(), [torch.nn.Parameter(torch.zeros(2))])
    for dtype in (torch.float32, torch.bfloat16):
        assert state_dtypes(adamw, dtype) == {
            "exp_avg": dtype,
            "exp_avg_sq": dtype,
            "step": torch.float32,
        }
    assert not adamw.state, "the probe leaves nothing behind"


class _Counts(torch.optim.SGD):
    """An optimizer whose state holds a number that is not a tensor."""

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["count"] = 1


def test_state_that_is_no_tensor_cannot_be_loaded():
    with pytest.raises(CheckpointMismatch, match="count is not a tensor"):
        state_dtypes(_Counts([torch.nn.Parameter(torch.zeros(2))]), torch.float32)
