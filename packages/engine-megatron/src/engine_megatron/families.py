"""The mapping from Hugging Face tensors to parts of Megatron parameters.

There is one table per family, which import and export both read. Megatron fuses queries, keys and
values group by group (``q q k v | q q k v | …``, one key head per group), and gate and up one after
the other. A tensor-parallel rank holds whole groups, and its own part of gate and of up. Hence a
saved tensor is, in a parameter's first dimension, a range of slots in each of several equal groups:
`Cut`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine_megatron.shape import Shape

# The division of a parameter's first dimension among the saved tensors.
Layout = Literal["whole", "groups", "halves"]
# The dimension of a saved tensor that is divided over tensor-parallel ranks.
Split = Literal["none", "rows", "columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of Megatron's parameters and the saved tensors in it, in their order.

    Attributes:
        parameter, saved: names inside a layer, or whole names; N is an expert's number.
        layout: the division of the parameter's first dimension among the saved tensors.
        split: the dimension of each saved tensor that is spread over tensor-parallel ranks.
        expert: the number of the expert that the rule belongs to; ``parameter`` has N for the
            expert's number on its rank.
        te: the parameter's name in Transformer Engine's layers if it differs; these have norms
            inside the linear layers.
    """

    parameter: str
    saved: tuple[str, ...]
    layout: Layout = "whole"
    split: Split = "none"
    expert: int | None = None
    te: str | None = None

    def named(self, shape: Shape) -> Rule:
        """Return the rule with its parameter's name in the spec of ``shape``."""
        return replace(self, parameter=self.te) if self.te and shape.spec == "te" else self

    def of_expert(self, number: int) -> Rule:
        """Return the rule of one expert, with its number in the saved names."""
        saved = tuple(name.replace("N", str(number)) for name in self.saved)
        return replace(self, saved=saved, expert=number)


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_INPUT_NORM = Rule(
    parameter="input_layernorm.weight",
    saved=("input_layernorm.weight",),
    te="self_attention.linear_qkv.layer_norm_weight",
)
_EXPERTS_NORM = Rule(
    parameter="pre_mlp_layernorm.weight", saved=("post_attention_layernorm.weight",)
)
_NORMS = (_INPUT_NORM, replace(_EXPERTS_NORM, te="mlp.linear_fc1.layer_norm_weight"))
_ATTENTION = (
    Rule(
        parameter="self_attention.linear_qkv.weight",
        saved=tuple(f"{name}.weight" for name in _QKV),
        layout="groups",
        split="rows",
    ),
    Rule(
        parameter="self_attention.linear_proj.weight",
        saved=("self_attn.o_proj.weight",),
        split="columns",
    ),
)
_QKV_BIAS = (
    Rule(
        parameter="self_attention.linear_qkv.bias",
        saved=tuple(f"{name}.bias" for name in _QKV),
        layout="groups",
        split="rows",
    ),
)
_QK_NORM = tuple(
    Rule(
        parameter=f"self_attention.{name}_layernorm.weight",
        saved=(f"self_attn.{name}_norm.weight",),
    )
    for name in "qk"
)
_MLP = (
    Rule(
        parameter="mlp.linear_fc1.weight",
        saved=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        layout="halves",
        split="rows",
    ),
    Rule(parameter="mlp.linear_fc2.weight", saved=("mlp.down_proj.weight",), split="columns"),
)

_ROUTER = Rule(parameter="mlp.router.weight", saved=("mlp.gate.weight",))
# A layer has these once per expert, with N as the expert's number.
_EXPERT = (
    Rule(
        parameter="mlp.experts.local_experts.N.linear_fc1.weight",
        saved=("mlp.experts.N.gate_proj.weight", "mlp.experts.N.up_proj.weight"),
        layout="halves",
        split="rows",
        te="mlp.experts.linear_fc1.weightN",
    ),
    Rule(
        parameter="mlp.experts.local_experts.N.linear_fc2.weight",
        saved=("mlp.experts.N.down_proj.weight",),
        split="columns",
        te="mlp.experts.linear_fc2.weightN",
    ),
)

# The parameters of a layer, by family.
LAYERS: dict[str, tuple[Rule, ...]] = {
    "llama": (*_NORMS, *_ATTENTION, *_MLP),
    "qwen2": (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_MLP),
    "qwen3": (*_NORMS, *_ATTENTION, *_QK_NORM, *_MLP),
    "qwen3_moe": (_INPUT_NORM, _EXPERTS_NORM, *_ATTENTION, *_QK_NORM, _ROUTER, *_EXPERT),
}

