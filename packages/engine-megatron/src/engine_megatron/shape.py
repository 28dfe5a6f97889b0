"""A model's architecture, read from a Hugging Face ``config.json``.

Models that this engine would compute wrongly are refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine_api import hf_config
from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_overrides import override
from engine_megatron.te import Spec

Kind = Literal["language_model", "value_model"]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# Sizes in config.json. transformers accepts a list of sizes, one per layer, which Megatron has not.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes and features of an architecture that the mapping and the model need.

    Attributes:
        std: standard deviation of random weights.
        experts: number of experts of a layer, 0 for a dense model.
        spec: the layers that the model is made of; each spec names its parameters differently.
    """

    family: str
    kind: Kind
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    std: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    value_bias: bool
    max_positions: int
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    norm_topk_prob: bool = False
    spec: Spec = "local"

    def widths(self, tensor: int, expert_tensor: int) -> dict[str, int]:
        """Return the side lengths of the matrices on one of the ranks that split them, by name.

        ``tensor`` ranks split a layer and ``expert_tensor`` ranks split each expert.
        """
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        if self.experts:
            inner = self.expert_intermediate // expert_tensor
        else:
            inner = self.intermediate // tensor
        return {
            "hidden size": self.hidden,
            "width of queries": queries // tensor,
            "width of queries, keys and values": (queries + 2 * keys) // tensor,
            "intermediate size": inner,
        }


def read_hf_config(source: ModelSource, folder: str) -> Any:
    """Return the configuration as transformers reads it, with overrides applied.

    Raises ``ConfigError`` for options and files that this engine cannot use.
    """
    if source.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code", "this engine has its own model", remedy="leave it out"
        )
    if source.attention not in ("auto", "sdpa"):
        raise ConfigError(
            "model.attention", f"unknown kernel {source.attention!r}", remedy="auto or sdpa"
        )
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ConfigError(
            "model.path", f"{file} is not there", remedy="give a folder that save_pretrained wrote"
        )
    config = hf_config.read_hf_config(
        folder, remedy=f"give a folder that save_pretrained wrote, of {', '.join(FAMILIES)}"
    )
    override(config, source.config_overrides)
    return config


def refuse_other_models(config: Any) -> None:
    """Raise ``ConfigError`` for models that have no mapping or would be computed wrongly."""
    file = Path(config.name_or_path) / "config.json"
    family = config.model_type
    if family not in FAMILIES:
        raise ConfigError(
            "model.path",
            f"{file} is of type {family!r}",
            why="this engine has no mapping for it",
            remedy=f"give one of {', '.join(FAMILIES)}, or use another backend",
        )
    _check_numbers(config, file)
    rope = _rope(config)
    wrong = {
        "a sliding window or other attention that is not full": _is_windowed(config),
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "an activation that is not silu": config.hidden_act != "silu",
        f"RoPE of type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        "RoPE on a part of each head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "quantized weights": getattr(config, "quantization_config", None),
        "a bias on the output projection": family != "qwen2"
        and getattr(config, "attention_bias", False),
        "a bias in the MLP": getattr(config, "mlp_bias", False),
        # Megatron refuses it: a softmax over one logit has no gradient.
        "a single expert per token, its weight normalized": family == "qwen3_moe"
        and config.num_experts_per_tok == 1
        and config.norm_topk_prob,
        "dense layers among layers of experts": getattr(config, "mlp_only_layers", None)
        or getattr(config, "decoder_sparse_step", 1) != 1,
    }
    if found := [name for name, there in wrong.items() if there]:
        raise ConfigError(
            "model.path",
            f"{file} asks for {', '.join(found)}",
            why="this engine would compute it wrongly",
            remedy="use another backend for this model",
        )


def _check_numbers(config: Any, file: Path) -> None:
    """Raise ``ConfigError`` for a number of the architecture that is missing or none."""
    sizes = _SIZES + (_EXPERT_SIZES if config.model_type == "qwen3_moe" else ())
    found = {key: getattr(config, key, None) for key in (*sizes, *_OPTIONAL_SIZES)}
    wrong = [
        f"expected an integer as {key}, got {value!r}"
        for key, value in found.items()
        if type(value) is not int and not (value is None and key in _OPTIONAL_SIZES)
    ]
    reals = {
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "rope_theta in rope_parameters": _rope(config).get("rope_theta"),
    }
    wrong += [
        f"expected a finite number as {key}, got {value!r}"
        for key, value in reals.items()
        if type(value) not in (int, float) or not math.isfinite(value)
    ]
    if wrong:
        raise ConfigError(
            "model.path",
            f"{file}: {'; '.join(wrong)}",
            remedy="correct the file, or fetch it again",
        )


def _is_windowed(config: Any) -> bool:
    """Return True if a layer attends to less than all earlier tokens.

    Qwen3-MoE's window applies to every layer, independently of the layer types.
    """
    types = getattr(config, "layer_types", None)
    if types is not None and config.model_type != "qwen3_moe":
        return any(kind != "full_attention" for kind in types)
    slides = getattr(config, "use_sliding_window", None)
    # Qwen3-MoE's switch has an effect only while its file is read.
    if slides is None or config.model_type == "qwen3_moe":
        slides = slides or getattr(config, "sliding_window", None) is not None
    return slides or any(kind != "full_attention" for kind in types or ())


def _rope(config: Any) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.rope_parameters or {}
    return rope


def shape_of(config: Any, kind: Kind, spec: Spec = "local") -> Shape:
    """Return the architecture of a configuration that `refuse_other_models` accepts."""
    heads = config.num_attention_heads
    family = config.model_type
    return Shape(
        family=family,
        kind=kind,
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        eps=float(config.rms_norm_eps),
        rope_base=float(_rope(config)["rope_theta"]),
        std=float(config.initializer_range),
        tied=bool(config.tie_word_embeddings) and kind == "language_model",
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        value_bias=bool(getattr(config, "token_classification_bias", True)),
        max_positions=int(config.max_position_embeddings),
        spec=spec,
        **_experts(config),
    )


def _experts(config: Any) -> dict[str, Any]:
    if config.model_type != "qwen3_moe":
        return {}
    return {
        "experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "expert_intermediate": config.moe_intermediate_size,
        "norm_topk_prob": bool(config.norm_topk_prob),
    }
