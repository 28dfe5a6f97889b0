"""FP8 in matrix products: which layers, what stays as it is, and models that are refused by name.

Tests that need torchao emulate its products on the CPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import float8_peers
import pytest
import torch
from compiling import ignore_reads_of_compile
from float8_peers import make_batch, run
from tiny_models import tiny_model
from torch import Tensor, nn
from torchao_marks import needs_torchao
from transformers import GPT2Config, GPT2LMHeadModel

import engine_torch.float8
from engine_api import (
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_fsdp.plugin import PLUGIN
from engine_torch import float8_layers as float8
from engine_torch.model import blocks_of

RECIPES = ("rowwise", "tensorwise")
PEERS = Path(float8_peers.__file__)
RANKS = 2

# e4m3 has three bits of a fraction: rounding is off by at most 2^-4 of a number and by about 0.026
# of it on average. A product of two rounded factors is off by 0.037, and fourteen of them in two
# blocks by 0.14 where they do not cancel. The gradient has as many again, some of them in e5m2,
# which is twice as coarse. bfloat16, with seven bits, is off by a sixteenth of that.
NEAR = 0.25
NEAR_GRADIENT = 0.5
FAR_FROM_BFLOAT16 = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_checkpoint(tmp_path_factory.mktemp("float8") / "model", TinyModel()))


def make(
    folder: Path,
    compute: str = "float8",
    recipe: str = "rowwise",
    device: str = "cpu",
    **config: Any,
) -> Any:
    options = {"float8_recipe": recipe, "float8_emulate": True}
    settings: dict[str, Any] = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "precision": Precision(compute=compute),
        "options": options,
    }
    engine = EngineRegistry.create(
        backend="fsdp2",
        device=device,
        config=EngineConfig(model=ModelSource(path=str(folder)), **(settings | config)),
    )
    engine.initialize()
    return engine


def log_probs(engine: Any) -> Tensor:
    found: Tensor = engine.infer_batch(make_batch()).log_probs
    return found


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the gradient of each weight, which a step of SGD at a rate of 1 subtracts."""
    before = weights(engine)
    engine.train_batch(make_batch(), sft_loss)
    return {name: before[name] - after for name, after in weights(engine).items()}


