"""Tests of errors and configurations: errors survive pickling, configurations are checked early."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

import engine_api
from engine_api import (
    Capability,
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    ScheduleConfig,
    errors,
)
from engine_api.capabilities import REQUESTS, refuse_undeclared
from engine_api.config import build_options
from engine_api.errors import ConfigError, UnsupportedCapability

EVERY = [
    errors.EngineError("what", where="here", why="so", remedy="do"),
    errors.PluginNotFound("what"),
    errors.PluginUnavailable("what", trace=["a", "b"], remedy="do"),
    errors.ConfigError("a.b", "what"),
    errors.BatchError("field", "what", index=3),
    errors.UnsupportedCapability("tp", where="acme"),
    errors.EngineStateError("train_batch", "closed", "ready"),
    errors.CheckpointCorrupt("what", where="file"),
    errors.RankFailure({1: "one", 0: "zero"}),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_an_error_says_what_where_why_and_what_to_do():
    assert str(EVERY[0]) == "here: what\n  why: so\n  to do: do"
    assert str(errors.RankFailure({1: "one", 0: "zero"})).index("rank 0") < str(EVERY[-1]).index(
        "rank 1"
    )


def test_the_public_names_are_there():
    for name in engine_api.__all__:
        assert getattr(engine_api, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        _ = engine_api.no_such


def config(**parts):
    return EngineConfig(model=parts.pop("model", ModelSource(path="x")), **parts)


BAD = {
    "memory.max_tokens": {"memory": Memory(max_tokens=0)},
    "memory.logit_chunk": {"memory": Memory(logit_chunk=-1)},
    "memory.recompute": {"memory": Memory(recompute="some")},
    "memory.compile": {"memory": Memory(compile="auto")},
    "parallelism.tp": {"parallelism": Parallelism(tp=0)},
    "parallelism.dp_shard": {"parallelism": Parallelism(dp_shard=0)},
    "precision.compute": {"precision": Precision(compute="bf16")},
    "schedule.name": {"schedule": ScheduleConfig(name="cosin")},
    "schedule.total_steps": {"schedule": ScheduleConfig(name="linear")},
    "model.init": {"model": ModelSource(path="x", init="zeros")},
    "optimizer.lr": {"optimizer": OptimizerConfig(lr=float("nan"))},
    "optimizer.decay": {"optimizer": OptimizerConfig(decay="auto")},
    "lora.rank": {"lora": LoraConfig(rank=0)},
    "memory.share_prefixes": {"memory": Memory(share_prefixes=True), "router_replay": True},
}


@pytest.mark.parametrize(("field", "parts"), BAD.items(), ids=BAD.keys())
def test_a_bad_value_is_refused_by_name(field, parts):
    with pytest.raises(ConfigError) as caught:
        config(**parts)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("rates", "lr", "freeze", "told"),
    [
        ({"tower": 1e-6}, 1e-5, [], r"expected a rate of each of some parts \(vision\), got {'t"),
        ({1: 1e-6, "tower": 1e-6}, 1e-5, [], "expected a rate of each of some parts"),
        (["vision"], 1e-5, [], r"expected a rate of each of some parts \(vision\), got \['vision"),
        (None, 1e-5, [], r"expected a rate of each of some parts \(vision\), got None"),
        ({"vision": -1e-6}, 1e-5, [], "expected finite numbers of at least 0"),
        ({"vision": "1e-6"}, 1e-5, [], "expected finite numbers of at least 0"),
        ({"vision": float("inf")}, 1e-5, [], "expected finite numbers of at least 0"),
        ({"vision": 1e-6}, 0.0, [], "expected optimizer.lr above 0, got 0"),
        ({"vision": 1e-6}, 1e-5, ["vision"], r"expected parts that are trained, got \['vision'\]"),
    ],
)
def test_a_rate_that_a_part_may_not_have_is_refused(rates, lr, freeze, told):
    model = ModelSource(path="x", freeze=freeze)
    with pytest.raises(ConfigError, match=told) as caught:
        config(model=model, optimizer=OptimizerConfig(lr=lr, part_lr=rates))
    assert caught.value.field == "optimizer.part_lr"


def test_an_adapter_and_the_rate_of_a_tower_exclude_each_other():
    with pytest.raises(ConfigError, match="expected no rate of a part with lora") as caught:
        config(optimizer=OptimizerConfig(part_lr={"vision": 1e-6}), lora=LoraConfig())
    assert caught.value.field == "optimizer.part_lr"


@pytest.mark.parametrize("declared", [Capability.VISION, Capability.PARAMETER_GROUPS])
def test_a_rate_of_a_tower_asks_for_both(declared):
    asked = config(optimizer=OptimizerConfig(part_lr={"vision": 1e-6}))
    refuse_undeclared(asked, [Capability.VISION, Capability.PARAMETER_GROUPS], "acme")
    with pytest.raises(UnsupportedCapability):
        refuse_undeclared(asked, [declared], "acme")


ASKS = {
    Capability.HSDP: {"parallelism": Parallelism(dp_replicate=2)},
    Capability.TP: {"parallelism": Parallelism(tp=2)},
    Capability.PP: {"parallelism": Parallelism(pp=2)},
    Capability.CP: {"parallelism": Parallelism(cp=2)},
    Capability.EP: {"parallelism": Parallelism(ep=2)},
    Capability.ULYSSES: {"parallelism": Parallelism(ulysses=2)},
    Capability.LORA: {"lora": LoraConfig()},
    Capability.OFFLOAD: {"memory": Memory(offload_optimizer=True)},
    Capability.RECOMPUTE: {"memory": Memory(recompute="full")},
    Capability.COMPILE: {"memory": Memory(compile=True)},
    Capability.SHARED_PREFIXES: {"memory": Memory(share_prefixes=True)},
    Capability.BF16: {"precision": Precision(compute="bfloat16")},
    Capability.FP8: {"precision": Precision(compute="float8")},
    Capability.FP16: {"precision": Precision(reduce="float16")},
    Capability.ASYNC_CHECKPOINT: {"checkpoint": CheckpointConfig(async_save=True)},
    Capability.ROUTER_REPLAY: {"router_replay": True},
    Capability.VISION: {"model": ModelSource(path="x", freeze=["vision"])},
    Capability.PARAMETER_GROUPS: {"optimizer": OptimizerConfig(decay="matrices")},
}


def test_every_request_is_tried_here():
    assert set(ASKS) == set(REQUESTS)


@pytest.mark.parametrize(
    ("capability", "parts"), ASKS.items(), ids=lambda v: str(v) if isinstance(v, Capability) else ""
)
def test_what_is_not_declared_is_refused_by_name(capability, parts):
    refuse_undeclared(config(**parts), [capability], "acme")
    refuse_undeclared(config(), [], "acme")
    with pytest.raises(UnsupportedCapability, match="declares only: dp") as caught:
        refuse_undeclared(config(**parts), ["dp"], "acme")
    assert caught.value.capability == capability
    assert caught.value.where == "acme"


@dataclass(frozen=True, kw_only=True)
class Options:
    prefetch: int = 1


def test_options_of_a_plugin():
    assert build_options(None, Options) == Options()
    assert build_options({"prefetch": 2}, Options) == Options(prefetch=2)
    assert build_options(Options(prefetch=3), Options).prefetch == 3
    with pytest.raises(ConfigError, match="did you mean prefetch") as caught:
        build_options({"prefech": 2}, Options)
    assert caught.value.field == "options.prefech"
    with pytest.raises(ConfigError, match="expected a mapping or Options, got int"):
        build_options(3, Options)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"optimizer": engine_api.OptimizerConfig(clip_norm=-1.0)}, "optimizer.clip_norm"),
        ({"optimizer": engine_api.OptimizerConfig(clip_norm=0.0)}, "optimizer.clip_norm"),
        (
            {"optimizer": engine_api.OptimizerConfig(name="torch.optim.AdamW", betas=(0.9, 0.95))},
            "optimizer.betas",
        ),
        ({"optimizer": engine_api.OptimizerConfig(betas=(0.9, 1.0))}, "optimizer.betas"),
        ({"optimizer": engine_api.OptimizerConfig(betas=(-0.1, 0.999))}, "optimizer.betas"),
        ({"schedule": engine_api.ScheduleConfig(warmup_steps=-1)}, "schedule.warmup_steps"),
        ({"schedule": engine_api.ScheduleConfig(min_ratio=0.1)}, "schedule.min_ratio"),
        ({"lora": engine_api.LoraConfig(dropout=1.5)}, "lora.dropout"),
    ],
)
def test_values_that_would_be_ignored_or_do_harm_are_refused(part, field):
    with pytest.raises(ConfigError) as caught:
        engine_api.EngineConfig(model=engine_api.ModelSource(path="x"), **part)
    assert caught.value.field == field


def test_an_option_of_another_type_is_named():
    @dataclass
    class Options:
        seconds: int = 1
        check: bool = True

    for given in ({"seconds": "60"}, {"check": "no"}, {"seconds": True}):
        with pytest.raises(ConfigError, match="options"):
            build_options(given, Options)


@pytest.mark.parametrize("value", ["false", "auto", 0, 1.0])
def test_an_option_that_may_be_null_is_of_its_type_otherwise(value):
    @dataclass
    class Options:
        cast: bool | None = None

    for given in (None, True, False):
        assert build_options({"cast": given}, Options).cast is given
    with pytest.raises(ConfigError, match=r"expected a value of type bool or null, got") as caught:
        build_options({"cast": value}, Options)
    assert caught.value.field == "options.cast"


def test_an_option_of_two_types_accepts_both():
    @dataclass
    class Options:
        size: int | str | None = 1

    for given in (None, 3, "auto"):
        assert build_options({"size": given}, Options).size == given
    with pytest.raises(ConfigError, match="int or str or null"):
        build_options({"size": 1.5}, Options)
