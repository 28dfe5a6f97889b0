"""The choice of Transformer Engine's spec, its names and its order of tokens.

Transformer Engine itself is not needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mapping_models import layouts, parameters_of, shape_of

from engine_api import Batch, EngineConfig, ModelSource
from engine_api.config import Precision
from engine_api.errors import ConfigError
from engine_megatron import te
from engine_megatron.context import ContextShard, Scores, attend_chunks, token_order
from engine_megatron.layers import PackedAttention, build_packing, steady_longest
from engine_megatron.model import pack_inputs
from engine_megatron.options import MegatronOptions
from engine_megatron.parallel import Layout
from engine_megatron.shape import FAMILIES
from engine_megatron.weights import attach, weight_table

# --- the choice of the spec --------------------------------------------------------------------


def config(compute: Any = "bfloat16", attention: str = "auto", **precision: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelSource(path="", attention=attention),
        precision=Precision(compute=compute, **precision),
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed and CUDA real."""
    monkeypatch.setattr(te, "cuda_is_simulated", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: te.TESTED_VERSIONS[0])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("wanted", "compute", "device", "spec"),
    [
        ("auto", "bfloat16", "cuda", "te"),
        ("auto", "float32", "cuda", "local"),
        ("auto", "bfloat16", "cpu", "local"),
        ("auto", "float8", "cuda", "te"),
        ("te", "bfloat16", "cuda", "te"),
        ("local", "bfloat16", "cuda", "local"),
    ],
)
def test_the_spec_that_is_chosen(wanted: str, compute: str, device: str, spec: str) -> None:
    assert te.choose_spec(wanted, config(compute), device) == spec


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("wanted", "compute", "device", "field", "says"),
    [
        ("te", "float32", "cuda", "options.spec", "TF32"),
        ("te", "bfloat16", "cpu", "options.spec", "CUDA"),
        ("local", "float8", "cuda", "precision.compute", "local"),
        ("auto", "float8", "cpu", "precision.compute", "CUDA"),
    ],
)
def test_features_of_the_other_spec_are_refused(
    wanted: str, compute: str, device: str, field: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        te.choose_spec(wanted, config(compute), device)
    assert caught.value.field == field


@pytest.mark.usefixtures("here")
def test_sdpa_is_the_local_specs_attention() -> None:
    assert te.choose_spec("auto", config(attention="sdpa"), "cuda") == "local"
    for wanted, compute, field in (
        ("te", "bfloat16", "options.spec"),
        ("auto", "float8", "precision.compute"),
    ):
        with pytest.raises(ConfigError, match="sdpa") as caught:
            te.choose_spec(wanted, config(compute, attention="sdpa"), "cuda")
        assert caught.value.field == field


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_attention_kernels_chosen_by_the_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Megatron's ``language_module`` asserts it. The values that it wrote itself are accepted."""
    for each, value in zip(
        ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"), "010", strict=True
    ):
        monkeypatch.setenv(each, value)
    te.check_environment()
    monkeypatch.setenv(name, {"0": "1", "1": "0"}[os.environ[name]])
    with pytest.raises(ConfigError, match="unset it") as caught:
        te.check_environment()
    assert name in caught.value.field


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("chosen", ["", "CUDNN_HOME", "CUDNN_PATH"])
def test_transformer_engine_is_imported_with_torchs_cudnn_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str
) -> None:
    parts = tmp_path / "nvidia" / "cudnn" / "lib"
    parts.mkdir(parents=True)
    for name in ("adv", "graph", "ops"):
        (parts / f"libcudnn_{name}.so.9").touch()
    package = tmp_path / "transformer_engine.py"
    package.write_text("import os\nseen = os.environ['CUDNN_HOME']\n")
    loaded: list[str] = []
    monkeypatch.setattr(te.ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(chosen, "own")
    before = dict(os.environ)
    te.share_cudnn()
    assert os.environ == before
    imported: Any = sys.modules.pop("transformer_engine", None)
    if chosen:
        # Megatron imports it later.
        assert (imported, loaded) == (None, [])
    else:
        assert imported.seen == str(tmp_path / "nvidia" / "cudnn")
        assert loaded == ["libcudnn_graph.so.9", "libcudnn_ops.so.9", "libcudnn_adv.so.9"]


def test_absent_or_of_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(te, "cuda_is_simulated", lambda: False)
    assert not te.is_installed()
    assert te.choose_spec("auto", config(), "cuda") == "local"
    assert not caplog.records, "a package that was never installed needs no warning"
    with pytest.raises(ConfigError, match="not installed"):
        te.choose_spec("te", config(), "cuda")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")
    assert not te.is_installed()
    assert te.choose_spec("auto", config(), "cuda") == "local"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ConfigError, match=r"1\.0 is not tested"):
        te.choose_spec("te", config(), "cuda")