PLAIN = {"optimizer": OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)}


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Log-probs and gradients in float32 and bfloat16."""
    found = {}
    for compute in ("float32", "bfloat16"):
        engine = make(folder, compute, **PLAIN)
        found[compute] = log_probs(engine), gradients(engine)
        engine.close()
    return found


def apart(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / (want - want.mean()).norm())


# --- with torchao ------------------------------------------------------------------------------


@needs_torchao
def test_the_engine_declares_fp8_with_the_tested_torchao() -> None:
    assert "fp8" in PLUGIN.capabilities


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_and_gradients_are_near_float32_and_coarser_than_bfloat16(
    folder: Path, measured: dict[str, tuple[Tensor, dict[str, Tensor]]], recipe: str
) -> None:
    engine = make(folder, recipe=recipe, **PLAIN)
    found = log_probs(engine)
    steps = gradients(engine)
    engine.close()
    want, exact = measured["float32"]
    rounded, half = measured["bfloat16"]
    assert FAR_FROM_BFLOAT16 * apart(rounded, want) < apart(found, want) < NEAR
    for name, gradient in exact.items():
        assert float((steps[name] - gradient).norm() / gradient.norm()) < NEAR_GRADIENT, name
        if "proj" in name:
            coarser = (steps[name] - gradient).norm() / (half[name] - gradient).norm()
            assert coarser > FAR_FROM_BFLOAT16, name


@needs_torchao
def test_a_layers_products_are_those_of_rows_that_were_rounded_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 32, bias=False))
    weight = block[0].weight.detach().clone()
    float8.quantize_blocks([block], "rowwise", ranks=1, gather=False, emulate=True)
    x = torch.randn(16, 64, generator=generator)
    want = _round_rows(x) @ _round_rows(weight).t()
    assert float((block(x).detach().double() - want).abs().max()) < 1e-4


def _round_rows(rows: Tensor) -> Tensor:
    """Return rows rounded to e4m3, each with a scale that is a power of two."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = torch.exp2(torch.floor(torch.log2(largest / rows.abs().amax(1, keepdim=True).double())))
    return (rows * scale.float()).to(torch.float8_e4m3fn).double() / scale


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_linear_layers_of_the_blocks_compute_in_float8_and_no_others(
    folder: Path, recipe: str
) -> None:
    from torchao.float8.float8_linear import Float8Linear

    engine = make(folder, recipe=recipe)
    lm = engine.module.lm
    inside = {module for block in engine._blocks for module in block.modules()}
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, Float8Linear) == (module in inside), name
    assert not isinstance(lm.lm_head, Float8Linear)
    assert engine.resolved()["precision.compute"] == "float8"
    engine.close()


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_and_exports_are_plain_float32_under_the_same_names(
    folder: Path, recipe: str
) -> None:
    engine = make(folder, recipe=recipe)
    plain = make(folder, "bfloat16")
    before, want = weights(engine), weights(plain)
    assert list(before) == list(want)
    assert all(torch.equal(before[name], want[name]) for name in want)
    # An update of 1e-5 would be lost in bfloat16, and in FP8.
    engine.forward_backward(make_batch(), sft_loss)
    engine.optimizer_step()
    after = weights(engine)
    for name, tensor in after.items():
        assert type(tensor) is Tensor
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, before[name]), name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name
    for tensor, _ in engine.state_shards().values():
        assert type(tensor) is Tensor
    engine.close()
    plain.close()


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_goes_to_an_engine_in_bfloat16_and_back(
    folder: Path, tmp_path: Path, recipe: str
) -> None:
    first = make(folder, recipe=recipe)
    first.train_batch(make_batch(), sft_loss)
    first.save_checkpoint(tmp_path / "one").result()
    second = make(folder, "bfloat16")
    second.load_checkpoint(tmp_path / "one")
    want = weights(first)
    assert all(torch.equal(tensor, want[name]) for name, tensor in weights(second).items())
    # Weights that have grown: a scale of the former ones would cut them off.
    with torch.no_grad():
        for entry in second.table:
            entry.local.mul_(4.0)
    second.save_checkpoint(tmp_path / "two").result()
    first.load_checkpoint(tmp_path / "two")
    other = make(folder, recipe=recipe)
    other.load_checkpoint(tmp_path / "two")
    assert torch.equal(log_probs(first), log_probs(other))
    for engine in (first, second, other):
        engine.close()


@needs_torchao
def test_a_step_of_the_optimizer_changes_the_scales_that_weights_are_gathered_with(
    folder: Path, tmp_path: Path
) -> None:
    first = make(folder, recipe="tensorwise")
    for _ in range(2):
        first.train_batch(make_batch(), sft_loss)
    first.save_checkpoint(tmp_path / "one").result()
    fresh = make(folder, recipe="tensorwise")
    fresh.load_checkpoint(tmp_path / "one")
    assert torch.equal(log_probs(first), log_probs(fresh))
    first.close()
    fresh.close()


@needs_torchao
def test_weights_that_have_moved_are_gathered_with_their_own_scales(folder: Path) -> None:
    engine = make(folder, recipe="tensorwise")
    engine.train_batch(make_batch(), sft_loss)
    want = log_probs(engine)
    # What a move between devices does with each parameter.
    engine.module._apply(torch.clone)
    engine.to("cpu")
    assert torch.equal(log_probs(engine), want)
    engine.close()


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_activations_give_the_same_gradients(folder: Path, recipe: str) -> None:
    found = []
    for recompute in ("none", "full"):
        memory = Memory(recompute=recompute)
        engine = make(folder, recipe=recipe, memory=memory, **PLAIN)
        found.append(gradients(engine))
        engine.close()
    assert all(torch.equal(found[1][name], want) for name, want in found[0].items())


