"""A model folder (config only, weights from a seed) and an engine over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_api import EngineConfig, EngineRegistry, Memory, ModelSource, OptimizerConfig

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "pad_token_id": None,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
SHAPE_TEXT = "Qwen3, 6 layers, hidden 384, vocabulary 4096, float32"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds only config.json."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SHAPE))
    torch.set_num_threads(2)
    return path


@pytest.fixture
def make_engine(folder: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that builds an engine with given ``Memory`` fields, closed at the end."""
    engines: list[Any] = []

    def make(**memory: Any) -> Any:
        config = EngineConfig(
            model=ModelSource(path=str(folder), init="random"),
            optimizer=OptimizerConfig(lr=1e-4),
            memory=Memory(**memory),
        )
        engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
