"""Every causal language model in transformers.

``local`` generates with the model's own log-probs, or refuses the model.
"""

from __future__ import annotations

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
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine_api.config import ModelSource
from engine_api.errors import EngineError, RolloutError
from engine_api.hf_folder import read_saved_tensors
from engine_api.hf_names import pieces_of, saved_buffers
from engine_api.registry import RolloutRegistry
from engine_api.rollout import SamplingParams
from engine_trainer.rollouts.attention import decode_attention

NEAR = 1e-4  # nats: float32 in two orders of summation
PROMPTS = [ids.tolist() for ids in documents()]  # of different lengths: two are padded
SAMPLING = SamplingParams(n=3, max_new_tokens=9, seed=1)

# Those that must not be refused; whatever else is taken must be right as well.
TAKEN = models_of("local", "cpu")

# In transformers its cache has a window and its attention has none, so that generation differs from
# the forward pass.
NOT_ITSELF = {"moshi"}


def export(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    memory = dict(model.named_parameters()) | saved_buffers(model)
    for name, pieces in pieces_of(model, read_saved_tensors(folder)).items():
        for piece in pieces:
            yield piece.name, piece.view(memory[name].data).clone()


def served(folder):
    rollout = RolloutRegistry.create(
        name="local", device="cpu", model=ModelSource(path=str(folder)), pad_token_id=0
    )
    rollout.update_weights(export(folder), 1)
    return rollout


def is_right(rollout, folder, prompts=PROMPTS):
    model = oracle(str(folder))
    for completion in rollout.generate(prompts, SAMPLING):
        tokens = list(completion.tokens)
        own = log_probs(model, torch.tensor([*prompts[completion.prompt_index], *tokens]))[
            -len(tokens) :
        ]
        assert float((own - torch.tensor(completion.log_probs)).abs().max()) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    some_nightly([name for name in MODEL_TYPES if name not in NOT_ITSELF], taken=TAKEN),
)
def test_a_model_generates_with_its_own_log_probs_or_is_refused_before_it_generates(
    tmp_path, model_type
):
    tiny_model(model_type).save_pretrained(tmp_path)
    try:
        rollout = served(tmp_path)
    except EngineError:
        if model_type in TAKEN:
            raise
        return
    is_right(rollout, tmp_path)
    rollout.close()


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba"])
def test_a_cache_that_cannot_be_repeated_is_named(tmp_path, model_type):
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="LinearAttentionLayer"):
        served(tmp_path)


def test_a_temperature_by_place_in_the_batch_is_not_moved_by_padding(tmp_path):
    """Scale queries without RoPE in Llama 4 by position, where transformers counts padding too."""
    changes = {
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 1.0,
        "no_rope_layers": [0, 1, 0, 1],
    }
    tiny_model("llama4_text", **changes).save_pretrained(tmp_path)
    is_right(served(tmp_path), tmp_path)


def test_indexed_attention_sees_the_chosen_places_alone():
    generator = torch.Generator().manual_seed(0)
    rows, heads, new, past, size, chosen = 2, 4, 3, 9, 8, 5
    query = torch.randn(rows, heads, new, size, generator=generator)
    key, value = (torch.randn(rows, heads, past, size, generator=generator) for _ in range(2))
    causal = torch.ones(new, past, dtype=torch.bool).tril(past - new).expand(rows, 1, new, past)
    places = torch.stack(
        [torch.randperm(past, generator=generator)[:chosen] for _ in range(rows * new)]
    )
    places = places.reshape(rows, new, chosen).int()
    module = torch.nn.Module()
    module.is_causal = True
    got, _ = decode_attention(module, query, key, value, causal, scaling=0.3, indices=places)
    only = torch.zeros(rows, new, past, dtype=torch.bool).scatter(-1, places.long(), True)[:, None]
    want, _ = sdpa_attention_forward(module, query, key, value, causal & only, scaling=0.3)
    torch.testing.assert_close(got, want)
