"""Small architectures, layouts and parameters for tests of the mapping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine_megatron.parallel import Layout
from engine_megatron.shape import Shape
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
    rope_base=1e4,
    std=0.02,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    value_bias=True,
    max_positions=64,
)


def shape_of(family: str, **changes: Any) -> Shape:
    """Return the family's small architecture, with changes."""
    experts = {"experts": 4, "top_k": 2, "expert_intermediate": 8} if family == "qwen3_moe" else {}
    qk_norm = family in ("qwen3", "qwen3_moe")
    return replace(
        SHAPE, family=family, qkv_bias=family == "qwen2", qk_norm=qk_norm, **experts | changes
    )


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
            by_name.setdefault(weight.parameters[layout.here.stage], []).append(weight)
    for name, weights in by_name.items():
        owner = model
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        values = torch.full(parameter_shape(weights, shape, layout.tensor, multiple), float("nan"))
        owner.register_parameter(name.split(".")[-1], torch.nn.Parameter(values))
    return model


def parameter_shape(
    weights: list[Weight], shape: Shape, tensor: int, multiple: int
) -> tuple[int, ...]:
    """Return the shape that Megatron allocates for the parameter of these saved tensors."""
    first = weights[0]
    if first.name in ("model.embed_tokens.weight", "lm_head.weight"):
        layout = Layout(world=tensor, rank=0, tensor=tensor, data=1, stages=1)
        return (padded_vocabulary(shape, layout, multiple) // tensor, shape.hidden)
    rows = sum(weight.box.shape[0] for weight in weights)
    return (rows, *first.box.shape[1:])
