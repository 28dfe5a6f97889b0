"""Other values for each key of a family's ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tiny_models import tiny_config
from transformers import PreTrainedConfig

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Values that a key may have besides the tiny model's, by the type of its value.
_OTHERS: dict[type, Any] = {
    bool: lambda value: [not value],
    int: lambda value: [value + 1, 2 * value, 1],
    float: lambda value: [1.5 * value + 0.1],
    str: lambda value: ["gelu"] if value == "silu" else [],
    type(None): lambda _: [True, 2, 0.5],
    list: lambda value: [value[::-1], []],
}
# Keys of the vocabulary, of text, of caches and of losses that no engine has.
_NO_ARITHMETIC = (
    "token",
    "cache",
    "output_",
    "label",
    "dtype",
    "return_",
    "chunk_size",
    "pretraining",
)


def change_keys(family: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys of a family's configuration, and further keys of other families, with values.

    Args:
        family: ``model_type`` of the tiny model.
        keys: keys that the tiny model has in place of its usual ones.
    """
    config = tiny_config(family, **keys).to_dict()
    extra = {
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "layer_types": None,
    }
    extra |= {"use_sliding_window": False, "logits_scaling": 1.0, "attn_logit_softcapping": None}
    for key, value in (extra | config).items():
        if key not in PreTrainedConfig().to_dict() and not any(
            part in key for part in _NO_ARITHMETIC
        ):
            for other in _OTHERS.get(type(value), lambda _: [])(value):
                yield key, other
    rope = config["rope_parameters"]
    for kind in ("linear", "dynamic", "llama3", "longrope", "proportional"):
        yield "rope_parameters", {**LLAMA3, **rope, "rope_type": kind, "factor": 3.0}
    for name in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "truncate"):
        yield "rope_parameters", {**rope, **YARN, name: 0.0 if name == "truncate" else 1.5}