EMBEDDING = Rule(
    parameter="embedding.word_embeddings.weight", saved=("model.embed_tokens.weight",), split="rows"
)
LAST_NORM = Rule(parameter="decoder.final_layernorm.weight", saved=("model.norm.weight",))
HEAD = Rule(parameter="output_layer.weight", saved=("lm_head.weight",), split="rows")
# The copy, on a pipeline's last stage, of an embedding that is also the head.
TIED_HEAD = Rule(
    parameter="output_layer.weight", saved=("model.embed_tokens.weight",), split="rows"
)
SCORE = Rule(parameter="score.weight", saved=("score.weight",))
SCORE_BIAS = Rule(parameter="score.bias", saved=("score.bias",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The position of a saved tensor in a parameter.

    It has, of each group of ``slots`` slots, ``count`` slots from ``first`` on.
    """

    slots: int = 1
    first: int = 0
    count: int = 1
    unit: int | None = None
    """Number of rows of a slot. None means that there is one group."""

    def view(self, parameter: Tensor) -> Tensor:
        """Return the part as ``[groups, count, unit, …]``, in live memory."""
        unit = self.unit or parameter.shape[0] // self.slots
        grouped = parameter.view(-1, self.slots, unit, *parameter.shape[1:])
        return grouped[:, self.first : self.first + self.count]

    def read(self, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the part in the order of the saved tensor, whose shape is ``shape``.

        Rows of the parameter beyond it are padding of the vocabulary.
        """
        part = self.view(parameter)
        if not shape:
            return part.reshape(shape)
        return part.reshape(-1, *parameter.shape[1:])[: shape[0]]

    @torch.no_grad()
    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Write ``value`` to the part, and zeros to padding."""
        part = self.view(parameter)
        if part.numel() != value.numel():
            parameter.zero_()
            parameter[: value.shape[0]].copy_(value)
        else:
            part.copy_(value.view(part.shape))


def cuts(rule: Rule, shape: Shape) -> tuple[Cut, ...]:
    """Return the cut of each of the rule's saved tensors in its parameter."""
    if rule.layout == "groups":
        queries = shape.heads // shape.kv_heads
        dim = shape.head_dim
        spans = ((0, queries), (queries, 1), (queries + 1, 1))
        return tuple(
            Cut(slots=queries + 2, first=first, count=count, unit=dim) for first, count in spans
        )
    if rule.layout == "halves":
        return tuple(Cut(slots=2, first=first) for first in (0, 1))
    return (Cut(),)


def saved_shape(name: str, shape: Shape) -> tuple[int, ...]:
    """Return the whole shape of a saved tensor, by the end of its name."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    weights = {
        "embed_tokens": (shape.vocab_size, hidden),
        "lm_head": (shape.vocab_size, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (shape.intermediate, hidden),
        "up_proj": (shape.intermediate, hidden),
        "down_proj": (hidden, shape.intermediate),
        "score": (1, hidden),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
    }
    module, kind = name.split(".")[-2:]
    if ".experts." in name:
        width = shape.expert_intermediate
        return (hidden, width) if module == "down_proj" else (width, hidden)
    if name.endswith("mlp.gate.weight"):
        return (shape.experts, hidden)
    # Norms other than q_norm and k_norm are as wide as the hidden states.
    whole = weights.get(module, (hidden,))
    return whole[:1] if kind == "bias" else whole


def _layer_rules(shape: Shape) -> Iterator[Rule]:
    """Yield the rules of one layer, with the rules of experts repeated for each expert."""
    yield from (rule.named(shape) for rule in LAYERS[shape.family] if rule not in _EXPERT)
    for expert in range(shape.experts):
        yield from (rule.named(shape).of_expert(expert) for rule in _EXPERT)


def rules_of(shape: Shape) -> Iterator[tuple[int | None, Rule]]:
    """Yield (layer or None, rule with whole names of saved tensors), in the model's order.

    A tied head has no rule of its own, because it is the embedding.
    """
    yield None, EMBEDDING
    for layer in range(shape.layers):
        for rule in _layer_rules(shape):
            saved = tuple(f"model.layers.{layer}.{name}" for name in rule.saved)
            yield layer, replace(rule, saved=saved)
    yield None, LAST_NORM
    if shape.kind == "value_model":
        yield None, SCORE
        if shape.value_bias:
            yield None, SCORE_BIAS
    elif not shape.tied:
        yield None, HEAD
