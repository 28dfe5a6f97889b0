"""Size of a cache for a batch, from a configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, PreTrainedConfig, Qwen3Config

from engine_api.config import ModelSource
from rollout_fp8.vllm.cache import BLOCK, bytes_for

# Its configuration names no heads of keys and values.
GPT2 = GPT2Config(n_layer=3, n_head=4, n_embd=64, n_positions=256)
QWEN3 = Qwen3Config(
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_size=64,
    max_position_embeddings=256,
)


@pytest.mark.parametrize(("config", "width"), [(GPT2, 4 * 16), (QWEN3, 2 * 32)])
def test_a_cache_holds_keys_and_values_of_a_whole_batch(
    tmp_path: Path, config: PreTrainedConfig, width: int
) -> None:
    config.save_pretrained(tmp_path)
    found = bytes_for(
        ModelSource(path=str(tmp_path)), 5, positions=None, dtype="bfloat16", parallel=1
    )
    blocks = 5 * 2 + 1  # of 256 positions each, and vLLM's empty one
    assert found == blocks * BLOCK * 2 * 3 * width * 2
    halved = bytes_for(
        ModelSource(path=str(tmp_path)), 5, positions=100, dtype="float32", parallel=2
    )
    assert halved == (5 + 1) * BLOCK * 2 * 3 * width // 2 * 4
