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

from engine_megatron.shape import Latent, Mixture, Shape

# The division of a parameter's first dimension among the saved tensors.
Layout = Literal["whole", "groups", "halves"]
# The dimension of a saved tensor that is divided over tensor-parallel ranks.
Split = Literal["none", "rows", "columns"]

EMBEDDING = "embedding.word_embeddings.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"
# The head, which on a pipeline's last stage may be a copy of the embedding.
HEAD = "output_layer.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor of a Hugging Face folder.

    Attributes:
        name: name inside a layer, or the whole name.
        shape: shape of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of Megatron's parameters and the saved tensors in it, in their order.

    Attributes:
        parameter: name inside a layer, or the whole name; N is an expert's number.
        layout: the division of the parameter's first dimension among the saved tensors.
        split: the dimension of each saved tensor that is spread over tensor-parallel ranks.
        expert: the number of the expert that the rule belongs to; ``parameter`` has N for the
            expert's number on its rank.
        stacked: whether the saved tensor has all experts along its first dimension, each of which
            is a parameter of its own with N for the expert's number on its rank.
        woven: whether a saved tensor's rows are those of the parameter's two halves in turn.
        transposed: whether an expert's part of a stacked tensor has inputs as rows.
        frozen: whether it is a saved buffer, float32 in every precision and never trained.
        linear: whether each saved tensor is the matrix of a linear layer in transformers, which an
            adapter may be on.
        adapter: whether it is a part of an adapter.
        te: the parameter's name in Transformer Engine's layers if it differs; these have norms
            inside the linear layers.
    """

    parameter: str
    saved: tuple[Saved, ...]
    layout: Layout = "whole"
    split: Split = "none"
    expert: int | None = None
    stacked: bool = False
    woven: bool = False
    transposed: bool = False
    frozen: bool = False
    linear: bool = False
    adapter: bool = False
    te: str | None = None

    def named(self, shape: Shape) -> Rule:
        """Return the rule with its parameter's name in the spec of ``shape``."""
        return replace(self, parameter=self.te) if self.te and shape.spec == "te" else self


def _norm(parameter: str, name: str, width: int, te: str | None = None) -> Rule:
    saved = (Saved(name=f"{name}.weight", shape=(width,)),)
    return Rule(parameter=f"{parameter}.weight", saved=saved, te=te)


def _linear(
    parameter: str,
    outputs: dict[str, int],
    inputs: int,
    *,
    split: Split,
    layout: Layout = "whole",
    bias: bool = False,
    linear: bool = True,
) -> Iterator[Rule]:
    """Yield the rules of a matrix and its bias.

    ``outputs`` are the widths of the saved matrices' outputs by name, in the parameter's order.
    ``linear`` says whether transformers has linear layers of them.
    """
    for kind, more in (("weight", (inputs,)), ("bias", ())):
        if kind == "weight" or bias:
            yield Rule(
                parameter=f"{parameter}.{kind}",
                saved=tuple(
                    Saved(name=f"{name}.{kind}", shape=(width, *more))
                    for name, width in outputs.items()
                ),
                layout=layout,
                linear=linear and kind == "weight",
                # Every rank adds the whole bias to a sum over columns.
                split="none" if kind == "bias" and split == "columns" else split,
            )


def _attention(shape: Shape) -> Iterator[Rule]:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    outputs = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    yield from _linear(
        "self_attention.linear_qkv",
        outputs,
        shape.hidden,
        split="rows",
        layout="groups",
        bias=shape.qkv_bias,
    )
    yield from _linear(
        "self_attention.linear_proj",
        {"self_attn.o_proj": shape.hidden},
        queries,
        split="columns",
        bias=shape.output_bias,
    )
    if shape.qk_norm:
        for name in "qk":
            norm = f"self_attention.{name}_layernorm"
            yield _norm(norm, f"self_attn.{name}_norm", shape.head_dim)
    if shape.sinks:
        yield Rule(
            parameter="self_attention.core_attention.softmax_offset",
            saved=(Saved(name="self_attn.sinks", shape=(shape.heads,)),),
            split="rows",
        )


