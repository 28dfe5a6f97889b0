"""Tests of the keys of a model's configuration that act only in training."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, DbrxConfig, GPTNeoXConfig, Qwen3Config

from engine_api.errors import ConfigError
from engine_api.hf_noise import noise_rates, refuse_noise


def test_rates_are_found_at_every_depth_and_those_of_other_heads_are_not():
    nested = DbrxConfig(
        ffn_config={"moe_jitter_eps": 0.01}, attn_config={"attn_pdrop": 0.1}, resid_pdrop=0.2
    )
    assert noise_rates(nested) == {
        "resid_pdrop": 0.2,
        "attn_config.attn_pdrop": 0.1,
        "ffn_config.moe_jitter_eps": 0.01,
    }
    assert noise_rates(GPTNeoXConfig(classifier_dropout=0.1)) == {}
    assert noise_rates(Qwen3Config(attention_dropout=1)) == {"attention_dropout": 1.0}


def test_a_key_that_no_override_reaches_is_to_be_set_in_the_file():
    with pytest.raises(
        ConfigError, match=r"set ffn_config.moe_jitter_eps: 0.0 in the model's config.json"
    ):
        refuse_noise(DbrxConfig(ffn_config={"moe_jitter_eps": 0.01}), where="engine-fsdp")
    composite = AutoConfig.for_model("gemma3", text_config={"attention_dropout": 0.1})
    with pytest.raises(ConfigError, match=r"set attention_dropout: 0.0 in the model's config.json"):
        refuse_noise(composite, where="engine-fsdp")


def test_a_model_without_noise_is_taken():
    refuse_noise(Qwen3Config(), where="engine-fsdp")
