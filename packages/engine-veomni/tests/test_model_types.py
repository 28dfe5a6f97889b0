"""The families that VeOmni has classes for, computed as transformers does or refused by name."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ignore_reads_of_compile
from safetensors.torch import load_file
from tiny_models import documents, log_probs, models_of, oracle, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    sft_loss,
)
from engine_api.errors import ConfigError, EngineError
from engine_torch.model import ModelClasses
from engine_veomni import library, plugin
from engine_veomni.model import VeOmniClasses

# Differences of float32 from float64: of log-probs in nats, and of a gradient from its norm.
NEAR = 1e-4
NEAR_GRADIENT = 1e-3

TAKEN = models_of("veomni", "cpu_veomni")
REFUSED = {
    "deepseek_v4": "compressed_sparse_attention",
    "glm_moe_dsa": "indexed_attention",
    "mistral": "VeOmni has no language_model of type 'mistral'",
    "qwen3_5_moe_text": "linear_attention",
    "qwen3_5_text": "linear_attention",
}


def create(folder: Path, *, compiles: bool = False, **model: Any) -> Any:
    config = EngineConfig(
        model=ModelSource(path=str(folder), **model),
        memory=Memory(compile=compiles),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.0),
    )
    return EngineRegistry.create(backend="veomni", device="cpu", config=config)


@ignore_reads_of_compile
@pytest.mark.parametrize(
    "compiles",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize("model_type", sorted(TAKEN))
def test_a_family_is_computed_as_transformers_does(
    tmp_path: Path, model_type: str, compiles: bool
) -> None:
    """Each token's log-prob, the gradient of every weight, and the names that are saved."""
    tiny_model(model_type).save_pretrained(tmp_path)
    model = oracle(str(tmp_path))
    engine = create(tmp_path, compiles=compiles)
    engine.initialize()

    assert type(engine.module.lm).__module__.startswith("veomni.")
    want = torch.cat([log_probs(model, ids) for ids in documents()])
    batch = Batch.pack(
        [
            {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
            for ids in documents()
        ]
    )
    assert float((engine.infer_batch(batch).log_probs.double() - want).abs().max()) < NEAR
    # model.train() must not change a log-prob.
    loss = -want.sum() / (len(want) - len(documents()))
    assert engine.forward_backward(batch, sft_loss).loss == pytest.approx(float(loss), abs=NEAR)

    for ids in documents():
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = scores.gather(-1, ids[1:, None])
        (-picked.sum() / (len(want) - len(documents()))).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = torch.stack([one.norm() for one in gradients.values()]).norm()
    found = {e.name: e.param.grad for e in engine.table if e.param.grad is not None}
    assert found.keys() == gradients.keys()
    for name, true in gradients.items():
        apart = (found[name].double() - true).norm() / max(true.norm(), 1e-3 * whole)
        assert apart < NEAR_GRADIENT, (name, float(apart))
    engine.save_hf(tmp_path / "saved")
    engine.close()
    saved, given = (load_file(one / "model.safetensors") for one in (tmp_path / "saved", tmp_path))
    assert saved.keys() == given.keys()
    # The learning rate is 0.
    assert all(torch.equal(saved[name], one) for name, one in given.items())


@pytest.mark.parametrize(("model_type", "named"), REFUSED.items())
def test_a_family_that_it_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, model_type: str, named: str
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=named) as caught:
        create(tmp_path).initialize()
    assert caught.value.remedy


def test_every_family_of_language_models_is_taken_or_refused_here() -> None:
    """Those of images are in test_vision, and the others are of video and speech."""
    others = {
        *("flux", "movqgan", "qwen2_5_omni", "qwen3_omni_moe"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        # Its classes need liger-kernel.
        "seed_oss",
    }
    assert set(library.list_families()) == TAKEN | (set(REFUSED) - {"mistral"}) | others


def test_a_folder_with_its_own_code_is_refused_where_the_code_was_asked_for(
    tmp_path: Path,
) -> None:
    tiny_model("llama", auto_map={"AutoModelForCausalLM": "own.Model"}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="brings its own code") as caught:
        create(tmp_path, trust_remote_code=True).initialize()
    assert caught.value.field == "model.trust_remote_code"


def test_a_class_with_other_parameters_than_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved names of its parameters would be unknown."""
    tiny_model("llama").save_pretrained(tmp_path)
    cls = library.find_class("llama", "ForCausalLM")

    class Changed(cls):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[0].added = torch.nn.Linear(2, 2)

    monkeypatch.setattr(library, "find_class", lambda *_: Changed)
    with pytest.raises(EngineError, match=r"model\.layers\.0\.added"):
        create(tmp_path).initialize()


_KEY = re.compile(r"config(?:\.(?:text|vision)_config)?\.([a-z]\w*)|config, \"([a-z]\w*)\"")
# Read by transformers' class alone, of which gpt-oss' are refused and the other one is the output
# of the logits of routers, which no engine asks for.
_UNREAD = {"swiglu_alpha", "swiglu_limit", "output_router_logits"}


def test_its_classes_read_each_key_of_the_configuration_that_transformers_reads() -> None:
    """VeOmni made them of an older transformers, which knew fewer keys."""

    def read(cls: Any) -> set[str]:
        text = inspect.getsource(sys.modules[cls.__module__])
        return {one or other for one, other in _KEY.findall(text)}

    unread = set[str]()
    classes = VeOmniClasses()
    for model_type in sorted({*plugin.PLUGIN.families, *TAKEN}):
        config = CONFIG_MAPPING[model_type]()
        theirs = ModelClasses.find(classes, config, "language_model")
        keys = read(classes.find(config, "language_model"))
        assert {"hidden_size", "num_attention_heads"} <= keys
        unread |= read(theirs) - keys
    assert unread == _UNREAD


@pytest.mark.parametrize(("key", "number"), [("swiglu_alpha", 1.5), ("swiglu_limit", 6.0)])
def test_a_number_that_its_class_does_not_read_is_refused(
    tmp_path: Path, key: str, number: float
) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"expected {key} .*, got {number}") as caught:
        create(tmp_path, config_overrides={key: number}).initialize()
    assert caught.value.remedy == "use backend fsdp2 for this model"
