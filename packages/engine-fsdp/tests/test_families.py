"""Features of single model families, which this engine computes correctly or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PhiConfig,
)

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_conformance.fixtures import write_checkpoint
from engine_fsdp.engine import FSDPEngine, FSDPModelClasses
from engine_fsdp.plugin import PLUGIN
from engine_torch import model as model_module

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LIMIT = 16
ROPE = {
    "dynamic": LlamaConfig(
        **TINY,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
    "longrope": Phi3Config(
        **TINY,
        max_position_embeddings=64,
        original_max_position_embeddings=LIMIT,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": LIMIT,
        },
    ),
}


def saved(config: Any, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make(folder: Path, **config: Any) -> Any:
    settings = {"optimizer": OptimizerConfig(lr=1e-2)} | config
    engine = EngineRegistry.create(
        backend="fsdp2",
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder)), **settings),
    )
    engine.initialize()
    return engine


def pack(*lengths: int) -> Batch:
    return Batch.pack([{"input_ids": [1 + (7 * i) % 60 for i in range(n)]} for n in lengths])


@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_follows_the_longest_document_of_a_pack_has_a_limit(
    tmp_path: Path, kind: str
) -> None:
    """Beyond the limit, documents in the pack of a longer one would get its frequencies."""
    engine = make(saved(ROPE[kind], tmp_path / "model"))
    alone = engine.infer_batch(pack(6)).log_probs
    packed = engine.infer_batch(pack(6, LIMIT)).log_probs[:6]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    with pytest.raises(BatchError, match=f"document 1 has {LIMIT + 1} tokens") as caught:
        engine.infer_batch(pack(6, LIMIT + 1))
    assert kind in caught.value.why
    torch.testing.assert_close(engine.infer_batch(pack(6)).log_probs, alone, atol=0, rtol=0)
    engine.close()


@pytest.mark.parametrize("kind", ROPE)
def test_a_limit_of_documents_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Documents grow in RL, and the limit would be met in the middle of a run."""
    make(saved(ROPE[kind], tmp_path / "model")).close()
    messages = [record.getMessage() for record in caplog.records]
    (told,) = [message for message in messages if "documents" in message]
    assert f"at most {LIMIT} tokens" in told
    assert f"RoPE ({kind})" in told


def test_padding_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    folder = saved(ROPE["longrope"], tmp_path / "model")
    with pytest.raises(ConfigError, match="pad_to_multiple"):
        make(folder, memory=Memory(pad_to_multiple=2 * LIMIT))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_stored_quantized_are_refused_whatever_config_json_says(
    tmp_path: Path, dtype: Any
) -> None:
    """Their scales would be left unread."""
    folder = Path(write_checkpoint(tmp_path / "model"))
    file = folder / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name] = stored[name].to(dtype)
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} is stored as"):
        make(folder)


# The model's embedding is initialized again, and then read.
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**TINY, head_dim=8, use_bidirectional_attention=True, pad_token_id=0)
    with pytest.raises(UnsupportedCapability, match="not causal"):
        make(saved(config, tmp_path / "model"), precision=Precision(compute="bfloat16"))


def test_the_check_at_start_sees_in_bfloat16_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's bias of ordinary size makes many tokens differ a little.

    None of them differs by half of the largest score.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(PhiConfig(**TINY))
        lm.lm_head.bias.data.normal_()
        lm.save_pretrained(tmp_path / "model")
    whole = model_module.chunked_log_probs
    monkeypatch.setattr(
        model_module, "chunked_log_probs", lambda *a, bias, **b: whole(*a, bias=None, **b)
    )
    with pytest.raises(UnsupportedCapability, match="on average"):
        make(tmp_path / "model", precision=Precision(compute="bfloat16"))


MOE: dict[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "pad_token_id": 0,
}
ROUTER_BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