def _latent_attention(shape: Shape, latent: Latent) -> Iterator[Rule]:
    """Yield the rules of DeepSeek's attention, whose projections to latents no ranks split."""
    queries = shape.heads * (latent.plain + latent.rotary)
    values = shape.heads * latent.value
    attention = "self_attention"
    source, name = shape.hidden, "q_proj"
    if latent.query_rank is not None:
        down = {"self_attn.q_a_proj": latent.query_rank}
        yield from _linear(f"{attention}.linear_q_down_proj", down, shape.hidden, split="none")
        yield _norm(f"{attention}.q_layernorm", "self_attn.q_a_layernorm", latent.query_rank)
        source, name = latent.query_rank, "q_b_proj"
    up = "linear_q_proj" if latent.query_rank is None else "linear_q_up_proj"
    yield from _linear(f"{attention}.{up}", {f"self_attn.{name}": queries}, source, split="rows")
    down = {"self_attn.kv_a_proj_with_mqa": latent.rank + latent.rotary}
    yield from _linear(f"{attention}.linear_kv_down_proj", down, shape.hidden, split="none")
    yield _norm(f"{attention}.kv_layernorm", "self_attn.kv_a_layernorm", latent.rank)
    keys = {"self_attn.kv_b_proj": shape.heads * latent.plain + values}
    yield from _linear(f"{attention}.linear_kv_up_proj", keys, latent.rank, split="rows")
    output = {"self_attn.o_proj": shape.hidden}
    yield from _linear(f"{attention}.linear_proj", output, values, split="columns")


def _mlp(
    parameter: str,
    names: tuple[str, str, str],
    shape: Shape,
    width: int,
    *,
    bias: bool = False,
) -> Iterator[Rule]:
    """Yield the rules of a gated MLP whose saved matrices are gate, up and down in ``names``."""
    gate, up, down = names
    outputs = {gate: width, up: width}
    yield from _linear(
        f"{parameter}.linear_fc1", outputs, shape.hidden, split="rows", layout="halves", bias=bias
    )
    yield from _linear(
        f"{parameter}.linear_fc2", {down: shape.hidden}, width, split="columns", bias=bias
    )


def _projections(prefix: str) -> tuple[str, str, str]:
    return (f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")


def _mixture(shape: Shape, mixture: Mixture) -> Iterator[Rule]:
    """Yield the rules of a router and its experts, by the names of the family."""
    family = shape.family
    gate = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}.get(family, "mlp.gate")
    router = {gate: mixture.experts}
    yield from _linear(
        "mlp.router", router, shape.hidden, split="none", bias=mixture.biased, linear=False
    )
    if mixture.sigmoid:
        saved = Saved(name=f"{gate}.e_score_correction_bias", shape=(mixture.experts,))
        yield Rule(parameter="mlp.router.expert_bias", saved=(saved,), frozen=True)
    if family == "gpt_oss":
        yield from _stacked_experts(shape, mixture)
    else:
        for number in range(mixture.experts):
            yield from _expert(shape, mixture, number)
    if mixture.shared:
        prefix = "mlp.shared_expert" if mixture.gated else "mlp.shared_experts"
        yield from _mlp("mlp.shared_experts", _projections(prefix), shape, mixture.shared)
    if mixture.gated:
        gate = {"mlp.shared_expert_gate": 1}
        yield from _linear("mlp.shared_experts.gate", gate, shape.hidden, split="none")


def _expert(shape: Shape, mixture: Mixture, number: int) -> Iterator[Rule]:
    names = _projections(f"mlp.experts.{number}")
    if shape.family == "mixtral":
        one = f"block_sparse_moe.experts.{number}"
        names = (f"{one}.w1", f"{one}.w3", f"{one}.w2")
    for rule in _mlp("mlp.experts.local_experts.N", names, shape, mixture.intermediate):
        layer = rule.parameter.split(".")[-2]
        yield replace(rule, expert=number, linear=False, te=f"mlp.experts.{layer}.weightN")


