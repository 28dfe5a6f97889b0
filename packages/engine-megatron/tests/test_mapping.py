"""The mapping, which keeps every bit in every layout, and whose holes are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from mapping_models import MIXTURE, SHAPE, layouts, parameters_of, shape_of

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_api.weights import ShardSpec, assemble
from engine_megatron import export
from engine_megatron.families import Cut, cuts, rules_of
from engine_megatron.masters import Masters, Shard
from engine_megatron.shape import FAMILIES
from engine_megatron.weights import (
    Reader,
    Weight,
    attach,
    by_parameter,
    check_layout,
    weight_table,
)


def boxes(rows: Sequence[Weight]) -> list[tuple[torch.Tensor, ShardSpec]]:
    """Return each rank's part of a weight, with its box."""
    return [
        (
            weight.part_of([param.detach() for param in weight.params])
            if weight.params
            else torch.empty(weight.box.shape),
            weight.box,
        )
        for weight in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "kind"),
    [*product(FAMILIES, (False, True), ("language_model",)), ("qwen3", False, "value_model")],
)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (2, 2, 2),
        (4, 1, 1),
        (1, 2, 1, 2),
        (2, 1, 1, 2, 1),
        (2, 2, 1, 2),
        (2, 2, 2, 4, 1),
        (2, 1, 1, 1, 1),
        (4, 1, 1, 2, 2),
        (1, 1, 2, 1, 1, 2),
        (2, 2, 2, 4, 1, 2),
    ],
)
def test_written_weights_are_read_bit_for_bit(
    family: str, tied: bool, kind: Any, sizes: tuple[int, ...]
) -> None:
    shape = shape_of(family, tied=tied, kind=kind)
    multiple = 3
    tables = []
    for layout in layouts(*sizes):
        table = weight_table(shape, layout, multiple, torch.float32, LoraConfig(rank=3))
        attach(table, parameters_of(table, layout, shape, multiple), layout)
        tables.append(table)
    names = [[weight.name for weight in table] for table in tables]
    assert all(row == names[0] for row in names)
    for rows in zip(*tables, strict=True):
        want = torch.randn(rows[0].shape)
        for weight in rows:
            for param, uses in by_parameter([weight]).items():
                for use in uses:
                    use.weight.cut.write(param.detach(), use.of(want[weight.box.slices]))
        assert torch.equal(assemble(boxes(rows)), want)
    # Every element of every parameter was written, padding as zeros.
    for table in tables:
        assert all(bool(param.isfinite().all()) for weight in table for param in weight.params)


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    shape = replace(SHAPE, heads=4, kv_heads=2, head_dim=1, hidden=1)
    rule = next(rule for _, rule in rules_of(shape) if rule.parameter.endswith("qkv.weight"))
    fused = torch.empty(8, 1)
    for cut, values in zip(
        cuts(rule, shape), ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0], [20.0, 21.0]), strict=True
    ):
        cut.write(fused, torch.tensor(values)[:, None])
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_a_cut_views_live_memory() -> None:
    parameter = torch.zeros(4, 2)
    Cut(slots=2, first=1).view(parameter).fill_(1.0)
    assert parameter[2:].eq(1).all()
    assert parameter[:2].eq(0).all()


def test_layers_go_round_the_stages_chunk_by_chunk() -> None:
    shape = replace(SHAPE, layers=8, tied=True)
    table = {
        weight.name: weight.parameters
        for weight in weight_table(shape, layouts(1, 1, 2, 1, 1, 2)[0], 1, torch.float32)
    }
    found = [table[f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in range(8)]
    places = [
        (stage, *name.split(".")[:4:3]) for where in found for stage, (name,) in where.items()
    ]
    assert places == [(stage, chunk, local) for chunk in "01" for stage in (0, 1) for local in "01"]
    assert table["model.embed_tokens.weight"] == {
        0: ("0.embedding.word_embeddings.weight",),
        1: ("1.output_layer.weight",),
    }
    assert table["model.norm.weight"] == {1: ("1.decoder.final_layernorm.weight",)}


def test_a_hole_in_the_mapping_is_found() -> None:
    (layout,) = layouts(1, 1, 1)
    table = weight_table(SHAPE, layout, 1, torch.float32)
    model = parameters_of(table, layout, SHAPE, 1)
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match="extra"):
        attach(table, model, layout)


@pytest.mark.parametrize(
    ("changes", "sizes", "field"),
    [
        ({"heads": 6, "kv_heads": 3}, (2, 1, 1), "parallelism.tp"),
        ({"intermediate": 21}, (2, 1, 1), "parallelism.tp"),
        ({"layers": 3}, (1, 1, 2), "parallelism.pp"),
        ({"layers": 6}, (1, 1, 2, 1, 1, 2), "options.virtual_stages"),
        ({}, (1, 2, 1, 2), "parallelism.ep"),
        ({"mixture": replace(MIXTURE, experts=5)}, (1, 2, 1, 2), "parallelism.ep"),
        (
            {"mixture": replace(MIXTURE, intermediate=9)},
            (2, 1, 1),
            "options.expert_tensor_parallel",
        ),
        ({"mixture": replace(MIXTURE, shared=9)}, (2, 1, 1), "parallelism.tp"),
        ({"mixture": replace(MIXTURE, biased=True)}, (2, 1, 1), "options.expert_tensor_parallel"),
        ({"vocab_size": 3}, (4, 1, 1), "options.vocabulary_multiple"),
        ({"heads": 4, "kv_heads": 3}, (1, 1, 1), "model.path"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(
    changes: Any, sizes: tuple[int, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(replace(SHAPE, **changes), layouts(*sizes)[0], 1)
    assert caught.value.field == field


def test_every_name_is_there_once() -> None:
    for family, tied in product(FAMILIES, (False, True)):
        rules = rules_of(shape_of(family, tied=tied))
        names = [saved.name for _, rule in rules for saved in rule.saved]
        assert len(names) == len(set(names))
        assert ("lm_head.weight" in names) is not tied


class Gathers(Masters):
    """Spread masters that note the dense parameters in the order in which they are gathered."""

    def __init__(self, names: dict[torch.nn.Parameter, str]) -> None:
        super().__init__({}, torch.float32, spread=True)
        self.names = names
        self.order: list[str] = []

    def gather(
        self, param: torch.nn.Parameter, shard: Shard | None, value: torch.Tensor | None
    ) -> torch.Tensor:
        del shard, value
        # All data-parallel ranks hold such a parameter.
        if param.allreduce:  # type: ignore[attr-defined]
            self.order.append(self.names[param])
        return torch.zeros(param.shape)


def test_an_export_gathers_in_the_same_order_on_ranks_with_other_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets end anywhere, also between the parts of a fused weight and after an expert."""
    monkeypatch.setattr(export, "experts_group", lambda: None)
    monkeypatch.setattr(export, "add_bits", lambda bits, _: bits)
    shape = shape_of("qwen3_moe")
    for bucket_bytes in range(1 << 10, 1 << 14, 512):
        orders: list[list[str]] = []
        for layout in layouts(1, 2, 1, 2):
            table = weight_table(shape, layout, 1, torch.float32)
            model = parameters_of(table, layout, shape, 1).to(torch.bfloat16)
            attach(table, model, layout)
            masters = Gathers({param: name for name, param in model.named_parameters()})
            reader = Reader(masters, torch.float32)
            for _ in export.export_whole(table, layout, reader, bucket_bytes, torch.device("cpu")):
                pass
            orders.append(masters.order)
        assert orders[0] == orders[1], bucket_bytes
