"""The families that VeOmni has classes for, computed as transformers does or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import documents, log_probs, models_of, oracle, tiny_model

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, sft_loss
from engine_api.errors import ConfigError, EngineError
from engine_veomni import library

# Largest difference in nats, for float32 sums in two orders.
NEAR = 1e-4

TAKEN = models_of("veomni", "cpu_veomni")
REFUSED = {
    "deepseek_v3": "e_score_correction_bias",
    "deepseek_v4": "compressed_sparse_attention",
    "glm_moe_dsa": "indexed_attention",
    "gpt_oss": "sinks",
    "mistral": "VeOmni has no language_model of type 'mistral'",
    "qwen3_5_moe_text": "linear_attention",
    "qwen3_5_text": "linear_attention",
}


def create(folder: Path, **model: Any) -> Any:
    config = EngineConfig(
        model=ModelSource(path=str(folder), **model),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.0),
    )
    return EngineRegistry.create(backend="veomni", device="cpu", config=config)


@pytest.mark.parametrize("model_type", sorted(TAKEN))
def test_a_family_is_computed_as_transformers_does(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    engine = create(tmp_path)
    engine.initialize()

    assert type(engine.module.lm).__module__.startswith("veomni.")
    model = oracle(str(tmp_path))
    want = torch.cat([log_probs(model, ids) for ids in documents()])
    batch = Batch.pack(
        [
            {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
            for ids in documents()
        ]
    )
    assert float((engine.infer_batch(batch).log_probs.double() - want).abs().max()) < NEAR
    # model.train() must not change a log-prob.
    trained_tokens = len(want) - len(documents())
    loss = engine.train_batch(batch, sft_loss).loss
    assert loss == pytest.approx(-float(want.sum()) / trained_tokens, abs=NEAR)
    engine.close()


@pytest.mark.parametrize(("model_type", "named"), REFUSED.items())
def test_a_family_that_it_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, model_type: str, named: str
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=named) as caught:
        create(tmp_path).initialize()
    assert caught.value.remedy


def test_every_family_of_language_models_is_taken_or_refused_here() -> None:
    """VeOmni's other families are of images, video and speech."""
    others = {
        *("flux", "movqgan"),
        *("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_5", "qwen3_5_moe"),
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
