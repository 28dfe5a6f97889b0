"""Positions of a server, compared with those of transformers, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from rollout_fp8.install.positions import (
    AttentionScale,
    Positions,
    RotaryTable,
    ServedPositions,
    ServedTable,
    differences,
    sample_positions,
    warn_if_not_compared,
)

LENGTH = 64
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
}


def read(folder: Path, model_type: str, *, overrides: Any = None, **changes: Any) -> Positions:
    """Return the positions of a tiny configuration."""
    config = tiny_config(model_type, **changes)
    config.save_pretrained(folder)
    return Positions.read(ModelSource(path=str(folder), config_overrides=overrides or {}))


def serve(
    table: RotaryTable, *, length: int = LENGTH, dtype: torch.dtype = torch.float32
) -> ServedTable:
    """Return a server's table that is computed in float32 and kept in a dtype."""
    positions = [position for position in sample_positions(LENGTH) if position < length]
    angles = torch.outer(torch.tensor(positions).float(), table.frequencies.float())
    rows = torch.cat([angles.cos(), angles.sin()], dim=-1) * table.factor
    return ServedTable(
        name="layers.0.rotary_emb",
        kind="RotaryEmbedding",
        length=length,
        epsilon=torch.finfo(dtype).eps,
        rows=rows.to(dtype).float(),
    )


def compare(model: Positions, *tables: ServedTable, **scales: torch.Tensor) -> list[str]:
    served = ServedPositions(tables=[*tables], scales=scales)
    warn_if_not_compared(model, [served, served])
    return [*differences(model, served, LENGTH)]


def only_table(model: Positions) -> RotaryTable:
    (table,) = model.tables.values()
    return table