@needs_torchao
@ignore_reads_of_compile
def test_activations_that_compiled_blocks_keep_change_no_gradient(folder: Path) -> None:
    """Scales by row round between operators, so that even bits are the same."""
    found = []
    for recompute, kept in (("none", 0.0), ("full", 0.0), ("full", 0.3)):
        memory = Memory(recompute=recompute, compile=True)
        options = {"float8_emulate": True, "kept_activations": kept}
        engine = make(folder, options=options, memory=memory, **PLAIN)
        found.append(gradients(engine))
        engine.close()
    for one in found[1:]:
        assert all(torch.equal(one[name], want) for name, want in found[0].items())


@needs_torchao
def test_scales_by_row_make_a_document_independent_of_those_beside_it(folder: Path) -> None:
    engine = make(folder)
    want = log_probs(engine)
    batch = make_batch()
    first = batch.lengths[0]
    ids = batch.input_ids.clone()
    # Other tokens, whose activations are larger or smaller.
    ids[first:] = ids[first:].flip(0)
    found = engine.infer_batch(replace(batch, input_ids=ids)).log_probs
    assert torch.equal(found[:first], want[:first])
    assert not torch.equal(found[first:], want[first:])
    engine.close()


@needs_torchao
@pytest.mark.parametrize("memory", [{"offload_params": True}, {}], ids=["on the host", "one dtype"])
def test_weights_that_cannot_be_gathered_in_float8_are_cast_where_they_are_used(
    folder: Path, memory: dict[str, Any]
) -> None:
    half = {"master": "bfloat16", "reduce": "bfloat16"} if not memory else {}
    engine = make(
        folder,
        recipe="tensorwise",
        memory=Memory(**memory),
        precision=Precision(compute="float8", **half),
    )
    assert engine._scales is None
    before = log_probs(engine)
    engine.train_batch(make_batch(), sft_loss)
    assert not torch.equal(log_probs(engine), before)
    engine.close()


@needs_torchao
def test_a_weight_whose_rows_the_ranks_do_not_divide_is_gathered_in_bfloat16() -> None:
    block = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
    float8.quantize_blocks([block], "tensorwise", ranks=3, gather=True, emulate=True)
    assert [hasattr(layer.weight, "fsdp_pre_all_gather") for layer in block] == [True, False]


@needs_torchao
def test_the_check_at_the_start_sees_a_wrong_computation_in_bfloat16(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def verify(engine: Any, *_: Any, **__: Any) -> None:
        batch = make_batch()
        outputs = engine.forward_step(batch, needs=("log_probs",), temperature=1.0)
        seen.append(outputs.log_probs.detach())

    monkeypatch.setattr("engine_fsdp.engine.verify_model", verify)
    engine = make(folder)
    plain = make(folder, "bfloat16")
    assert torch.equal(*seen)
    assert not torch.equal(log_probs(engine), log_probs(plain))
    engine.close()
    plain.close()


@needs_torchao
def test_without_compilation_a_warning_says_that_float8_is_slow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_torch.engine.check_float8", lambda *_, **__: None)
    # Building casts nothing: the products are those of a device with FP8.
    with caplog.at_level(logging.WARNING, "engine_fsdp"):
        make(folder, options={"verify_model": False}).close()
    assert "set memory.compile: true" in caplog.text


@ignore_reads_of_compile
def test_only_the_compiler_may_ask_an_activation_for_its_gradient() -> None:
    layer = nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="eager")
    activation = torch.ones(2, 4, requires_grad=True) * 2.0
    assert torch.equal(compiled(activation), layer(activation))
    with pytest.raises(UserWarning, match="not a leaf"):
        _ = activation.grad


