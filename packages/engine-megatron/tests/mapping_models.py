"""Small architectures, layouts and parameters for tests of the mapping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine_megatron.parallel import Layout
from engine_megatron.shape import Latent, Mixture, Rope, Shape
from engine_megatron.weights import Weight, padded_vocabulary

SHAPE = Shape(
    family="qwen2",
    kind="language_model",
    vocab_size=37,
    hidden=24,
    intermediate=20,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=6,
    eps=1e-6,
    rope=Rope(frequencies=(1.0, 0.1, 0.01)),
    std=0.02,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    value_bias=True,
    max_positions=64,
)


MIXTURE = Mixture(experts=4, top_k=2, intermediate=8, sparse=(True,) * 4)
LATENT = Latent(query_rank=7, rank=5, plain=3, rotary=2, value=4)
# What the families have beyond Llama.
_FEATURES: dict[str, dict[str, Any]] = {
    "llama": {"output_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "granite_swa": {"sinks": True},
    "mixtral": {"mixture": MIXTURE},
    "qwen2_moe": {"mixture": replace(MIXTURE, shared=12, gated=True), "qkv_bias": True},
    "qwen3_moe": {
        "mixture": replace(MIXTURE, sparse=(False, True, True, False)),
        "qk_norm": True,
    },
    "gpt_oss": {"mixture": replace(MIXTURE, biased=True), "sinks": True, "output_bias": True},
    "deepseek_v3": {
        "mixture": replace(MIXTURE, sparse=(False, True, True, True), sigmoid=True, shared=16),
        "latent": LATENT,
    },
}


def shape_of(family: str, **changes: Any) -> Shape:
    """Return the family's small architecture, with changes."""
    features = {"qkv_bias": False} | _FEATURES.get(family, {})
    return replace(SHAPE, family=family, **features | changes)


def layouts(
    tensor: int,
    data: int,
    stages: int,
    experts: int = 1,
    expert_tensor: int | None = None,
    virtual: int = 1,
) -> list[Layout]:
    """Return the layout of each rank of a world (``expert_tensor`` None is ``tensor``)."""
    world = tensor * data * stages
    split = tensor if expert_tensor is None else expert_tensor
    return [
        Layout(
            world=world,
            rank=rank,
            tensor=tensor,
            data=data,
            stages=stages,
            experts=experts,
            expert_tensor=split,
            virtual=virtual,
        )
        for rank in range(world)
    ]


def parameters_of(
    table: list[Weight], layout: Layout, shape: Shape, multiple: int
) -> torch.nn.Module:
    """Return a module with this rank's parameters, all of them NaN, under Megatron's names."""
    model = torch.nn.Module()
    by_name: dict[str, list[Weight]] = {}
    for weight in table:
        if weight.at(layout.here) is not None:
            for name in weight.parameters[layout.here.stage]:
                by_name.setdefault(name, []).append(weight)
    for name, weights in by_name.items():
        owner = model
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        values = torch.full(parameter_shape(weights, shape, layout.tensor, multiple), float("nan"))
        param = torch.nn.Parameter(values, requires_grad=not weights[0].frozen)
        owner.register_parameter(name.split(".")[-1], param)
    return model


def parameter_shape(
    weights: list[Weight], shape: Shape, tensor: int, multiple: int
) -> tuple[int, ...]:
    """Return the shape that Megatron allocates for the parameter of these saved tensors."""
    first = weights[0]
    if first.name in ("model.embed_tokens.weight", "lm_head.weight"):
        layout = Layout(world=tensor, rank=0, tensor=tensor, data=1, stages=1)
        return (padded_vocabulary(shape, layout, multiple) // tensor, shape.hidden)
    if first.is_stack:
        one = first.box.shape[1:]
        return one[::-1] if first.cut.transposed else one
    rows = sum(weight.box.shape[0] for weight in weights)
    return (rows, *first.box.shape[1:])
