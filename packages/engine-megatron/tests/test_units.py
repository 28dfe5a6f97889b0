"""The probe, the head, attention, and an engine of one rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mapping_models import SHAPE, layouts
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.config import LoraConfig, Precision
from engine_api.devices import SIMULATED_CUDA
from engine_api.errors import ConfigError, EngineError, PluginUnavailable, UnsupportedCapability
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_megatron.head import Vocabulary, log_probs
from engine_megatron.layers import PackedAttention, build_packing
from engine_megatron.model import build_model, kept_generators, transformer_config
from engine_megatron.plugin import probe
from engine_megatron.weights import check_stages, weight_table

BATCH = Batch.pack([{"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "model"))


def create(folder: Path, **config: Any) -> Any:
    config = {"optimizer": OptimizerConfig(lr=1e-2)} | config
    return EngineRegistry.create(
        backend="megatron",
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder)), **config),
    )


# --- the probe ---------------------------------------------------------------------------------


def test_the_cpu_is_refused_unless_cuda_is_simulated(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.delenv(SIMULATED_CUDA)
    try:
        assert not probe("cpu").ok
        assert "--shim" in probe("cpu").remedy
        with pytest.raises(PluginUnavailable, match="CUDA"):
            create(folder)
    finally:
        monkeypatch.undo()


def test_megatron_absent_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "not installed" in probe("cpu").reason
    assert "pip install" in probe("cpu").remedy
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.15.0")
    assert "0.15.0" in probe("cpu").reason
    assert "0.16.1" in probe("cpu").reason


def test_absent_psutil_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "psutil" else found(name, *a)
    )
    assert "psutil" in probe("cpu").reason


# --- head and attention ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 100])
def test_log_probs_entropy_and_their_gradients(chunk: int) -> None:
    hidden = torch.randn(10, 8, requires_grad=True)
    weight = torch.randn(14, 8, requires_grad=True)
    targets = torch.randint(12, (10,))
    a = torch.randn(10)
    b = torch.randn(10)
    chosen, entropy = log_probs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        chunk=chunk,
        vocabulary=Vocabulary(first=0, size=12, group=None),
    )
    (chosen * a + entropy * b).sum().backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    log_p = (hidden @ weight[:12].T / 0.7).log_softmax(-1)
    want = log_p.gather(1, targets[:, None])[:, 0]
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (want * a + want_entropy * b).sum().backward()
    torch.testing.assert_close(chosen, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
    for mine, exact in zip(got, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-4)


def test_attention_sees_one_document() -> None:
    class Config:
        window_size = window_attn_skip_freq = None
        softmax_type = "vanilla"

    lengths = [3, 1, 5]
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    packed = PackedAttention(Config())(
        query, key, value, packed_seq_params=build_packing(lengths, torch.device("cpu"))
    )
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = (rows[:, None] == rows[None]) & torch.ones(9, 9, dtype=torch.bool).tril()
    heads = [x.transpose(0, 1)[None] for x in (query, key, value)]
    want = (
        F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0]
        .transpose(0, 1)
        .reshape(9, -1)
    )
    torch.testing.assert_close(packed, want, atol=1e-6, rtol=1e-5)


# --- the engine --------------------------------------------------------------------------------


def test_it_learns_and_leaves_no_groups(folder: Path) -> None:
    engine = create(folder)
    engine.initialize()
    losses = [engine.train_batch(BATCH, sft_loss).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert engine.train_batch(BATCH, sft_loss).denominator == 3.0
    engine.close()
    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized()


def test_two_engines_of_one_layout_live_side_by_side(folder: Path) -> None:
    first = create(folder)
    second = create(folder, optimizer=None)
    first.initialize()
    second.initialize()
    first.close()
    assert second.infer_batch(BATCH).log_probs.shape == (4,)
    second.close()


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_a_random_model_is_the_same_each_time(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(value_model=kind == "value_model"))
    exports = []
    for _ in range(2):
        config = EngineConfig(
            model=ModelSource(path=str(folder), init="random"), optimizer=None, seed=3
        )
        engine = EngineRegistry.create(
            backend="megatron", device="cpu", model_type=kind, config=config
        )
        engine.initialize()
        exports.append({name: tensor.clone() for name, tensor in engine.get_per_tensor_param()})
        engine.close()
    assert all(torch.equal(exports[0][name], exports[1][name]) for name in exports[0])
    assert float(exports[0]["model.embed_tokens.weight"].std()) > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_every_parameter_of_a_model_is_made_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A router that moved at its first use left its master, and Megatron's hook, on the CPU."""
    keys = {"head_dim": 8, "num_key_value_heads": 4} if family == "deepseek_v3" else {}
    tiny_model(family, **keys).save_pretrained(tmp_path)
    engine = create(tmp_path)
    engine.initialize()
    settings = transformer_config(
        engine.shape, engine.config, engine.options, engine.layout, on_cpu=False
    )
    settings.sequence_parallel = True
    # The device that every machine has besides the CPU.
    device = torch.device("meta")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: device)
    chunks = build_model(engine.shape, settings, engine.options, engine.layout)
    engine.close()
    parameters = dict(chunks.named_parameters())
    assert not [name for name, one in parameters.items() if one.device != device]
    # Megatron sums the gradients of parameters with this mark over tensor-parallel ranks.
    routers = {name: one for name, one in parameters.items() if ".router." in name}
    marked = [name for name, one in routers.items() if getattr(one, "sequence_parallel", False)]
    assert marked == [name for name in routers if not name.endswith("expert_bias")]


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_experts_are_read_exported_and_computed_as_in_transformers(
    tmp_path: Path, norm_topk_prob: bool
) -> None:
    folder = write_checkpoint(
        tmp_path / "model", TinyModel(family="qwen3_moe", norm_topk_prob=norm_topk_prob)
    )
    engine = create(Path(folder))
    engine.initialize()
    saved = load_file(folder / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    assert set(saved) == set(exported)
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    got = engine.infer_batch(BATCH).log_probs
    log_p = (
        AutoModelForCausalLM.from_pretrained(folder)(input_ids=BATCH.input_ids[None])
        .logits[0]
        .log_softmax(-1)
    )
    want = torch.cat([torch.zeros(1), log_p[:-1].gather(1, BATCH.input_ids[1:, None])[:, 0]])
    torch.testing.assert_close(got, want.detach(), atol=2e-5, rtol=1e-5)
    engine.close()


def test_a_value_model_is_saved_as_one(tmp_path: Path, folder: Path) -> None:
    # The folder is that of a language model.
    config = EngineConfig(model=ModelSource(path=str(folder)), optimizer=OptimizerConfig(lr=1e-2))
    engine = EngineRegistry.create(
        backend="megatron", device="cpu", model_type="value_model", config=config
    )
    engine.initialize()
    engine.save_hf(tmp_path / "hf")
    own = engine.infer_batch(BATCH).values
    engine.close()
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert saved.config.architectures == ["Qwen3ForTokenClassification"]
    scores = saved(input_ids=BATCH.input_ids[None]).logits[0, :, 0].detach()
    torch.testing.assert_close(own, torch.cat([torch.zeros(1), scores[:-1]]), atol=2e-5, rtol=1e-5)


def refusal(folder: Path, **config: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        create(folder, **config).initialize()
    assert not torch.distributed.is_initialized(), "refused before any process group is built"
    return caught.value


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["k_prj"], "matches no layer"),
        ("model.layers.0", "matches no layer"),
        ("(q_proj", "no regular expression"),
        (["q_proj", "embed_tokens"], "model.embed_tokens cannot carry an adapter"),
        (["w1"], "model.layers.0.block_sparse_moe.experts.0.w1 is an expert's matrix"),
    ],
)
def test_targets_without_a_linear_layer_are_refused(
    tmp_path: Path, targets: Any, said: str
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    error = refusal(tmp_path, lora=LoraConfig(target_modules=targets))
    assert "lora.target_modules" in str(error)
    assert said in str(error)
    assert "all-linear" in error.remedy


def test_a_pipeline_stage_without_an_adapter_is_refused() -> None:
    layout = layouts(1, 1, 2)[0]
    lora = LoraConfig(target_modules=r"model\.layers\.0\..*")
    with pytest.raises(ConfigError, match="pipeline stage 1"):
        check_stages(weight_table(SHAPE, layout, 1, torch.float32, lora), layout)


def test_a_model_without_experts_cannot_replay(folder: Path) -> None:
    error = refusal(folder, router_replay=True)
    assert isinstance(error, UnsupportedCapability)
    assert error.capability == "router_replay"


def test_configurations_are_refused_before_any_group_is_built(tmp_path: Path, folder: Path) -> None:
    assert isinstance(refusal(folder, parallelism=Parallelism(tp=2)), ConfigError)
    assert isinstance(refusal(folder, parallelism=Parallelism(pp=2)), ConfigError)
    assert isinstance(refusal(folder, options={"sequence_parallel": True}), ConfigError)
    # 2 is for a pipeline only.
    for stages in (0, 2):
        assert "options.virtual_stages" in str(refusal(folder, options={"virtual_stages": stages}))
    assert isinstance(refusal(tmp_path / "nowhere"), ConfigError)
    assert isinstance(refusal(folder, parallelism=Parallelism(cp=2)), ConfigError)
    assert isinstance(refusal(folder, parallelism=Parallelism(ulysses=2)), UnsupportedCapability)
    assert isinstance(refusal(folder, parallelism=Parallelism(ep=2)), ConfigError)
    # The model has no experts, and 2 does not divide tp.
    for size in (1, 2):
        assert isinstance(refusal(folder, options={"expert_tensor_parallel": size}), ConfigError)
    assert isinstance(refusal(folder, options={"expert_tensor_parallel": -1}), ConfigError)
    assert isinstance(
        refusal(folder, precision=Precision(compute="bfloat16", reduce="bfloat16")), ConfigError
    )
    assert isinstance(refusal(folder, precision=Precision(master="bfloat16")), ConfigError)


@pytest.mark.parametrize(
    ("parallelism", "options", "field"),
    [
        ({"pp": 2}, {"virtual_stages": 2}, "options.virtual_stages"),
        ({"tp": 2}, {}, "options.sequence_parallel"),
        ({"ep": 3}, {}, "parallelism.ep"),
        ({"ep": 8}, {}, "parallelism.ep"),
        ({"tp": 2, "ep": 4}, {"sequence_parallel": True}, "parallelism.ep"),
        (
            {"tp": 4},
            {"sequence_parallel": True, "expert_tensor_parallel": 3},
            "options.expert_tensor_parallel",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_any_group_is_built(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    parallelism: dict[str, int],
    options: dict[str, Any],
    field: str,
) -> None:
    folder = write_checkpoint(
        tmp_path / "model", TinyModel(family="qwen3_moe", num_experts=8, num_kv_heads=4)
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    error = refusal(Path(folder), parallelism=Parallelism(**parallelism), options=options)
    assert isinstance(error, ConfigError)
    assert error.field == field


def test_more_ranks_than_key_value_heads_are_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(num_heads=8, num_kv_heads=2))
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    error = refusal(Path(folder), parallelism=Parallelism(tp=4))
    assert isinstance(error, ConfigError)
    assert error.field == "parallelism.tp"
    assert "4 does not divide 2 key-value heads" in str(error)
    assert "a rank has whole heads" in error.why
    assert "choose one of 1, 2" in error.remedy
    assert "parallelism.cp or pp" in error.remedy


def test_one_expert_a_token_with_a_normalized_weight_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "model", TinyModel(family="qwen3_moe", top_k=1, norm_topk_prob=True)
    )
    assert "single expert" in str(refusal(Path(folder)))


# config.json of a family with changes, and the mechanism or key that its refusal names.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"hidden_act": "gelu_new"}, "activation"),
    ("qwen3", {"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "softcap"),
    ("llama", {"logits_scaling": 8.0}, "logit_scale"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantized_weights"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope",
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
        "partial_rope",
    ),
    ("mixtral", {"attention_bias": True}, "bias"),
    ("qwen3", {"mlp_bias": True}, "bias"),
    # transformers has no window for Llama, and one for each layer of Qwen3-MoE whatever the types.
    ("llama", {"sliding_window": 8}, "sliding_window"),
    ("llama", {"sliding_window": 8, "use_sliding_window": True}, "sliding_window"),
    (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding_window",
    ),
    (
        "qwen3_moe",
        {
            "use_sliding_window": False,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 2,
        },
        "sliding_window",
    ),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, "sliding"),
    ("qwen3", {"attention_dropout": 0.1}, "attention_dropout"),
]


@pytest.mark.parametrize(("family", "changes", "name"), REFUSED)
def test_a_mechanism_that_would_be_computed_wrongly_is_refused_by_its_name(
    tmp_path: Path, family: str, changes: dict[str, Any], name: str
) -> None:
    folder = Path(write_checkpoint(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": family}
    if family != "mixtral":
        # transformers takes them from the other keys.
        config["layer_types"] = None
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert name in str(refusal(folder))


def test_a_family_without_a_mapping_is_refused_by_its_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))
    error = refusal(folder)
    assert isinstance(error, ConfigError)
    assert "'olmo'" in str(error)


@pytest.mark.parametrize(
    "overrides", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}], ids=str
)
def test_rope_without_its_base_is_refused(folder: Path, overrides: dict[str, Any]) -> None:
    """An override replaces all of RoPE's parameters, so the base would become 10,000."""
    model = ModelSource(path=str(folder), config_overrides=overrides)
    with pytest.raises(ConfigError, match="rope_theta") as caught:
        EngineRegistry.create(
            backend="megatron", device="cpu", config=EngineConfig(model=model)
        ).initialize()
    assert caught.value.field == f"model.config_overrides.{next(iter(overrides))}"


def test_a_window_that_no_layer_has_is_none(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", TinyModel(family="qwen2")))
    config = json.loads((folder / "config.json").read_text()) | {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    engine = create(folder, optimizer=None)
    engine.initialize()
    engine.close()


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", TinyModel(family="llama")))
    config = json.loads((folder / "config.json").read_text()) | {
        "use_sliding_window": False,
        "sliding_window": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    engine = create(folder, optimizer=None)
    engine.initialize()
    engine.close()


def test_a_refusal_of_megatron_comes_before_any_group(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    assert isinstance(refusal(folder), ConfigError)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("Megatron's")

    monkeypatch.setattr("engine_megatron.engine.transformer_config", refuse)
    with pytest.raises(ValueError, match="Megatron's"):
        create(folder).initialize()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("before", [None, "0"])
def test_the_choice_of_attention_kernels_is_restored_with_the_last_engine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, before: str | None
) -> None:
    """Transformer Engine reads it at each forward pass, so it stands while an engine needs it."""
    name = "NVTE_FLASH_ATTN"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    first, second = create(folder), create(folder)
    first.initialize()
    second.initialize()
    first.close()
    assert os.environ[name] == "0"
    second.close()
    assert os.environ.get(name) == before


def test_groups_that_are_half_made_are_taken_down(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from megatron.core import parallel_state

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no port is free")

    # The first is the last step of the second.
    for name in ("_set_global_memory_buffer", "initialize_model_parallel"):
        with monkeypatch.context() as patch:
            patch.setattr(parallel_state, name, fail)
            with pytest.raises(OSError, match="port"):
                create(folder).initialize()
        assert not torch.distributed.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
    with monkeypatch.context() as patch:
        patch.setattr("engine_megatron.engine.SingleComm", fail)
        with pytest.raises(OSError, match="port"):
            create(folder).initialize()
    assert not parallel_state.model_parallel_is_initialized()
    engine = create(folder)
    engine.initialize()
    engine.close()


def test_files_that_do_not_belong(folder: Path) -> None:
    three = {"num_hidden_layers": 3}
    config = ModelSource(path=str(folder), config_overrides=three)
    with pytest.raises(ConfigError, match="expected 3 layer_types, got 2"):
        EngineRegistry.create(
            backend="megatron", device="cpu", config=EngineConfig(model=config)
        ).initialize()
    three["layer_types"] = ["full_attention"] * 3
    config = ModelSource(path=str(folder), config_overrides=three)
    with pytest.raises(ConfigError, match="lacks 1"):
        EngineRegistry.create(
            backend="megatron", device="cpu", config=EngineConfig(model=config)
        ).initialize()
    config = ModelSource(path=str(folder), config_overrides={"intermediate_size": 64})
    with pytest.raises(ConfigError, match="says"):
        EngineRegistry.create(
            backend="megatron", device="cpu", config=EngineConfig(model=config)
        ).initialize()
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(stored | {name: stored[name].to(torch.int8)}, folder / "model.safetensors")
    assert f"{name} is stored as I8" in str(refusal(folder))
    (folder / "model.safetensors").write_bytes(b"x")
    assert "cannot be read" in str(refusal(folder))
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in str(refusal(folder))


class Counts(torch.optim.SGD):
    """An optimizer with a number in its state, into which no state can be loaded."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["count"] = 1


@pytest.mark.parametrize("kind", ["portable", "megatron"])
def test_weights_are_loaded_into_an_engine_whose_optimizer_state_is_not_a_tensor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch.optim, "Counts", Counts, raising=False)
    options = {"checkpoint": kind}
    first = create(folder, options=options)
    first.initialize()
    # The optimizer has had no step, so the checkpoint has none of its state.
    first.save_checkpoint(tmp_path / "step-0").result()
    first.close()
    engine = create(
        folder, options=options, optimizer=OptimizerConfig(name="torch.optim.Counts", lr=1e-2)
    )
    engine.initialize()
    assert engine.load_checkpoint(tmp_path / "step-0").step == 0
    engine.close()


def test_inference_leaves_the_generators_that_transformer_engine_draws_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fused attention moves them also without dropout."""

    @dataclass
    class Tracker:
        states: dict[str, torch.Tensor]

        def get_states(self) -> dict[str, torch.Tensor]:
            return dict(self.states)

        def set_states(self, states: dict[str, torch.Tensor]) -> None:
            self.states = states

    class Generator:
        state = torch.tensor([1])

        def rng_state(self) -> torch.Tensor:
            return self.state

        def set_rng_state(self, state: torch.Tensor) -> None:
            self.state = state

    tracker, generator = Tracker({"model-parallel-rng": torch.tensor([3])}), Generator()
    monkeypatch.setattr("engine_megatron.model.get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr("engine_megatron.model.device_of", lambda _: generator)
    with kept_generators("cuda"):
        tracker.states["model-parallel-rng"] = torch.tensor([4])
        generator.state = torch.tensor([2])
    assert generator.state == torch.tensor([1])
    assert tracker.states == {"model-parallel-rng": torch.tensor([3])}