@needs_torchao
@ignore_reads_of_compile
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_on_a_gpu_are_near_those_in_float32(
    folder: Path,
    measured: dict[str, tuple[Tensor, dict[str, Tensor]]],
    recipe: str,
    compiled: bool,
) -> None:
    options = {"float8_recipe": recipe}
    engine = make(folder, device="cuda", options=options, memory=Memory(compile=compiled), **PLAIN)
    found = log_probs(engine)
    engine.to("cpu")
    engine.to("cuda")
    assert torch.equal(log_probs(engine), found)
    steps = gradients(engine)
    engine.close()
    want, exact = measured["float32"]
    assert apart(found.cpu(), want) < NEAR
    for name, gradient in exact.items():
        assert float((steps[name].cpu() - gradient).norm() / gradient.norm()) < NEAR_GRADIENT, name


@needs_torchao
@pytest.mark.distributed
def test_ranks_gather_what_one_rank_computes(folder: Path, tmp_path: Path) -> None:
    """A scale is that of a whole weight, on whatever ranks its rows are."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", str(PEERS), str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    want = run(str(folder), "tensorwise", "one")
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        for layout in ("shards", "replicas"):
            # Each rank computes the same documents, so the sum of two is divided by two.
            assert torch.equal(found[layout]["before"], want["before"]), layout
            assert found[layout]["loss"] == pytest.approx(want["loss"]), layout
            assert torch.equal(found[layout]["after"], want["after"]), layout
        assert apart(found["ulysses"]["before"], want["before"]) < NEAR
        for name, tensor in found["ulysses"]["weights"].items():
            assert torch.equal(
                tensor, torch.load(tmp_path / "rank-0.pt")["ulysses"]["weights"][name]
            )


# --- refusals ----------------------------------------------------------------------------------


def refuse(lm: Any, **config: Any) -> ConfigError:
    wanted = EngineConfig(model=ModelSource(path="any"), **config)
    with pytest.raises(ConfigError) as caught:
        float8.refuse_model(lm, blocks_of(lm), wanted)
    error = caught.value
    assert error.field == "precision.compute"
    assert "compute in bfloat16" in error.remedy
    return error


def test_dense_models_of_linear_layers_are_taken() -> None:
    wanted = EngineConfig(model=ModelSource(path="any"))
    for model_type in ("qwen3", "llama", "gemma3_text", "phi3"):
        lm = tiny_model(model_type)
        float8.refuse_model(lm, blocks_of(lm), wanted)


def test_adapters_are_refused_with_what_to_do() -> None:
    error = refuse(tiny_model("llama"), lora=LoraConfig(rank=2))
    assert error.what == "expected bfloat16 with lora, got float8"
    assert "train all weights" in error.remedy


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_refused(model_type: str) -> None:
    assert "for a model with experts" in refuse(tiny_model(model_type)).what


def test_layers_that_carry_a_state_are_refused_by_name() -> None:
    assert "model.layers.0.linear_attn" in refuse(tiny_model("qwen3_5_text")).what


def test_products_of_other_classes_are_refused_by_name() -> None:
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    assert "transformer.h.0.attn.c_attn, a Conv1D" in refuse(lm).what


def test_sides_that_float8_does_not_take_are_refused_by_layer() -> None:
    error = refuse(tiny_model("llama", intermediate_size=120))
    assert "model.layers.0.mlp.gate_proj" in error.what
    assert "120" in error.what


def test_without_the_tested_torchao_the_refusal_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "expected torchao 0.17.0, got 0.9.0, which is not tested"
    monkeypatch.setattr(engine_torch.float8, "find_torchao_problem", lambda: problem)
    with pytest.raises(UnsupportedCapability, match=r"got 0\.9\.0") as caught:
        make(folder)
    assert caught.value.capability == "fp8"
    assert "engine-fsdp[float8]" in caught.value.remedy


@needs_torchao
def test_a_cpu_is_refused_unless_products_are_emulated(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"on this device \(cpu\), got float8"):
        make(folder, options=None)
