"""A model's architecture, read from a Hugging Face ``config.json``.

Models that this engine would compute wrongly are refused here.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine_api import hf_config
from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_layers import count_experts
from engine_api.hf_overrides import override
from engine_api.hf_vision import refuse_vision
from engine_megatron.mechanisms import (
    EVERY_LAYER_WINDOWS,
    MECHANISMS,
    OF_FAMILIES,
    SCALED,
    SIGMOIDS,
    SINKS,
    refuse,
    rope_parameters,
)
from engine_megatron.te import Spec

Kind = Literal["language_model", "value_model"]
FAMILIES = (
    "llama",
    "cwm",
    "seed_oss",
    "mistral",
    "ministral",
    "granite",
    "granite_swa",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "dots1",
    "glm4_moe",
    "deepseek_v3",
)
# Sizes in config.json. transformers accepts a list of sizes, one per layer, which Megatron has not.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_QWEN_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)
_SIGMOID_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
)
# Further sizes by family.
_FAMILY_SIZES = {
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": _QWEN_EXPERTS,
    "qwen2_moe": (*_QWEN_EXPERTS, "shared_expert_intermediate_size"),
    "dots1": _SIGMOID_EXPERTS,
    "glm4_moe": _SIGMOID_EXPERTS,
    "deepseek_v3": (
        *_SIGMOID_EXPERTS,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
}
# Numbers that the kinds of RoPE need, and those that they may have.
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
)


_FACTORS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
# Constants of gpt-oss's gate in transformers before 5.19, which has no keys for them. Later
# releases take them where config.json is silent.
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary positions.

    Attributes:
        frequencies: angle per position of each pair of dimensions.
        factor: factor of cosine and sine.
        score_factor: factor of the scores in latent attention (DeepSeek's YaRN), in addition.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    score_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: width of the latent queries, or None where queries have no latent.
        rank: width of the latent keys and values.
        plain, rotary: widths of a head's queries and keys without and with rotary positions.
        value: width of a head's values.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The router and the experts of a mixture of experts.

    Attributes:
        sparse: for each layer whether it has experts or one dense MLP.
        normalized: whether the weights of a token's experts add up to one.
        sigmoid: whether the router's scores are a sigmoid of its logits, and not a softmax. Then a
            saved buffer, which is not trained, is added to them where experts are chosen.
        groups, top_groups: number of groups of experts, and of those that a token's experts are
            from; 0 where any expert may be chosen.
        scale: factor of the experts' sum.
        shared: intermediate size of the expert that every token has, 0 for none.
        gated: whether the shared expert has a gate.
        biased: whether router and experts have biases, and the experts gpt-oss's activation with
            the gain ``alpha``, clamped at ``clamp``.
    """

    experts: int
    top_k: int
    intermediate: int
    sparse: tuple[bool, ...]
    normalized: bool = True
    sigmoid: bool = False
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0
    shared: int = 0
    gated: bool = False
    biased: bool = False
    alpha: float = 1.0
    clamp: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors of what a model computes (Granite).

    Attributes:
        embeddings: factor of the embeddings.
        layers: factor of what attention, and the MLP, add to the residual stream.
        scores: factor of a query's product with a key, or None for ``1 / sqrt(head_dim)``.
        logits: divisor of the logits.
    """

    embeddings: float = 1.0
    layers: float = 1.0
    scores: float | None = None
    logits: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes and features of an architecture that the mapping and the model need.

    Attributes:
        std: standard deviation of random weights.
        windows: for each layer the number of tokens that a token attends to, itself included;
            None for all of its document before it.
        sinks: whether each head has a learned score that only takes probability away.
        latent: sizes of latent attention; None for heads of one width with grouped keys and values.
        mixture: router and experts; None for a dense model.
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
    rope: Rope
    std: float
    tied: bool
    qk_norm: bool
    value_bias: bool
    max_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    windows: tuple[int | None, ...] = ()
    sinks: bool = False
    factors: Factors = Factors()
    latent: Latent | None = None
    mixture: Mixture | None = None
    spec: Spec = "local"

    @property
    def experts(self) -> int:
        """The number of experts of a layer, 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.experts

    @property
    def window(self) -> int | None:
        """The window of the layers that have one, or None if no layer has."""
        return next((window for window in self.windows if window is not None), None)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts and not a dense MLP."""
        return self.mixture is not None and self.mixture.sparse[layer]

    def widths(self, tensor: int, expert_tensor: int) -> dict[str, int]:
        """Return the side lengths of the matrices on one of the ranks that split them, by name.

        ``tensor`` ranks split a layer and ``expert_tensor`` ranks split each expert.
        """
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        inner = {"intermediate size": self.intermediate // tensor}
        if self.mixture is not None:
            experts = {"experts' intermediate size": self.mixture.intermediate // expert_tensor}
            inner = experts if all(self.mixture.sparse) else inner | experts
            if self.mixture.shared:
                inner["shared expert's intermediate size"] = self.mixture.shared // tensor
        return {
            "hidden size": self.hidden,
            "width of queries": queries // tensor,
            "width of queries, keys and values": (queries + 2 * keys) // tensor,
            **inner,
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
    refuse_vision(config, (), "engine-megatron")
    override(config, source.config_overrides)
    return config


def refuse_other_models(config: Any) -> None:
    """Raise an error for models that have no mapping or would be computed wrongly.

    It is ``UnsupportedCapability`` with the name of the mechanism that this engine lacks, and
    ``ConfigError`` for a family without a mapping and for numbers that are no sizes.
    """
    file = Path(config.name_or_path) / "config.json"
    family = config.model_type
    refuse(config, MECHANISMS)
    if family not in FAMILIES:
        raise ConfigError(
            "model.path",
            f"{file} is of type {family!r}",
            why="this engine has no mapping for it",
            remedy=f"give one of {', '.join(FAMILIES)}, or use another backend",
        )
    _check_numbers(config, file)
    refuse(config, OF_FAMILIES)


def _check_numbers(config: Any, file: Path) -> None:
    """Raise ``ConfigError`` for a number of the architecture that is missing or none."""
    family = config.model_type
    sizes = _SIZES + _FAMILY_SIZES.get(family, ())
    optional = _OPTIONAL_SIZES + (("q_lora_rank",) if family == "deepseek_v3" else ())
    found = {key: getattr(config, key, None) for key in (*sizes, *optional)}
    wrong = [
        f"expected an integer as {key}, got {value!r}"
        for key, value in found.items()
        if type(value) is not int and not (value is None and key in optional)
    ]
    wrong += [
        f"expected 1 or more as {key}, got {found[key]}"
        for key in _FAMILY_SIZES.get(family, ())
        if type(found[key]) is int and found[key] < (key != "first_k_dense_replace")
    ]
    reals = {
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        **_rope_numbers(config),
    }
    if family in SIGMOIDS:
        reals["routed_scaling_factor"] = config.routed_scaling_factor
    if family in SCALED:
        reals |= {key: getattr(config, key, None) for key in _FACTORS}
    if family == "gpt_oss":
        reals |= _gate(config)
    wrong += [
        f"expected a finite number as {key}, got {value!r}"
        for key, value in reals.items()
        if type(value) not in (int, float) or not math.isfinite(value)
    ]
    wrong += [] if wrong else _uneven_experts(config)
    if not wrong and family in SCALED and not config.logits_scaling:
        wrong.append("logits_scaling is 0, which no logits are divided by")
    types = getattr(config, "layer_types", None)
    if not wrong and _head_dim(config) % 2:
        wrong.append(f"heads of {_head_dim(config)} dimensions, which RoPE cannot pair")
    if not wrong and types is not None and len(types) < config.num_hidden_layers:
        wrong.append(f"expected {config.num_hidden_layers} layer_types, got {len(types)}")
    if wrong:
        raise ConfigError(
            "model.path",
            f"{file}: {'; '.join(wrong)}",
            remedy="correct the file, or fetch it again",
        )


def _rope_numbers(config: Any) -> dict[str, Any]:
    """Return the numbers of RoPE that must be finite, by name."""
    rope = rope_parameters(config)
    needed = ("rope_theta", *_ROPE_NUMBERS.get(str(rope.get("rope_type")), ()))
    given = [key for key in _OPTIONAL_ROPE_NUMBERS if rope.get(key) is not None]
    return {f"{key} in rope_parameters": rope.get(key) for key in (*needed, *given)}


def _gate(config: Any) -> dict[str, Any]:
    """Return the numbers of gpt-oss's gate, by the names of transformers' keys."""
    return {key: getattr(config, key, usual) for key, usual in _GATE.items()}


def _uneven_experts(config: Any) -> list[str]:
    """Return what is wrong with a router whose numbers do not fit each other, in words."""
    family = config.model_type
    if family not in _FAMILY_SIZES:
        return []
    experts = count_experts(config)
    wrong: list[str] = []
    if config.num_experts_per_tok > experts:
        wrong.append(f"num_experts_per_tok is {config.num_experts_per_tok} of {experts} experts")
    if family in SIGMOIDS:
        if experts % config.n_group or config.topk_group > config.n_group:
            wrong.append(
                f"{experts} experts in n_group={config.n_group}, of which topk_group="
                f"{config.topk_group}"
            )
        if config.routed_scaling_factor <= 0:
            wrong.append(f"routed_scaling_factor is {config.routed_scaling_factor}")
    return wrong


def shape_of(config: Any, kind: Kind, spec: Spec = "local") -> Shape:
    """Return the architecture of a configuration that `refuse_other_models` accepts."""
    heads = config.num_attention_heads
    family = config.model_type
    mixture = _mixture(config)
    head_dim = _head_dim(config)
    return Shape(
        family=family,
        kind=kind,
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        eps=float(config.rms_norm_eps),
        rope=_rope(config, head_dim),
        std=float(config.initializer_range),
        tied=bool(config.tie_word_embeddings) and kind == "language_model",
        qk_norm=family in ("qwen3", "qwen3_moe", "dots1")
        or bool(getattr(config, "use_qk_norm", False)),
        value_bias=bool(getattr(config, "token_classification_bias", True)),
        max_positions=int(config.max_position_embeddings),
        activation=config.hidden_act,
        windows=_windows(config),
        sinks=family in SINKS,
        factors=_factors(config) if family in SCALED else Factors(),
        latent=_latent(config) if family == "deepseek_v3" else None,
        mixture=mixture if mixture is not None and any(mixture.sparse) else None,
        spec=spec,
        **_biases(config),
    )


def _head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def _biases(config: Any) -> dict[str, bool]:
    family = config.model_type
    if family in ("qwen2", "qwen2_moe"):
        return {"qkv_bias": family == "qwen2" or bool(config.qkv_bias)}
    biased = bool(getattr(config, "attention_bias", False))
    output = biased and family != "glm4_moe"
    if family == "seed_oss":
        output = bool(config.attention_out_bias)
    mlp = bool(getattr(config, "mlp_bias", False))
    return {"qkv_bias": biased, "output_bias": output, "mlp_bias": mlp}


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Those of Mistral, Mixtral and Qwen3-MoE are of every layer, whatever the layers' types are.
    """
    window = getattr(config, "sliding_window", None)
    layers = range(config.num_hidden_layers)
    if config.model_type in EVERY_LAYER_WINDOWS:
        return tuple(window for _ in layers)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    return tuple(window if types[layer] == "sliding_attention" else None for layer in layers)


