"""Heads of model folders that predict further tokens (MTP): their weights by name, and copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_api.comm import SingleComm
from engine_api.errors import ConfigError
from engine_api.hf_folder import WeightFiles, save_hf
from engine_api.hf_mtp import MtpHead, drop_counts, find_mtp_head

TWO = {"num_hidden_layers": 2}
ONE_MORE = TWO | {"num_nextn_predict_layers": 1}
MODEL = ("model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "lm_head.weight")
PICTURED = ("model.language_model.layers.1.w", "model.visual.layers.0.w")


@pytest.mark.parametrize(
    ("config", "model", "further", "found"),
    [
        (ONE_MORE, MODEL, ["model.layers.2.w", "model.layers.3.w"], ["model.layers.2.w"]),
        (TWO, MODEL, ["model.layers.2.w"], []),
        (TWO | {"num_nextn_predict_layers": "1"}, MODEL, ["model.layers.2.w"], []),
        (TWO, MODEL, ["mtp.fc.weight", "mtpx.w"], ["mtp.fc.weight"]),
        (TWO, MODEL, ["model.mtp.layers.0.w"], ["model.mtp.layers.0.w"]),
        (TWO, MODEL, ["model.mtp_block.0.w"], ["model.mtp_block.0.w"]),
        # The configuration was overridden: these are layers of the folder's model.
        (ONE_MORE | {"num_hidden_layers": 3}, MODEL, ["model.layers.2.w", "mtp.w"], []),
        (
            {"text_config": ONE_MORE},
            PICTURED,
            ["model.language_model.layers.2.w", "model.visual.layers.2.w", "mtp.w"],
            ["model.language_model.layers.2.w", "mtp.w"],
        ),
        ({}, ("transformer.h.0.w",), ["mtp.w", "transformer.h.1.w"], ["mtp.w"]),
        # An engine that computes with it reads and exports it.
        (TWO, (*MODEL, "mtp.w"), ["mtp.w"], []),
    ],
)
def test_weights_of_a_head_are_known_by_their_names(
    config: Mapping[str, Any], model: tuple[str, ...], further: list[str], found: list[str]
) -> None:
    head = find_mtp_head(Path(), config, [*further, *model], model)
    assert list(head.names) == found


def test_an_embedding_in_a_head_may_be_a_copy_of_either_of_the_models() -> None:
    names = ["embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight"]
    stored = [f"model.layers.2.{name}" for name in names]
    head = find_mtp_head(Path(), ONE_MORE, stored, MODEL)
    embedding, *_, output = MODEL
    assert head.originals == {
        stored[0]: (embedding, output),
        stored[1]: (output, embedding),
    }


def test_a_config_without_the_head_says_so_in_either_part() -> None:
    config: dict[str, Any] = {
        "num_nextn_predict_layers": 1,
        "text_config": {"mtp_num_hidden_layers": 2, "num_hidden_layers": 3},
        "model_type": "any",
    }
    drop_counts(config)
    assert config == {
        "num_nextn_predict_layers": 0,
        "text_config": {"mtp_num_hidden_layers": 0, "num_hidden_layers": 3},
        "model_type": "any",
    }


class Config:
    """A stand-in for transformers' configuration with the member that is used."""

    def to_dict(self) -> dict[str, Any]:
        return dict(ONE_MORE)


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> WeightFiles:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ONE_MORE))
    save_file(dict(tensors), folder / "model.safetensors")
    return WeightFiles(str(folder))


def save(place: Path, mtp: MtpHead | None, trained: Mapping[str, torch.Tensor]) -> None:
    save_hf(
        iter(trained.items()),
        place,
        comm=SingleComm(),
        source=str(place.parent / "model"),
        hf_config=Config(),
        mtp=mtp,
    )


@pytest.mark.parametrize("nearly", [False, True])
def test_a_copy_is_one_bit_for_bit_and_follows_the_model(tmp_path: Path, nearly: bool) -> None:
    stored = {name: torch.randn(4, 3) for name in MODEL}
    stored["model.embed_tokens.weight"][0, 0] = 0.0
    copy = stored["model.embed_tokens.weight"].clone()
    if nearly:
        # It is equal and has different bits.
        copy[0, 0] = -0.0
    head = {"model.layers.2.embed_tokens.weight": copy, "model.layers.2.w": torch.ones(3).half()}
    files = write(tmp_path / "model", stored | head)
    files.check(dict.fromkeys(MODEL, (4, 3)))
    trained = {name: torch.randn(4, 3).bfloat16() for name in MODEL}
    save(tmp_path / "saved", files.mtp, trained)
    if not nearly:
        head["model.layers.2.embed_tokens.weight"] = trained["model.embed_tokens.weight"]
    found = load_file(tmp_path / "saved/model.safetensors")
    assert set(found) == {*trained, *head}
    for name, tensor in (trained | head).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config == ONE_MORE | {"dtype": "bfloat16"}


def test_a_folder_of_another_model_by_the_time_of_the_save_is_an_error(tmp_path: Path) -> None:
    tensors = {name: torch.randn(2) for name in (*MODEL, "model.layers.2.w")}
    files = write(tmp_path / "model", tensors)
    files.check(dict.fromkeys(MODEL, (2,)))
    save_file({"other": torch.ones(2)}, tmp_path / "model/model.safetensors")
    with pytest.raises(ConfigError, match="no longer holds all 1 weights of the MTP head") as error:
        save(tmp_path / "saved", files.mtp, tensors)
    assert "model.layers.2.w not there" in error.value.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
