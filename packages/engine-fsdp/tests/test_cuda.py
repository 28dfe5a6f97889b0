"""Memory of a CUDA device while the engine is away, skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine_api.batch import Batch
from engine_api.config import EngineConfig, Memory, ModelSource, OptimizerConfig
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def small_engine(folder: Path, **memory: Any) -> Any:
    model = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaConfig(**model).save_pretrained(folder)
    config = EngineConfig(
        model=ModelSource(path=str(folder), init="random"),
        optimizer=OptimizerConfig(),
        memory=Memory(**memory),
    )
    engine = EngineRegistry.create(
        model_type="language_model", backend="fsdp2", device="cuda", config=config
    )
    engine.initialize()
    return engine


@pytest.mark.parametrize("offload", [False, True], ids=["between-calls", "optimizer-always"])
def test_a_checkpoint_that_is_loaded_while_the_engine_is_away_is_trained_on(
    tmp_path: Path, offload: bool
) -> None:
    batch = Batch.pack([{"input_ids": list(range(1, 40)), "loss_weight": [0.0] + [1.0] * 38}])
    engine = small_engine(tmp_path / "model", offload_optimizer=offload)
    engine.train_batch(batch, sft_loss)
    engine.save_checkpoint(tmp_path / "one")
    want = [engine.train_batch(batch, sft_loss).loss for _ in range(2)]
    engine.to("cpu")
    engine.load_checkpoint(tmp_path / "one")
    moments = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    # Not on the device, which other programs use meanwhile.
    assert {value.device.type for value in moments} == {"cpu"}
    engine.to("cuda")
    got = [engine.train_batch(batch, sft_loss).loss for _ in range(2)]
    engine.close()
    assert got == want


def test_what_moves_away_leaves_its_memory_to_others(tmp_path: Path) -> None:
    # Bytes of the embedding alone, in float32.
    size = 64 << 20
    model = {
        "vocab_size": 65536,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaConfig(**model).save_pretrained(tmp_path)
    config = EngineConfig(
        model=ModelSource(path=str(tmp_path), init="random"), optimizer=OptimizerConfig()
    )
    engine = EngineRegistry.create(
        model_type="language_model", backend="fsdp2", device="cuda", config=config
    )
    engine.initialize()
    before = torch.cuda.memory_reserved()
    engine.to("cpu")
    left = torch.cuda.memory_reserved()
    engine.to("cuda")
    engine.close()
    assert before - left > size, (before, left)