def _stacked_experts(shape: Shape, mixture: Mixture) -> Iterator[Rule]:
    """Yield the rules of gpt-oss's experts, which are saved together with inputs as rows."""
    hidden, width = shape.hidden, mixture.intermediate
    sizes = (
        ("linear_fc1", "gate_up_proj", hidden, 2 * width),
        ("linear_fc2", "down_proj", width, hidden),
    )
    for layer, name, inputs, outputs in sizes:
        for kind, more in (("weight", (inputs,)), ("bias", ())):
            saved = f"mlp.experts.{name}" + ("_bias" if kind == "bias" else "")
            yield Rule(
                parameter=f"mlp.experts.local_experts.N.{layer}.{kind}",
                saved=(Saved(name=saved, shape=(mixture.experts, *more, outputs)),),
                stacked=True,
                woven=layer == "linear_fc1",
                transposed=kind == "weight",
                te=f"mlp.experts.{layer}.{kind}N",
            )


def _layer(shape: Shape, layer: int) -> Iterator[Rule]:
    """Yield the rules of one layer."""
    hidden = shape.hidden
    has_experts = shape.has_experts(layer)
    # Transformer Engine's linear layers have the norms of their inputs, but for a router's.
    te = "self_attention.linear_qkv.layer_norm_weight"
    yield _norm("input_layernorm", "input_layernorm", hidden, te)
    te = None if has_experts else "mlp.linear_fc1.layer_norm_weight"
    yield _norm("pre_mlp_layernorm", "post_attention_layernorm", hidden, te)
    if shape.latent is None:
        yield from _attention(shape)
    else:
        yield from _latent_attention(shape, shape.latent)
    if has_experts and shape.mixture is not None:
        yield from _mixture(shape, shape.mixture)
    else:
        yield from _mlp("mlp", _projections("mlp"), shape, shape.intermediate, bias=shape.mlp_bias)


def rules_of(shape: Shape) -> Iterator[tuple[int | None, Rule]]:
    """Yield (layer or None, rule with whole names of saved tensors), in the model's order.

    A tied head has no rule of its own, because it is the embedding.
    """
    vocabulary = (shape.vocab_size, shape.hidden)
    yield (
        None,
        Rule(
            parameter=EMBEDDING, saved=(Saved(name=EMBEDDING_NAME, shape=vocabulary),), split="rows"
        ),
    )
    for layer in range(shape.layers):
        for rule in _layer(shape, layer):
            saved = tuple(
                replace(one, name=f"model.layers.{layer}.{one.name}") for one in rule.saved
            )
            yield layer, replace(rule.named(shape), saved=saved)
    yield None, _norm("decoder.final_layernorm", "model.norm", shape.hidden)
    if shape.kind == "value_model":
        for rule in _linear(
            "score", {"score": 1}, shape.hidden, split="none", bias=shape.value_bias, linear=False
        ):
            yield None, rule
    elif not shape.tied:
        head = (Saved(name="lm_head.weight", shape=vocabulary),)
        yield None, Rule(parameter=HEAD, saved=head, split="rows")


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

    woven: bool = False
    """True if the saved tensor has the rows of the parameter's two halves in turn."""

    transposed: bool = False
    """True if the saved tensor has the parameter's rows as its columns."""

    def view(self, parameter: Tensor) -> Tensor:
        """Return the part as ``[groups, count, unit, …]``, in live memory."""
        if self.woven:
            return parameter.view(1, 2, -1, *parameter.shape[1:]).transpose(1, 2)
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
        rows = part.reshape(-1, *parameter.shape[1:])
        return rows.T if self.transposed else rows[: shape[0]]

    @torch.no_grad()
    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Write ``value`` to the part, and zeros to padding."""
        part = self.view(parameter)
        if part.numel() != value.numel():
            parameter.zero_()
            parameter[: value.shape[0]].copy_(value)
        else:
            part.copy_((value.T if self.transposed else value).reshape(part.shape))


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
    return (Cut(woven=rule.woven, transposed=rule.transposed),)