def saved_with_router_bias(folder: Path) -> tuple[Path, torch.Tensor]:
    """Return a folder and the router's bias of its first layer, which decides between experts."""
    saved(Glm4MoeConfig(**TINY, **MOE), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    bias = torch.linspace(-0.3, 0.3, 8) + 1 / 3
    tensors[ROUTER_BIAS] = bias
    save_file(tensors, file, metadata={"format": "pt"})
    return folder, bias


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_saved_buffer_is_read_exported_and_checkpointed_in_float32(
    tmp_path: Path, compute: Any
) -> None:
    """A router's bias that is rounded to bfloat16 sends tokens to other experts."""
    folder, bias = saved_with_router_bias(tmp_path / "model")
    engine = make(folder, precision=Precision(compute=compute))
    live = engine.module.lm.get_buffer(ROUTER_BIAS)
    assert live.dtype == torch.float32
    assert torch.equal(live, bias)
    assert torch.equal(dict(engine.get_per_tensor_param())[ROUTER_BIAS], bias)
    shards = {name: shard for name, shard, _ in engine.get_per_tensor_param_shard()}
    assert torch.equal(shards[ROUTER_BIAS], bias)
    engine.train_batch(weighted(pack(5, 9)), sft_loss)
    assert torch.equal(engine.module.lm.get_buffer(ROUTER_BIAS), bias)
    engine.save_checkpoint(tmp_path / "checkpoint").result()
    engine.save_hf(tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")[ROUTER_BIAS], bias)
    engine.close()

    other = make(saved(Glm4MoeConfig(**TINY, **MOE), tmp_path / "other"))
    assert not other.module.lm.get_buffer(ROUTER_BIAS).any()
    other.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(other.module.lm.get_buffer(ROUTER_BIAS), bias)
    other.close()


def weighted(batch: Batch) -> Batch:
    weight = torch.ones(batch.num_tokens)
    weight[batch.cu_seqlens[:-1]] = 0
    return batch.with_fields(loss_weight=weight)


def test_a_folder_without_the_buffers_of_its_model_is_refused(tmp_path: Path) -> None:
    folder, _ = saved_with_router_bias(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[ROUTER_BIAS]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors: .*e_score_correction_bias"):
        make(folder)


def test_a_state_is_not_carried_from_document_to_document(tmp_path: Path) -> None:
    """A short convolution reaches back, and would reach into the previous document."""
    config = Lfm2Config(**TINY, layer_types=["conv", "full_attention"], pad_token_id=0)
    engine = make(saved(config, tmp_path / "model"))
    alone = engine.infer_batch(pack(6)).log_probs
    packed = engine.infer_batch(pack(9, 6)).log_probs[9:]
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)
    engine.close()


ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "softcap": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "head_bias": ("phi", {}),
    "logit_scale": ("cohere", {}),
    "saved_buffers": ("deepseek_v3", {}),
    "linear_attention": ("qwen3_next", {}),
    "chunked_attention": ("llama4_text", {}),
    "sparse_attention": ("deepseek_v32", {}),
    "own_attention": ("bloom", {}),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_mechanism_that_an_engine_lacks_is_refused_by_its_name_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, changes = ASKING[name]
    tiny_model(model_type, **changes).save_pretrained(tmp_path)
    monkeypatch.setattr(FSDPEngine, "capabilities", PLUGIN.capabilities - {name})
    monkeypatch.setattr(model_module, "WeightFiles", lambda _: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedCapability) as caught:
        make(tmp_path)
    assert caught.value.capability == name
    assert caught.value.where
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize("model_type", ["gpt_oss", "lfm2", "gemma2", "longcat_flash"])
def test_recomputing_changes_no_gradient(tmp_path: Path, model_type: str) -> None:
    """The backward pass calls the layers once more, for the documents of its micro-batch."""
    tiny_model(model_type).save_pretrained(tmp_path)
    norms: list[float] = []
    for recompute in ("none", "full"):
        engine = make(tmp_path, memory=Memory(recompute=recompute, max_tokens=32))
        norms.append(engine.train_batch(weighted(pack(20, 9, 11)), sft_loss).grad_norm)
        engine.close()
    assert norms[0] == norms[1] > 0


def test_matrices_decay_and_rows_of_biases_do_not(tmp_path: Path) -> None:
    """gpt-oss saves the biases of its experts as a matrix, and its sinks as a vector."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    engine = make(tmp_path, optimizer=OptimizerConfig(weight_decay=0.1, decay="matrices"))
    names = {id(entry.param): entry.pieces[0].name for entry in engine.table}
    found: dict[float, set[str]] = {}
    for group in engine.optimizer.param_groups:
        named = {names[id(param)].rpartition("layers.0.")[2] for param in group["params"]}
        found[group["weight_decay"]] = {name for name in named if "layers." not in name}
    engine.close()
    attention = {f"self_attn.{one}_proj" for one in "qkvo"}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert found[0.1] == (
        {f"{one}.weight" for one in attention}
        | experts
        | {"mlp.router.weight", "model.embed_tokens.weight", "lm_head.weight"}
    )
    assert found[0.0] == (
        {f"{one}.bias" for one in attention}
        | {f"{one}_bias" for one in experts}
        | norms
        | {"mlp.router.bias", "self_attn.sinks"}
    )


def test_layers_that_select_tokens_refuse_ulysses_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("deepseek_v32").save_pretrained(tmp_path)
    monkeypatch.setattr(model_module, "WeightFiles", lambda _: pytest.fail("weights were read"))
    config = EngineConfig(model=ModelSource(path=str(tmp_path)))
    with pytest.raises(UnsupportedCapability, match="sparse_attention") as caught:
        model_module.build_model(
            config, "language_model", 2, FSDPModelClasses(), served=PLUGIN.capabilities
        )
    assert caught.value.remedy == "set parallelism.ulysses: 1"


def test_logits_that_are_neither_scaled_nor_capped_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(LlamaConfig(**TINY), tmp_path / "model")
    whole = LlamaForCausalLM.forward

    def shifted(*arguments: Any, **options: Any) -> Any:
        output = whole(*arguments, **options)
        output.logits = output.logits + 0.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(UnsupportedCapability, match="logits") as caught:
        make(folder, precision=Precision(compute="bfloat16"))
    assert "neither scaled nor capped" in caught.value.why
