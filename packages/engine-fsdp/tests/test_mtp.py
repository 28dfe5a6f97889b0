"""Heads that predict further tokens (MTP), which are kept as the model's folder has them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_folders import HEAD, LAYERS, assert_kept, count_of, read_saved, told, write_folder
from mtp_ranks import BATCH, create, train_and_save
from tested_ranks import Pools, open_pools
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    modeling_layers,
)

from engine_api import LoraConfig, ModelSource, sft_loss
from engine_api.errors import ConfigError

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text")
LORA = LoraConfig(rank=2, alpha=4.0, target_modules=("o_proj",))


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_written_as_it_is_and_again_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    written = write_folder(tmp_path / "model", family)
    with caplog.at_level(logging.INFO):
        exported = train_and_save(str(written.folder), "fsdp2", str(tmp_path))
    assert not set(exported) & set(written.head)
    for name in ("saved", "resumed"):
        assert_kept(tmp_path / name, written, exported)
    messages = [record.getMessage() for record in caplog.records]
    says = f"kept {len(written.head)} weights of the MTP head, which are not trained"
    assert [message.startswith(says) for message in told(messages)] == [True, True], messages
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason="this transformers guesses with no such head"
)
@pytest.mark.parametrize(
    ("family", "model_class"),
    [("deepseek_v3", DeepseekV3ForCausalLM), ("glm4_moe", Glm4MoeForCausalLM)],
)
def test_transformers_guesses_with_the_head_of_a_saved_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, model_class: Any
) -> None:
    """It raises where a weight of the head is missing."""
    written = write_folder(tmp_path / "model", family)
    train_and_save(str(written.folder), "fsdp2", str(tmp_path))
    # transformers knows the number of the layer for the published models alone.
    layer = rf"model\.layers\.{LAYERS}.*"
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [layer])
    model = model_class.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[5, 9, 7, 8, 3]])
    plain = model.generate(ids, do_sample=False, max_new_tokens=12)
    guessed = model.generate(ids, do_sample=False, max_new_tokens=12, use_mtp=True)
    assert torch.equal(guessed, plain)


@pytest.mark.parametrize("config", [{}, {"lora": LORA}], ids=["trained", "adapted"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_two_ranks_write_the_head_once(
    pools: Pools, tmp_path: Path, dtype: Any, config: dict[str, Any]
) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3")
    exported, _ = pools[2].run(
        "mtp_ranks:train_and_save",
        path=str(written.folder),
        backend="fsdp2",
        scratch=str(tmp_path),
        parallelism={"dp_shard": 2},
        dtype=dtype,
        **config,
    )
    for name in ("saved", "resumed"):
        assert_kept(tmp_path / name, written, exported)


def test_embeddings_of_the_heads_own_stay_as_they_are(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3", copies=False)
    exported = train_and_save(str(written.folder), "fsdp2", str(tmp_path))
    assert_kept(tmp_path / "saved", written, exported)


def test_a_model_is_saved_over_its_own_folder(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3")
    kept = replace(written, folder=shutil.copytree(written.folder, tmp_path / "kept"))
    engine = create(str(written.folder), "fsdp2")
    for _ in range(2):
        engine.train_batch(BATCH, sft_loss)
        exported = {name: one.clone() for name, one in engine.get_per_tensor_param()}
        engine.save_hf(written.folder)
        assert_kept(written.folder, kept, exported)
    engine.close()


def test_a_head_whose_file_is_missing_is_refused_before_the_training(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3")
    (written.folder / HEAD).unlink()
    with pytest.raises(ConfigError, match=HEAD) as caught:
        create(str(written.folder), "fsdp2")
    assert caught.value.field == "model.path"
    assert f"{len(written.head)} weights of the MTP head" in caught.value.why


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_a_head_that_is_gone_by_the_time_of_the_save_is_an_error(tmp_path: Path, gone: str) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3")
    engine = create(str(written.folder), "fsdp2")
    if gone == "folder":
        shutil.rmtree(written.folder)
    else:
        (written.folder / HEAD).unlink()
    with pytest.raises(ConfigError, match="MTP head") as caught:
        engine.save_hf(tmp_path / "saved")
    assert str(written.folder) in str(caught.value)
    assert not list(tmp_path.glob("saved*"))
    engine.close()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_the_head_of_another_model_is_left_out_and_no_longer_named(
    tmp_path: Path, family: str, init: Any
) -> None:
    """It was trained on the states of the last layer that the folder has."""
    written = write_folder(tmp_path / "model", family)
    overrides = {"num_hidden_layers": 2} if init == "pretrained" else {}
    source = ModelSource(path=str(written.folder), init=init, config_overrides=overrides)
    engine = create("", "fsdp2", model=source)
    exported = dict(engine.get_per_tensor_param())
    engine.save_hf(tmp_path / "saved")
    engine.close()
    assert set(read_saved(tmp_path / "saved")) == set(exported)
    source_config, config = (
        json.loads((folder / "config.json").read_text())
        for folder in (written.folder, tmp_path / "saved")
    )
    assert set(count_of(source_config).values()) == {1}
    assert set(count_of(config).values()) == {0}
