"""VeOmni's effects on its process: what its import changes, and the kernels that engines share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_api import Batch, EngineConfig, EngineRegistry, Memory, ModelSource
from engine_api.capabilities import Capability
from engine_api.errors import ConfigError
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_veomni import library
from engine_veomni.library import Hold
from engine_veomni.options import EAGER, KERNELS, VeOmniOptions

IMPORT = """
import logging, os
import transformers.integrations.hub_kernels as hub
from transformers.loss.loss_utils import LOSS_MAPPING

environment = dict(os.environ)
loader = hub.load_and_register_attn_kernel
methods = dict(vars(logging.Logger))
losses = dict(LOSS_MAPPING)

from engine_veomni import library

for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"):
    assert library.find_class(family, "ForCausalLM").__name__.endswith("ForCausalLM")
assert hub.load_and_register_attn_kernel is loader
assert {n: vars(logging.Logger)[n] for n in methods} == methods
assert dict(LOSS_MAPPING) == losses
assert dict(os.environ) == environment
assert not logging.getLogger("veomni").handlers
assert logging.getLogger("veomni").propagate

from veomni.distributed.parallel_state import is_parallel_state_initialized
from veomni.ops.config.singleton import get_ops_config

assert not is_parallel_state_initialized()
assert get_ops_config() is None
"""
# Packages that VeOmni asks for and that neither its text models nor this engine import.
UNUSED = ("blobfile", "datasets", "tiktoken", "timm", "torchdata", "torchvision", "wandb")
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({UNUSED!r})
{IMPORT}
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [IMPORT, WITHOUT], ids=["alone", "without its readers of data"])
def test_its_import_prints_nothing_and_changes_no_other_library(code: str) -> None:
    # A variable that VeOmni's own environment may set.
    environment = {k: v for k, v in os.environ.items() if k != "VEOMNI_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", TinyModel(family="qwen3"))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give VeOmni's registry a kernel of RMSNorm that runs on a CPU, and list its calls."""
    library.list_families()
    from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

    calls: list[str] = []

    def compute(hidden: Any, weight: Any, epsilon: float) -> Any:
        calls.append("rms_norm")
        variance = hidden.float().pow(2).mean(-1, keepdim=True)
        return weight * (hidden * (variance + epsilon).rsqrt())

    spec = KernelSpec(
        name="for_tests",
        op_name="rms_norm",
        variant="standard",
        factory=lambda: compute,
        hardware=HardwareRequirement(device_type="any"),
    )
    bucket = KERNEL_REGISTRY._specs[("rms_norm", "standard")]
    monkeypatch.setitem(bucket, spec.name, spec)
    yield calls
    assert Hold._count == 0


def create(folder: Path, **options: Any) -> Any:
    config = EngineConfig(model=ModelSource(path=str(folder)), options=options)
    return EngineRegistry.create(backend="veomni", device="cpu", config=config)


def infer(engine: Any) -> Any:
    return engine.infer_batch(Batch.pack([{"input_ids": [5, 6, 7]}])).log_probs


def test_a_chosen_kernel_computes_until_the_last_engine_is_closed(
    folder: Path, fused: list[str]
) -> None:
    engine, second = create(folder, rms_norm="for_tests"), create(folder, rms_norm="for_tests")
    engine.initialize()
    assert fused
    assert engine.resolved()["options.rms_norm"] == "for_tests"
    second.initialize()
    second.close()
    fused.clear()
    with_kernel = infer(engine)
    assert fused
    engine.close()

    fused.clear()
    plain = create(folder)
    plain.initialize()
    assert float((infer(plain) - with_kernel).abs().max()) < 1e-4
    assert not fused
    plain.close()


@pytest.mark.parametrize("kernel", ["liger_kernel", "npu"])
def test_a_chosen_kernel_excludes_compiled_blocks(folder: Path, kernel: str) -> None:
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        memory=Memory(compile=True),
        options={"swiglu_mlp": kernel},
    )
    with pytest.raises(ConfigError, match=f"false with options.swiglu_mlp {kernel}") as caught:
        EngineRegistry.create(backend="veomni", device="cpu", config=config)
    assert caught.value.field == "memory.compile"
    assert VeOmniOptions(swiglu_mlp=kernel).excluded == {Capability.COMPILE}
    assert not VeOmniOptions().excluded


def test_other_kernels_than_those_of_a_living_engine_are_refused(
    folder: Path, fused: list[str]
) -> None:
    engine, second = create(folder), create(folder, rms_norm="for_tests")
    engine.initialize()
    with pytest.raises(ConfigError, match="rms_norm eager") as caught:
        second.initialize()
    assert caught.value.field == "options"
    assert "close the other one first" in caught.value.remedy
    infer(engine)
    assert not fused
    engine.close()


@pytest.mark.parametrize("kernel", ["liger_kernel", "npu", "mistyped"])
@pytest.mark.parametrize("operator", KERNELS)
def test_a_kernel_that_cannot_run_here_is_refused_by_its_option(
    folder: Path, operator: str, kernel: str
) -> None:
    with pytest.raises(ConfigError, match=kernel) as caught:
        create(folder, **{operator: kernel}).initialize()
    assert caught.value.field == f"options.{operator}"
    assert caught.value.why
    # The engine that was not built holds nothing.
    assert Hold._count == 0
    engine = create(folder)
    engine.initialize()
    engine.close()


def test_a_kernel_for_a_family_without_a_choice_is_refused() -> None:
    cls = library.find_class("gemma3_text", "ForCausalLM")
    library.bind_kernels(cls, dict.fromkeys(KERNELS, EAGER))
    with pytest.raises(ConfigError, match="expected eager, got 'liger_kernel'"):
        library.bind_kernels(cls, {"rms_norm": "liger_kernel"})


def test_an_operator_without_an_option_is_computed_in_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another user of VeOmni in this process may have chosen a kernel for it."""
    cls = library.find_class("qwen3_moe", "ForCausalLM")
    slot = library._find_slots(sys.modules[cls.__module__])["moe_experts"]
    monkeypatch.setattr(slot, "_kernel", print)
    assert slot.use_non_eager_impl
    library.bind_kernels(cls, {})
    assert not slot.use_non_eager_impl
    assert slot.use_eager_impl


def test_a_family_whose_classes_need_another_package_names_it() -> None:
    # VeOmni's classes of this family have the kernel in them.
    with pytest.raises(ConfigError, match="seed_oss cannot be imported") as caught:
        library.find_class("seed_oss", "ForCausalLM")
    assert "pip install liger-kernel" in caught.value.remedy


def test_an_unchanged_variable_is_not_touched_when_the_environment_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads read it meanwhile, and a library may have set it for good."""
    before = os.environ.copy()
    monkeypatch.setenv("VEOMNI_TEST_ADDED", "1")
    monkeypatch.setenv("HOME", "/elsewhere")
    changed = list[str]()

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event in ("os.putenv", "os.unsetenv"):
            changed.append(os.fsdecode(arguments[0]))

    listening = [True]
    sys.addaudithook(listen)
    library._restore_environment(before)
    # An audit hook stays until the process ends.
    listening.clear()
    assert dict(os.environ) == dict(before)
    assert sorted(changed) == ["HOME", "VEOMNI_TEST_ADDED"]