def test_an_unknown_spec_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean local"):
        MegatronOptions(spec="locl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "field"),
    [
        ({"compute": "float8", "master": "float8"}, "precision.master"),
        ({"compute": "float8"}, "precision.compute"),
    ],
)
def test_fp8_where_it_cannot_be(precision: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        te.check_fp8(config(**precision), {"hidden size": 64, "intermediate size": 24})
    assert caught.value.field == field


def test_fp8_on_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    support = (False, "compute capability 9.0 or higher")
    name = "transformer_engine.pytorch.quantization"
    for part in (name, "transformer_engine.pytorch", "transformer_engine"):
        monkeypatch.setitem(
            sys.modules, part, SimpleNamespace(check_fp8_block_scaling_support=lambda: support)
        )
    with pytest.raises(ConfigError, match=r"9\.0") as caught:
        te.check_fp8(config("float8"), {"hidden size": 64})
    assert caught.value.field == "precision.compute"
    support = (True, "")
    te.check_fp8(config("float8"), {"hidden size": 64})


# --- names -------------------------------------------------------------------------------------

# Parameters of a layer without biases, according to megatron/core/models/gpt/gpt_layer_specs.py and
# transformer_engine/pytorch/module.
_LAYER = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
)
_DENSE = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
_EXPERTS = (
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    *(f"mlp.experts.linear_fc{part}.weight{expert}" for part in (1, 2) for expert in range(4)),
)
_QK_NORM = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_FEED_FORWARD = ("mlp.linear_fc1", "mlp.linear_fc2")
_BIASES = tuple(f"{name}.bias" for name in ("self_attention.linear_proj", *_FEED_FORWARD))
TE_LAYERS = {
    "llama": (*_LAYER, *_DENSE, *_BIASES),
    "qwen2": (*_LAYER, "self_attention.linear_qkv.bias", *_DENSE),
    "qwen3": (*_LAYER, *_QK_NORM, *_DENSE),
    "qwen3_moe": (*_LAYER, *_QK_NORM, *_DENSE, *_EXPERTS),
}


