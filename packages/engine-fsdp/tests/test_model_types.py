"""Every causal language model of transformers, computed as it does or refused at the start."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    MODEL_TYPES,
    documents,
    log_probs,
    models_of,
    oracle,
    some_nightly,
    tiny_model,
)

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, sft_loss
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_torch import model as model_module
from engine_torch.mechanisms import MECHANISMS

# Largest difference in nats, for float32 sums in two orders.
NEAR = 1e-4

# Model types that must not be refused. Any other type that is accepted must be right as well.
TAKEN = models_of("fsdp2", "cpu")


def test_the_record_of_the_zoo_is_current() -> None:
    """`nox -s zoo` writes it, and docs/models.md and matrix.toml say the same."""
    record = json.loads((Path(__file__).parents[3] / "conformance" / "zoo.json").read_text())
    mechanisms = {one.name: {"served_by": one.served_by, "why": one.why} for one in MECHANISMS}
    assert record["mechanisms"] == mechanisms
    assert set(record["types"]) == set(MODEL_TYPES)
    layouts = ("one rank", "two ranks")
    right = {
        name
        for name, row in record["types"].items()
        if all(layout in row and row[layout]["status"] == "right" for layout in layouts)
    }
    assert right == TAKEN


def create(folder: Path, **overrides: Any) -> Any:
    source = ModelSource(path=str(folder), config_overrides=overrides)
    config = EngineConfig(model=source, optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.0))
    return EngineRegistry.create(backend="fsdp2", device="cpu", config=config)


def pack() -> Batch:
    rows = [
        {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
        for ids in documents()
    ]
    return Batch.pack(rows)


def is_right(engine: Any, folder: Path) -> None:
    model = oracle(str(folder))
    want = torch.cat([log_probs(model, ids) for ids in documents()])
    batch = pack()
    got = engine.infer_batch(batch).log_probs.double()
    assert float((got - want).abs().max()) < NEAR
    output = engine.train_batch(batch, sft_loss)
    trained_tokens = len(want) - len(documents())
    assert output.loss == pytest.approx(-float(want.sum()) / trained_tokens, abs=NEAR)
    assert output.grad_norm > 0
    assert math.isfinite(output.grad_norm)


def started(folder: Path, **overrides: Any) -> Any:
    """Return an initialized engine, or None where the model is refused.

    For a model with noise, the remedy that the error names is applied.
    """
    engine = create(folder, **overrides)
    try:
        engine.initialize()
    except ConfigError as error:
        if error.field != "model.config_overrides" or overrides:
            return None
        off = {part.split(" is ")[0]: 0.0 for part in error.what.split(":")[0].split(", ")}
        return started(folder, **off) if "config_overrides: {" in error.remedy else None
    except EngineError:
        return None
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some_nightly(MODEL_TYPES, taken=TAKEN))
def test_a_model_is_computed_as_transformers_does_or_refused_at_the_start(
    tmp_path: Path, model_type: str
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    engine = started(tmp_path)
    assert engine is not None or model_type not in TAKEN
    if engine is not None:
        is_right(engine, tmp_path)
        engine.close()


NOISE = [
    ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.1}, "resid_pdrop"),
    ("gpt2", {"attn_pdrop": 0.1, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "attn_pdrop"),
    ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.1}, "residual_dropout"),
    ("opt", {"dropout": 0.1}, "dropout"),
    ("opt", {"dropout": 0.0, "layerdrop": 0.5}, "layerdrop"),
    ("mixtral", {"router_jitter_noise": 0.2}, "router_jitter_noise"),
    ("qwen3", {"attention_dropout": 0.1}, "attention_dropout"),
]


@pytest.mark.parametrize(("model_type", "rates", "key"), NOISE)
def test_noise_of_training_alone_is_refused_by_its_key_and_taken_without_it(
    tmp_path: Path, model_type: str, rates: dict[str, float], key: str
) -> None:
    tiny_model(model_type, **rates).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{key} is {rates[key]}: training would") as caught:
        create(tmp_path).initialize()
    assert caught.value.field == "model.config_overrides"
    assert caught.value.remedy == f"set model.config_overrides: {{{key}: 0.0}}"
    engine = create(tmp_path, **{key: 0.0})
    engine.initialize()
    is_right(engine, tmp_path)
    engine.close()


def test_a_model_with_noise_infers(tmp_path: Path) -> None:
    tiny_model("qwen3", attention_dropout=0.1).save_pretrained(tmp_path)
    config = EngineConfig(model=ModelSource(path=str(tmp_path)), optimizer=None)
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    engine.close()


def test_a_router_that_always_samples_in_training_is_refused_without_a_cure(tmp_path: Path) -> None:
    """PhiMoE's jitter is a threshold of its inference too.

    An override would change the model.
    """
    tiny_model("phimoe").save_pretrained(tmp_path)
    for overrides in ({}, {"router_jitter_noise": 0.0}):
        with pytest.raises(ConfigError, match="sparsemixer") as caught:
            create(tmp_path, **overrides).initialize()
        assert "config_overrides" not in caught.value.remedy


@pytest.mark.parametrize(
    ("model_type", "rates"), [("opt", {"dropout": 0.1}), ("mixtral", {"router_jitter_noise": 0.2})]
)
def test_the_check_at_start_sees_noise_whose_key_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, rates: dict[str, float]
) -> None:
    tiny_model(model_type, **rates).save_pretrained(tmp_path)
    monkeypatch.setattr(model_module, "refuse_noise", lambda *_, **__: None)
    with pytest.raises(
        UnsupportedCapability, match="in training mode differ from those in inference"
    ):
        create(tmp_path).initialize()
