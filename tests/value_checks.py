"""The values and the training of a value model on one engine, beside those of engine-fsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experts_ranks import SquaredValues
from tested_device import NEAR
from tiny_models import documents, tiny_config, tiny_model

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    ModelSource,
    OptimizerConfig,
)


def write_value_model(folder: Path, family: str, **keys: Any) -> str:
    """Write a tiny value model with random weights, and return its path."""
    from transformers import AutoModelForTokenClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(family, num_labels=1, **keys)
        model = AutoModelForTokenClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def compare_values(
    pools: Any, path: str, backend: str, layout: dict[str, int], **config: Any
) -> None:
    """Compare each value, gradient and saved tensor, on all ranks of ``pools``.

    Args:
        pools: pools of one rank and of the layout's ranks.
        path: folder of the value model.
        backend: the engine.
        layout: sizes of its parallelism.
        **config: further fields of its configuration.
    """
    alone, ranks = pools
    step = "experts_ranks:step"
    (want,) = alone.run(step, path=path, layout={}, model_type="value_model")
    seen: set[int] = set()
    for found in ranks.run(
        step, path=path, layout=layout, backend=backend, model_type="value_model", **config
    ):
        seen |= set(found.log_probs)
        for number, values in found.log_probs.items():
            torch.testing.assert_close(values, want.log_probs[number], rtol=NEAR, atol=NEAR)
        assert found.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            worst = float((found.gradients[name] - gradient).abs().max())
            assert worst <= NEAR * float(gradient.abs().max()), f"{name}: {worst}"
        assert found.loss == pytest.approx(want.loss, rel=NEAR)
        assert found.norm == pytest.approx(want.norm, rel=NEAR)
    assert seen == set(want.log_probs)


def check_new_head(backend: str, folder: Path) -> None:
    """Check the folder of a value model that an engine makes of a language model."""
    from transformers import AutoModelForTokenClassification

    # The value model's head is not tied to the embedding, as the language model's is.
    tiny_model("qwen3", tie_word_embeddings=True).save_pretrained(folder / "policy")
    config = EngineConfig(model=ModelSource(path=str(folder / "policy")))
    engine = EngineRegistry.create(
        backend=backend, model_type="value_model", device="cpu", config=config
    )
    engine.initialize()
    engine.save_hf(folder / "critic")
    weights = {name: one.clone() for name, one in engine.get_per_tensor_param()}
    engine.close()
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic")
    saved = critic.state_dict()
    assert weights.keys() == saved.keys()
    assert all(torch.equal(saved[name], one) for name, one in weights.items())
    assert saved["score.weight"].any()
    assert critic.config.architectures == ["Qwen3ForTokenClassification"]


def check_adapters(backend: str, folder: Path) -> None:
    """Compare the values of an engine with adapters on all layers with its saved folder's."""
    from transformers import AutoModelForTokenClassification

    config = EngineConfig(
        model=ModelSource(path=write_value_model(folder / "model", "qwen3")),
        lora=LoraConfig(rank=4, alpha=8.0, target_modules="all-linear"),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.1),
    )
    engine = EngineRegistry.create(
        backend=backend, model_type="value_model", device="cpu", config=config
    )
    engine.initialize()
    rows = [
        {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
        for ids in documents()
    ]
    batch = Batch.pack(rows)
    first = engine.infer_batch(batch).values
    for _ in range(2):
        engine.train_batch(batch, SquaredValues())
    values = engine.infer_batch(batch).values
    assert float((values - first).abs().max()) > 0.01
    adapters = {name: one.clone() for name, one in engine.get_per_tensor_param(adapter="only")}
    assert all(bool(one.any()) for one in adapters.values())
    engine.save_hf(folder / "merged")
    engine.close()
    merged = AutoModelForTokenClassification.from_pretrained(folder / "merged").eval()
    parts = values.split([len(ids) for ids in documents()])
    for ids, found in zip(documents(), parts, strict=True):
        with torch.no_grad():
            scores = merged(input_ids=ids[None]).logits[0, :, 0]
        torch.testing.assert_close(found[1:], scores[:-1], rtol=1e-4, atol=1e-4)