@pytest.mark.parametrize("family", TE_LAYERS)
def test_every_parameter_of_the_te_spec_is_named(family: str) -> None:
    shape = replace(shape_of(family), spec="te")
    (layout,) = layouts(1, 1, 1)
    table = weight_table(shape, layout, 1, torch.float32)
    sparse = shape.mixture.sparse if shape.mixture else [False] * shape.layers
    want = {
        f"decoder.layers.{layer}.{name}"
        for layer in range(shape.layers)
        for name in TE_LAYERS[family]
        if name not in (_DENSE if sparse[layer] else _EXPERTS)
    }
    want |= {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    names = {name for weight in table for found in weight.parameters.values() for name in found}
    # There is one chunk.
    assert names == {f"0.{name}" for name in want}
    attach(table, parameters_of(table, layout, shape, 1), layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_names_do_not_depend_on_the_spec(family: str) -> None:
    (layout,) = layouts(1, 1, 1)
    tables = [
        weight_table(replace(shape_of(family), spec=spec), layout, 1, torch.float32)
        for spec in ("local", "te")
    ]
    local, other = (
        [(weight.name, weight.shape, weight.cut, weight.box) for weight in table]
        for table in tables
    )
    assert local == other


# --- context parallelism -----------------------------------------------------------------------


def test_the_order_of_tokens() -> None:
    """Rank r has chunks r and 2n-1-r of each document, as ``attn_forward_func_with_cp`` says."""
    assert token_order([8, 4], 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert token_order([3, 2], 1).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_come_back_in_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_megatron.model.context_group", lambda: None)
    batch = Batch.pack(
        [{"input_ids": list(range(i, i + n))} for i, n in ((10, 7), (20, 1), (30, 12), (50, 5))]
    )
    packed = [
        pack_inputs(
            batch,
            multiple=8 * ranks,
            layout=Layout(world=ranks, rank=rank, tensor=1, data=1, stages=1, context=ranks),
            device=torch.device("cpu"),
        )
        for rank in range(ranks)
    ]
    # The outputs of a model that returns the token that it is asked for.
    gathered = torch.cat([part.targets for part in packed])
    for part in packed:
        assert part.ids.shape == (1, len(gathered) // ranks)
        got = gathered[part.source].masked_fill(part.first, -1)
        assert torch.equal(got, batch.input_ids.masked_fill(part.first, -1))
        assert part.first.nonzero().squeeze(1).tolist() == [0, 7, 8, 20]


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_on_shards_is_attention_on_the_whole(ranks: int) -> None:
    """The gradient of keys and values is the sum over ranks."""
    torch.manual_seed(0)
    lengths = [2 * ranks, 8 * ranks]
    total = sum(lengths)
    whole = [
        (torch.randn(total, heads, 8, dtype=torch.float64) * 3).requires_grad_()
        for heads in (4, 2, 2)
    ]
    settings = {"kv_channels": 8, "softmax_type": "vanilla"}
    settings |= dict.fromkeys(("window_size", "window_attn_skip_freq"))
    attention = PackedAttention(type("Config", (), settings)())
    want = attention(*whole, packed_seq_params=build_packing(lengths, torch.device("cpu")))
    upstream = torch.randn_like(want)
    exact = torch.autograd.grad(want, whole, upstream)
    order = token_order(lengths, ranks)
    got = torch.empty_like(want)
    parts_of_grads: list[tuple[torch.Tensor, ...]] = []
    for rank, own in enumerate(order):
        shard = ContextShard(ranks=ranks, rank=rank, place=order.flatten().argsort(), group=None)
        query = whole[0][own].transpose(0, 1)
        keys, values = (x.transpose(0, 1).split(lengths, dim=1) for x in whole[1:])
        parts = zip(query.split([n // ranks for n in lengths], dim=1), keys, values, strict=True)
        out = (
            torch.cat([attend_chunks(*part, shard, Scores()) for part in parts], dim=1)
            .transpose(0, 1)
            .reshape(len(own), -1)
        )
        got[own] = out.detach()
        parts_of_grads.append(torch.autograd.grad(out, whole, upstream[own]))
    torch.testing.assert_close(got, want.detach(), atol=1e-12, rtol=0)
    for grads, true in zip(zip(*parts_of_grads, strict=True), exact, strict=True):
        torch.testing.assert_close(torch.stack(grads).sum(0), true, atol=1e-11, rtol=0)


def test_padded_ends_are_the_ends() -> None:
    """They are the same object, by which Transformer Engine knows that nothing is padded."""
    shard = ContextShard(ranks=2, rank=0, place=torch.arange(8), group=None)
    packing = build_packing([4, 4], torch.device("cpu"), shard)
    assert packing.cu_seqlens_q_padded is packing.cu_seqlens_q
    assert packing.cu_seqlens_kv_padded is packing.cu_seqlens_kv


@pytest.mark.parametrize(
    ("lengths", "step", "want"), [([3], 1, 64), ([64, 2], 1, 64), ([65], 1, 128), ([100], 6, 192)]
)
def test_a_steady_longest_length(lengths: list[int], step: int, want: int) -> None:
    assert steady_longest(lengths, step) == want
    assert want >= max(lengths)
    assert want % step == 0