def test_sampled_are_the_first_the_last_and_positions_between_them() -> None:
    assert sample_positions(1) == [0]
    assert sample_positions(100) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 99]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"attention_factor": 0.7},
    ],
)
def test_the_tables_of_a_configuration_are_found_in_a_server(
    tmp_path: Path, rope: dict[str, Any], dtype: torch.dtype
) -> None:
    model = read(tmp_path, "llama", rope_parameters=rope)
    assert compare(model, serve(only_table(model), dtype=dtype)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_without_the_factor_of_its_keys_is_named(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = read(tmp_path, "llama", rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
    table = only_table(model)
    assert table.factor == 1.0
    # A server that passes over mscale takes YaRN's own factor.
    (why,) = compare(model, serve(table._replace(factor=1.25), dtype=dtype))
    assert why == (
        "layers.0.rotary_emb (RotaryEmbedding) is not model.rotary_emb.inv_freq: the cosine of "
        "frequency 0 at position 0 is 1.2500, and in transformers 1.0000"
    )


@pytest.mark.parametrize("changed", [1.01, 0.5])
def test_other_frequencies_are_named(tmp_path: Path, changed: float) -> None:
    model = read(tmp_path, "llama")
    table = only_table(model)
    (why,) = compare(model, serve(table._replace(frequencies=table.frequencies * changed)))
    assert "of frequency 0 at position" in why


def test_another_part_of_each_head_is_named(tmp_path: Path) -> None:
    model = read(tmp_path, "llama")
    table = only_table(model)
    (why,) = compare(model, serve(table._replace(frequencies=table.frequencies[:2])))
    assert "rotates 4 dimensions of each head, and transformers 8" in why


def test_a_table_that_is_shorter_than_the_server_s_sequences_is_named(tmp_path: Path) -> None:
    model = read(tmp_path, "llama")
    (why,) = compare(model, serve(only_table(model), length=32))
    assert "has a table of 32 positions for 64" in why


def test_a_table_of_no_numbers_is_named(tmp_path: Path) -> None:
    model = read(tmp_path, "llama")
    served = serve(only_table(model))
    served.rows[3] = torch.nan
    (why,) = compare(model, served)
    assert "is nan" in why


def test_each_table_of_a_configuration_must_be_served(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = read(tmp_path, "gemma3_text", layer_types=types, num_hidden_layers=4)
    tables = [serve(table) for table in model.tables.values()]
    assert len(tables) == 2
    assert compare(model, *tables) == []
    assert compare(model, tables[1], *tables) == []
    (why,) = compare(model, tables[0])
    assert why.startswith("no layer has the table of model.rotary_emb.")


def test_large_positions_may_differ_by_the_rounding_of_frequencies_alone() -> None:
    length = 1 << 18
    table = RotaryTable(torch.tensor([1.0, 0.3]).double(), 1.0)
    positions = sample_positions(length)
    model = Positions(text=None, nested=False, tables={"inv_freq": table}, scale=None)

    def apart(fraction: float) -> list[str]:
        rows = RotaryTable(table.frequencies * (1 + fraction), 1.0).rows(positions).float()
        served = ServedTable("rotary", "Rotary", length, torch.finfo(torch.float32).eps, rows)
        return [*differences(model, ServedPositions([served], {}), length)]

    assert apart(3e-7) == []
    assert apart(1e-5)


def test_frequencies_are_read_with_the_overrides_of_a_run(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = read(tmp_path, "llama", overrides={"rope_parameters": rope})
    wanted = 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(only_table(model).frequencies, wanted, rtol=1e-6, atol=0)


def test_the_part_of_each_head_is_that_of_the_engine(tmp_path: Path) -> None:
    # transformers before 5.18 rotates whole heads, and engine_api changes its configuration.
    model = read(tmp_path, "minimax_m2", head_dim=16, rotary_dim=8)
    assert len(only_table(model).frequencies) == 4


def test_a_server_without_tables_is_not_compared_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = read(tmp_path, "llama")
    assert compare(model, serve(only_table(model))) == []
    assert caplog.messages == []
    # A server with layers that have no positions may hold no table at all.
    assert compare(model) == []
    (warning,) = caplog.messages
    assert "transformers has model.rotary_emb.inv_freq, and the server has no table" in warning


def test_models_without_rotary_positions_have_no_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = read(tmp_path, "gpt2")
    assert not model.tables
    assert compare(model) == []
    assert caplog.messages == []
    assert compare(model, serve(RotaryTable(torch.ones(4).double(), 1.0))) == []
    (warning,) = caplog.messages
    assert "the server has tables (RotaryEmbedding), and transformers has no buffer" in warning


def test_a_model_that_cannot_fill_its_frequencies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    def fail(_: Any, module: Any) -> None:
        if hasattr(module, "inv_freq") and not module.inv_freq.is_meta:
            raise KeyError("theta")

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", fail)
    with pytest.raises(ConfigError, match="cannot build a llama") as caught:
        read(tmp_path, "llama")
    assert "KeyError: 'theta'" in str(caught.value)


SCALED = {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_a_scale_of_attention_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    model = read(tmp_path, "ministral3", rope_parameters=YARN | SCALED)
    positions = sample_positions(LENGTH)
    assert model.scale is not None
    wanted = get_llama_4_attn_scale(torch.tensor(positions)[None], 0.1, 8).flatten()
    torch.testing.assert_close(model.scale.rows(positions).float(), wanted)


def test_a_server_without_the_scale_of_attention_is_named(tmp_path: Path) -> None:
    model = read(tmp_path, "ministral3", rope_parameters=YARN | SCALED)
    table = serve(only_table(model))
    assert model.scale is not None
    rows = model.scale.rows(sample_positions(LENGTH))
    assert compare(model, table, attn=rows.float()) == []
    (why,) = compare(model, table)
    assert why.startswith("no layer scales its attention by position, and transformers does")
    (why,) = compare(model, table, attn=torch.ones(len(rows)))
    assert why == ("attn scales its attention at position 63 by 1.0000, and transformers by 1.2079")


def test_a_scale_beyond_the_served_positions_is_not_missed(tmp_path: Path) -> None:
    rope = YARN | SCALED | {"original_max_position_embeddings": LENGTH}
    model = read(tmp_path, "ministral3", rope_parameters=rope)
    assert compare(model, serve(only_table(model))) == []


def test_a_scale_that_transformers_does_not_compute_is_named(tmp_path: Path) -> None:
    model = read(tmp_path, "llama")
    rows = AttentionScale(every=8, beta=0.1).rows(sample_positions(LENGTH))
    (why,) = compare(model, serve(only_table(model)), attn=rows)
    assert "and transformers by 1.0000" in why


def test_layers_of_llama_4_without_rotary_positions_are_scaled(tmp_path: Path) -> None:
    sizes = {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.2}
    model = read(tmp_path, "llama4_text", no_rope_layers=[1, 0], num_hidden_layers=2, **sizes)
    assert model.scale == AttentionScale(every=8, beta=0.2, shift=1)
    assert float(model.scale.rows([6])) == 1.0
    assert float(model.scale.rows([7])) > 1.1
    model = read(tmp_path, "llama4_text", no_rope_layers=[1, 1], num_hidden_layers=2, **sizes)
    assert model.scale is None


def test_tables_of_a_tower_are_left_out(tmp_path: Path) -> None:
    from tiny_models import tiny_pictured_model

    tiny_pictured_model("qwen2_5_vl").config.save_pretrained(tmp_path)
    model = Positions.read(ModelSource(path=str(tmp_path)))
    assert [*model.tables] == ["model.language_model.rotary_emb.inv_freq"]
    assert model.nested
