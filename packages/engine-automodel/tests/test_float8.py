"""FP8 in the products of the blocks: which layers, how near, and what is refused by name.

Tests that need torchao emulate its products on the CPU.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ignore_reads_of_compile
from float8_peers import make_batch
from torch import Tensor, nn
from torchao_marks import needs_torchao

import engine_torch.float8
from engine_api import (
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    sft_loss,
)
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_automodel.plugin import PLUGIN
from engine_conformance.fixtures import TinyModel, write_checkpoint

RECIPES = ("rowwise", "tensorwise")
# The bounds of engine-fsdp's tests, which say where they come from.
NEAR = 0.25
NEAR_GRADIENT = 0.5
FAR_FROM_BFLOAT16 = 3.0
# A compiled block rounds to bfloat16 elsewhere, and a number near the middle of two in FP8 then
# becomes the other one.
NEAR_COMPILED = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float8") / "model"
    return Path(write_checkpoint(path, TinyModel(family="qwen3")))


def create(folder: Path, compute: str = "float8", recipe: str = "rowwise", **config: Any) -> Any:
    settings: dict[str, Any] = {
        "backend": "automodel",
        "optimizer": OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None),
        "precision": Precision(compute=compute),
        "options": {"float8_recipe": recipe, "float8_emulate": True},
    } | config
    backend = settings.pop("backend")
    asked = EngineConfig(model=ModelSource(path=str(folder)), **settings)
    return EngineRegistry.create(backend=backend, device="cpu", config=asked)


def run(folder: Path, *arguments: Any, **config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs and the gradients, which a step of SGD at a rate of 1 subtracts."""
    engine = create(folder, *arguments, **config)
    engine.initialize()
    outputs = engine.infer_batch(make_batch()).log_probs
    before = {name: one.clone() for name, one in engine.get_per_tensor_param()}
    engine.train_batch(make_batch(), sft_loss)
    after = dict(engine.get_per_tensor_param())
    engine.close()
    return outputs, {name: one - after[name] for name, one in before.items()}


def apart(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / (want - want.mean()).norm())


@needs_torchao
def test_the_engine_declares_fp8_with_the_tested_torchao() -> None:
    assert "fp8" in PLUGIN.capabilities


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_and_gradients_are_near_float32_and_coarser_than_bfloat16(
    folder: Path, recipe: str
) -> None:
    found, theirs = (
        run(folder, "float8", recipe, backend=backend) for backend in ("automodel", "fsdp2")
    )
    exact = run(folder, "float32")
    rounded = run(folder, "bfloat16")
    coarse = FAR_FROM_BFLOAT16 * apart(rounded[0], exact[0])
    assert coarse < apart(found[0], exact[0]) < NEAR
    # Where two engines round to bfloat16 differently, rounding to FP8 may go the other way.
    assert apart(found[0], theirs[0]) < apart(exact[0], theirs[0])
    for name, gradient in exact[1].items():
        error = (found[1][name] - gradient).norm()
        assert float(error / gradient.norm()) < NEAR_GRADIENT, name
        if "proj" in name:
            assert float(error / (rounded[1][name] - gradient).norm()) > FAR_FROM_BFLOAT16, name


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_linear_layers_of_the_blocks_compute_in_float8_and_no_others(
    folder: Path, recipe: str
) -> None:
    from torchao.float8.float8_linear import Float8Linear

    engine = create(folder, "float8", recipe)
    engine.initialize()
    lm = engine.module.lm
    inside = set(lm.model.layers.modules())
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, Float8Linear) == (module in inside), name
    assert not isinstance(lm.lm_head, Float8Linear)
    assert engine.resolved()["precision.compute"] == "float8"
    assert all(one.dtype == torch.float32 for _, one in engine.get_per_tensor_param())
    engine.close()


@needs_torchao
def test_recomputed_activations_give_the_same_gradients(folder: Path) -> None:
    found, want = (run(folder, memory=Memory(recompute=one)) for one in ("full", "none"))
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], one) for name, one in want[1].items())


@needs_torchao
@pytest.mark.slow
@ignore_reads_of_compile
def test_compiled_blocks_compute_the_same_in_float8(folder: Path) -> None:
    # A CPU's compiler has no casts of rows.
    found, want = (
        run(folder, "float8", "tensorwise", memory=Memory(compile=one)) for one in (True, False)
    )
    assert apart(found[0], want[0]) < NEAR_COMPILED
    for name, gradient in want[1].items():
        assert apart(found[1][name], gradient) < NEAR_GRADIENT, name


@needs_torchao
def test_without_compilation_a_warning_says_that_float8_is_slow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_torch.engine.check_float8", lambda *_, **__: None)
    # Building casts nothing: the products are those of a device with FP8.
    engine = create(folder, options={})
    with caplog.at_level(logging.WARNING, "engine_torch"):
        engine.initialize()
    assert "set memory.compile: true" in caplog.text
    engine.close()


@needs_torchao
@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        ({}, {"parallelism": Parallelism(tp=2)}, "with parallelism.tp 2"),
        ({}, {"lora": LoraConfig(rank=2)}, "with lora"),
        ({"family": "qwen3_moe"}, {}, "for a model with experts"),
        ({"intermediate_size": 120}, {}, "model.layers.0.mlp.gate_proj of 64 x 120"),
    ],
    ids=["tp", "lora", "experts", "sides"],
)
def test_what_has_no_products_of_float8_is_refused_by_name(
    tmp_path: Path, model: dict[str, Any], config: dict[str, Any], named: str
) -> None:
    path = Path(write_checkpoint(tmp_path / "model", TinyModel(**({"family": "qwen3"} | model))))
    with pytest.raises(ConfigError) as caught:
        create(path, **config).initialize()
    assert caught.value.field == "precision.compute"
    assert named in caught.value.what
    assert "compute in bfloat16" in caught.value.remedy


@needs_torchao
def test_a_device_without_products_of_float8_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"on this device \(cpu\), got float8"):
        create(folder, options={})


def test_without_the_tested_torchao_float8_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_torch.float8, "find_torchao_problem", lambda: "not there")
    with pytest.raises(UnsupportedCapability, match=r"not there; torchao 0\.17\.0") as caught:
        create(Path("any"))
    assert "engine-automodel[core,float8]" in caught.value.remedy
