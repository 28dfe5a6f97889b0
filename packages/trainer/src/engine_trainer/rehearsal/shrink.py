"""A small model of the family of a large one, with the same mechanisms and the same vocabulary.

Sizes are replaced in the model's own ``config.json``; every other key, such as a cap, a scaling of
positions or a window's place, stays. Of the layers some are kept, so that each kind of layer is
among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_config import unbuildable
from engine_api.hf_vision import find_auto_class
from engine_trainer.utils.hf_models import MODEL_KEY, hf_config, require_source

HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
LAYERS = 2
"""Least number of layers. A model with more kinds of layers has one of each."""

# Largest values of the sizes of a small model, by their keys in the config.json of any family.
_LARGEST: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"), HEAD_DIM),
    "qk_head_dim": 2 * HEAD_DIM,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("mlp_hidden_size", "intermediate_size_mlp"), 2 * HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    "moe_num_experts": 8,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 2),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), 32),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 4,
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_REMEDY = "give --model FOLDER with a small model of the family that has this tokenizer's ids"


def write_small_model(source: ModelSource, folder: Path) -> dict[str, Any]:
    """Write the ``config.json`` of a small model of the same family, and return what changed.

    Of ``source`` only the ``config.json`` is read.

    Returns the changed keys, each with its value in the large model and in the small one.

    Raises ``ConfigError`` where there is no ``config.json``, and where the small model would not
    consist of the same kinds of modules as the large one.
    """
    try:
        require_source(source.path, MODEL_KEY, source.revision)
        config = hf_config(source)
    except ConfigError as error:
        raise ConfigError(
            MODEL_KEY, error.what, why=error.why, remedy=describe_needs(source)
        ) from error
    large: dict[str, Any] = config.to_dict()
    small = shrink(large)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")
    changed = ModelSource(path=str(folder), trust_remote_code=source.trust_remote_code)
    kinds, others = _kinds_of(source), _kinds_of(changed)
    if kinds != others:
        raise ConfigError(
            MODEL_KEY,
            f"the small model of {source.path!r} would not have the same mechanisms",
            why=f"only one of the two has {', '.join(sorted(kinds ^ others))}",
            remedy=_REMEDY,
        )
    return {
        key: (value, small[key]) for key, value in large.items() if small.get(key, value) != value
    }


def require_model(folder: Path) -> None:
    """Raise ``ConfigError`` for a folder without a ``config.json``."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "--model",
            f"there is no {folder / 'config.json'}",
            remedy="name a folder with the config.json of a small model; weights are not read",
        )


def describe_needs(source: ModelSource) -> str:
    """Return the remedy for a model that is not on this machine."""
    needs = "a rehearsal reads config.json and the tokenizer's files, and no weights"
    if source.path.startswith(("/", ".", "~")):
        return f"name a folder with them: {needs}; ~ is not expanded"
    return (
        f"{needs}: `hf download {source.path} --include '*.json' '*.model' '*.txt' --local-dir "
        "model`, and engine.model.path=model"
    )


def shrink(large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` with the sizes of a small model.

    The ratio of query heads to heads of keys and values stays near the large model's, and each
    kind of layer stays. A model with parts, such as ``text_config``, is shrunk part by part.
    """
    parts = {
        key: shrink(cast("Mapping[str, Any]", value))
        for key, value in large.items()
        if key.endswith("_config") and isinstance(value, Mapping)
    }
    sizes = {
        key: min(value, _LARGEST[key])
        for key, value in large.items()
        if key in _LARGEST and type(value) is int
    }
    return {**large, **sizes, **_heads(large), **_layers(large), **_rope(large, sizes), **parts}


def _heads(large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads of keys and values, fewer than those of queries where they are fewer."""
    heads = next((large[key] for key in _HEAD_COUNTS if type(large.get(key)) is int), None)
    groups = large.get("num_key_value_heads")
    if heads is None or type(groups) is not int:
        return {}
    small = min(heads, HEADS)
    if groups == heads or large.get("kv_lora_rank") is not None:
        return {"num_key_value_heads": small}
    return {"num_key_value_heads": 1 if groups == 1 else max(1, small // 2)}


def _layers(large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and every list with a value for each layer, cut to the kept."""
    name = next((key for key in _LAYER_COUNTS if type(large.get(key)) is int), None)
    if name is None:
        return {}
    count: int = large[name]
    lists = {
        key: cast("Sequence[Any]", value)
        for key, value in large.items()
        if isinstance(value, list) and len(cast("list[Any]", value)) == count > 1
    }
    first_of_kind: dict[str, int] = {}
    for layer in range(count):
        kind = json.dumps([values[layer] for values in lists.values()], default=str)
        first_of_kind.setdefault(kind, layer)
    least = min(count, max(LAYERS, _least_layers(large)))
    kept = sorted(first_of_kind.values())
    kept = sorted({*kept, *[i for i in range(count) if i not in kept][: least - len(kept)]})
    return {name: len(kept)} | {key: [values[i] for i in kept] for key, values in lists.items()}


def _least_layers(large: Mapping[str, Any]) -> int:
    """Return the number of layers after which a pattern that is not a list repeats."""
    steps = [
        value
        for key in ("decoder_sparse_step", "sliding_window_pattern", "full_attention_interval")
        if type(value := large.get(key)) is int
    ]
    return max([LAYERS, *steps])


def _rope(large: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return scalings of positions with a factor for each dimension, for fewer dimensions."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = large.get(key)
        if not isinstance(given, Mapping):
            continue
        values = cast("Mapping[str, Any]", given)
        cut = {
            name: _spread(cast("Sequence[float]", values[name]), _half(large, sizes))
            for name in ("long_factor", "short_factor")
            if isinstance(values.get(name), list)
        }
        if cut:
            found[key] = {**values, **cut}
    return found


def _half(large: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return half of the rotated dimensions of a head of the small model."""
    heads = next((sizes[key] for key in _HEAD_COUNTS if key in sizes), HEADS)
    head_dim = sizes.get("head_dim") or sizes.get("hidden_size", HIDDEN) // heads
    return math.floor(head_dim * float(large.get("partial_rotary_factor") or 1.0)) // 2


def _spread(values: Sequence[float], count: int) -> list[float]:
    return [values[i * len(values) // count] for i in range(count)]


def _kinds_of(source: ModelSource) -> set[str]:
    """Return the names of the classes of a model's modules, made without memory."""
    import torch

    config = hf_config(source)
    cls: Any = find_auto_class(config)
    try:
        with torch.device("meta"):
            model = cls.from_config(config, trust_remote_code=source.trust_remote_code)
    # Each family's own code reads the configuration, and may raise anything.
    except Exception as error:
        raise unbuildable(config, source.path, error, field=MODEL_KEY) from error
    return {type(module).__name__ for module in model.modules()}
