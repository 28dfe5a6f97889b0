"""The NPU as engines see it, with a fake torch_npu, and refusals of unsupported options."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_api import EngineConfig, Memory, ModelSource, OptimizerConfig
from engine_api.capabilities import Capability
from engine_api.devices import SIMULATED_NPU
from engine_api.errors import ConfigError, PluginLoadError, UnsupportedCapability
from engine_api.optimizers import build_optimizer
from engine_api.process_groups import ensure_process_group
from engine_api.registry import Resolution
from engine_megatron import te
from engine_npu.device import Npu, load
from engine_npu.engine import NPUFSDPEngineWithLMHead
from engine_npu.options import MindSpeedOptions, mindspeed_options
from engine_npu.plugin import FSDP, MEGATRON, MINDSPEED
from engine_torch.attention import choose_kernel


@pytest.fixture(autouse=True)
def _real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIMULATED_NPU, raising=False)


def test_a_process_that_made_no_engine_knows_it() -> None:
    """Such processes are a Ray worker that joins a group, and a server that receives weights."""
    code = """
import sys
from engine_api.devices import device_of
assert type(device_of("npu")).__module__ == "engine_npu.device"
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_npu_is_there_before_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(PluginLoadError, match="torch_npu could not be imported"):
        ensure_process_group("npu", timedelta(seconds=1))
    assert not dist.is_initialized()
    with pytest.raises(PluginLoadError, match="torch_npu could not be imported"):
        # In a process without a group. torch's own import of torch_npu may be turned off.
        Npu().current()


def test_its_room_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(current_device=lambda: 0, mem_get_info=lambda: (3, 8))
    monkeypatch.setattr(Npu, "module", fake)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    assert Npu().room() == ("5:0", 3)
    monkeypatch.setenv(SIMULATED_NPU, "1")
    name, free = Npu().room()
    assert name == ""
    assert free > 1 << 20


def test_collectives_are_hccl_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Npu().process_groups == "cpu:gloo,npu:hccl"
    monkeypatch.setenv(SIMULATED_NPU, "1")
    assert Npu().process_groups == "cpu:gloo,npu:gloo"
    simulated = Npu()
    assert simulated.attention("bfloat16") == ()
    assert not simulated.has_streams
    assert not simulated.pins_memory


@pytest.mark.parametrize(
    ("asked", "compute", "kernel"),
    [
        ("auto", "bfloat16", "npu_fusion"),
        ("auto", "float32", "sdpa"),
        ("sdpa", "bfloat16", "sdpa"),
        ("npu_fusion", "float16", "npu_fusion"),
    ],
)
def test_attention_is_chosen(asked: str, compute: str, kernel: str) -> None:
    assert choose_kernel(asked, "npu", compute) == kernel


@pytest.mark.parametrize(
    ("asked", "compute"),
    [("varlen", "bfloat16"), ("cudnn", "bfloat16"), ("npu_fusion", "float32"), ("fa3", "bfloat16")],
)
def test_attention_that_there_is_not_is_refused(asked: str, compute: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kernel(asked, "npu", compute)
    assert caught.value.field == "model.attention"
    assert "sdpa" in caught.value.remedy


def test_a_kernel_of_the_npu_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="npu_fusion"):
        choose_kernel("npu_fusion", "cpu", "bfloat16")


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    fake = SimpleNamespace(device_count=lambda: 2, set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    Npu().adopt_local_rank()
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="2 npu devices are visible") as caught:
        Npu().adopt_local_rank()
    assert "ASCEND_RT_VISIBLE_DEVICES" in caught.value.remedy


def test_the_generator_of_the_device_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_api.generators import capture, restore

    kept: list[torch.Tensor] = []
    fake = SimpleNamespace(
        get_rng_state=lambda: torch.arange(16, dtype=torch.uint8), set_rng_state=kept.append
    )
    monkeypatch.setattr(Npu, "module", fake)
    state = capture("npu")
    restore(state, "npu")
    assert kept[0].tolist() == list(range(16))
    assert "npu" not in capture("cpu")


def test_torch_npu_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(PluginLoadError, match="torch_npu could not be imported") as caught:
        load()
    assert "doctor" in caught.value.remedy


def test_the_group_of_a_weight_sync_is_hccl_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        class Options:
            _timeout = None

        def __init__(self, *given: Any) -> None:
            self.given = given

    module = ModuleType("torch_npu")
    vars(module)["_C"] = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=Group))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    store = object()
    timeout = timedelta(seconds=5)
    made = Npu().process_group(store, 1, 2, timeout)
    assert made.given[:3] == (store, 1, 2)
    assert made.given[3]._timeout == timeout


def test_adamw_is_fused() -> None:
    # torch_npu registers aten::_fused_adamw_.
    assert Npu().fused_optimizer
    weight = torch.nn.Parameter(torch.zeros(2))
    assert build_optimizer(OptimizerConfig(lr=1.0), [weight]).defaults["fused"]


def test_what_the_npu_path_lacks_is_refused() -> None:
    config = EngineConfig(model=ModelSource(path="nowhere"), memory=Memory(compile=True))
    resolution = Resolution(plugin=FSDP, row=FSDP.rows[0], device="npu", source="test", trace=())
    with pytest.raises(UnsupportedCapability, match="compile"):
        NPUFSDPEngineWithLMHead(config, resolution=resolution)


def test_capabilities_are_those_of_the_engines_it_derives_from() -> None:
    assert {Capability.ULYSSES, Capability.HSDP, Capability.LORA} <= FSDP.capabilities
    assert {Capability.CP, Capability.TP, Capability.PP, Capability.EP} <= MEGATRON.capabilities
    assert Capability.FP8 not in MEGATRON.capabilities | MINDSPEED.capabilities
    vision = {Capability.VISION, Capability.VIDEO}
    untested = {Capability.COMPILE, Capability.SHARED_PREFIXES} | vision
    assert not untested & FSDP.capabilities
    assert Capability.VALUE_HEAD in FSDP.capabilities & MEGATRON.capabilities
    # MindSpeed's own backend has no row for value models.
    assert Capability.VALUE_HEAD not in MINDSPEED.capabilities


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"optimization_level": 3}, "options.optimization_level"),
        ({"optimization_level": 1, "fused_moe_permute": True}, "options.fused_moe_permute"),
        ({"optimization_level": 0, "hccl_group_buffer": "dp:200"}, "options.hccl_group_buffer"),
        ({"fused_moe_permutation": True}, "options.fused_moe_permutation"),
        ({"spec": "fast"}, "options.spec"),
    ],
)
def test_options_of_mindspeed_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mindspeed_options(options)
    assert caught.value.field == field
    assert caught.value.remedy


def test_options_are_told_under_mindspeed_s_names() -> None:
    own = MindSpeedOptions(
        fused_moe_permute=True, hccl_group_buffer="dp:200", sequence_parallel=True
    )
    assert own.features()["use_fused_moe_token_permute_and_unpermute"]
    assert own.features()["moe_permute_fusion"]
    assert own.features()["hccl_group_buffer"] == "dp:200"
    assert own.megatron().sequence_parallel


def test_transformer_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="te, but it needs a CUDA device") as caught:
        te.choose_spec("te", EngineConfig(model=ModelSource(path="nowhere")), "npu")
    # The remedy is not to install Transformer Engine.
    assert caught.value.remedy == "spec: local"
