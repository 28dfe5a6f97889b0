"""Small Qwen3 that ``local`` serves, with prompts for it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_api.rollout import SamplingParams

CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    tie_word_embeddings=False,
)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11]]
SAMPLING = SamplingParams(n=2, max_new_tokens=8, temperature=0.7, seed=3)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights that ``seed`` makes, by name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG)
    return {name: p.detach() for name, p in model.named_parameters()}