def _rope(config: Any, head_dim: int) -> Rope:
    """Return the frequencies that transformers computes for the configuration."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        # In float32, as transformers and servers compute them: far positions multiply a difference.
        part = rope.get("partial_rotary_factor") or 1.0
        width = int(head_dim * part)
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return Rope(frequencies=tuple((1.0 / rope["rope_theta"] ** exponents).tolist()))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Families without this key have heads that divide the hidden size.
    own = copy.deepcopy(config)
    own.head_dim = head_dim
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](own, "cpu")
    scores = 1.0
    if config.model_type == "deepseek_v3" and (scale := rope.get("mscale_all_dim")):
        # Twice the logarithmic factor of YaRN (arXiv:2309.00071, eq. 22): for queries and for keys.
        grown = 0.1 * scale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0
        scores = grown * grown
    return Rope(frequencies=tuple(frequencies.tolist()), factor=float(factor), score_factor=scores)


def _factors(config: Any) -> Factors:
    return Factors(
        embeddings=float(config.embedding_multiplier),
        layers=float(config.residual_multiplier),
        scores=float(config.attention_multiplier),
        logits=float(config.logits_scaling),
    )


def _latent(config: Any) -> Latent:
    return Latent(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotary=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )


def _mixture(config: Any) -> Mixture | None:
    family = config.model_type
    layers = range(config.num_hidden_layers)
    if family not in _FAMILY_SIZES:
        return None
    if family in ("mixtral", "gpt_oss"):
        gate = _gate(config) if family == "gpt_oss" else None
        return Mixture(
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            intermediate=config.intermediate_size,
            sparse=tuple(True for _ in layers),
            biased=gate is not None,
            alpha=1.0 if gate is None else float(gate["swiglu_alpha"]),
            clamp=None if gate is None else float(gate["swiglu_limit"]),
        )
    if family in SIGMOIDS:
        limited = config.topk_group < config.n_group
        return Mixture(
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            intermediate=config.moe_intermediate_size,
            sparse=tuple(layer >= config.first_k_dense_replace for layer in layers),
            normalized=bool(config.norm_topk_prob),
            sigmoid=True,
            groups=config.n_group if limited else 0,
            top_groups=config.topk_group if limited else 0,
            scale=float(config.routed_scaling_factor),
            shared=config.moe_intermediate_size * config.n_shared_experts,
        )
    dense = set(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    return Mixture(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        normalized=bool(config.norm_topk_prob),
        shared=config.shared_expert_intermediate_size if family == "qwen2_moe" else 0,
        gated=family == "qwen2_moe",
    )
