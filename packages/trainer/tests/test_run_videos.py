"""SFT and RL on rows with videos, over engine-fsdp and the ``local`` rollout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from moving_pictures import draw_frames, needs_torchvision
from pictured_models import draw, save_pictured_model, write_rows
from transformers import AutoModelForImageTextToText

from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_trainer.config import RLConfig, SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import SFTDataset, load_tokenizer, read_examples
from engine_trainer.export import export_checkpoint
from engine_trainer.preview.collect import collect
from engine_trainer.preview.show import show
from engine_trainer.rl.loop import train_rl
from engine_trainer.sft import train_sft
from engine_trainer.telemetry.logs import METRICS, read_metrics

pytestmark = needs_torchvision
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Difference of float32 from float64, in nats.
NEAR = 1e-4
REWARD = """
def reward(sample):
    return sum(map(ord, sample.completion)) % 7 / 6
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer_of) -> Path:
    """A folder with a model of each family, and rows with videos, an image and text alone."""
    folder = tmp_path_factory.mktemp("moving")
    for family in FAMILIES:
        save_pictured_model(folder / family, family, tokenizer_of())
    draw(folder, "a.png")
    frames, wide = draw_frames(folder, 5), draw_frames(folder, 2, (24, 16))
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": "<video>what", "videos": [{"frames": frames, "fps": 0.75}]},
        {"prompt": "hi"},
        {"prompt": "<video>or<image>or<video>", "images": ["a.png"], "videos": [wide, frames[:2]]},
        {"prompt": "<image>", "images": ["a.png"]},
    ]
    write_rows(folder / "rows.jsonl", [row | {"response": "this", "answer": "1"} for row in rows])
    return folder


def configure(kind: type[Any], place: Path, output: Path, *overrides: str, family: str) -> Any:
    tree: dict[str, Any] = {
        "engine": {
            "model": {"path": str(place / family)},
            "backend": "fsdp2",
            "device": "cpu",
            "optimizer": {"lr": 0.01},
            "memory": {"max_tokens": 256, "max_patches": 192},
        },
        "data": {"source": str(place / "rows.jsonl"), "shuffle": False},
        "run": {
            "output_dir": str(output),
            "steps": 2,
            "progress": False,
            "tensorboard": False,
            "report": False,
        },
    }
    if kind is SFTConfig:
        tree["batch_size"] = 4
    else:
        tree["run"]["rollouts"] = "all"
        tree |= {
            "rollout": {"name": "local", "n": 3, "max_new_tokens": 6, "temperature": 1.0},
            "reward": {"function": f"{place}/reward.py:reward", "workers": 0, "timeout_s": None},
            "algorithm": {"prompts_per_step": 4, "mini_batches": 2},
        }
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return load_config(kind, file, overrides)


def score(folder: Path, fields: dict[str, Any]) -> torch.Tensor:
    """Return ``[t]`` log-probs of a document, which transformers computes alone in float64."""
    load: Any = AutoModelForImageTextToText.from_pretrained
    model = load(folder, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.tensor(fields["input_ids"])
    given: dict[str, Any] = {}
    if "media" in fields:
        media = fields["media"]
        seconds = media.get("seconds", torch.zeros(len(media["grid"])))
        types = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
        given["mm_token_type_ids"] = types.int()[None]
        rows = (seconds > 0).repeat_interleave(media["grid"].prod(1))
        if bool(rows.any()):
            given["pixel_values_videos"] = media["pixels"][rows].double()
            given["video_grid_thw"] = media["grid"][seconds > 0]
            given["second_per_grid_ts"] = seconds[seconds > 0]
        if not bool(rows.all()):
            given["pixel_values"] = media["pixels"][~rows].double()
            given["image_grid_thw"] = media["grid"][seconds == 0]
    with torch.no_grad():
        scores = model(input_ids=ids[None], use_cache=False, **given).logits[0].log_softmax(-1)
    picked = scores[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_sft_is_that_of_transformers(tmp_path, place, family):
    config = configure(SFTConfig, place, tmp_path / "run", "run.steps=1", family=family)
    train_sft(config)
    tokenizer = load_tokenizer(config.data, config.engine.model)
    dataset = SFTDataset.build(read_examples(config.data, "response"), tokenizer, config.data)
    fields = [document.fields() for document in dataset.documents]
    scores = torch.cat([score(place / family, one) for one in fields])
    weight = torch.tensor([w for one in fields for w in one["loss_weight"]]).double()
    (row,) = (one for one in read_metrics(tmp_path / "run" / METRICS) if "train/loss" in one)
    loss = float(-(weight * scores).sum() / weight.sum())
    assert row["train/loss"] == pytest.approx(loss, abs=NEAR)
    assert row["train/images"] == 5
    assert row["train/patches"] == sum(document.rows for document in dataset.documents)
    text = "\n".join(show(collect(config, "sft"), rows=1, row=None, width=100, color=False))
    assert "<|video_pad|> × " in text


def test_a_resumed_run_ends_as_one_that_was_left_alone(tmp_path, place):
    small = "data.video_processor_kwargs={size: {shortest_edge: 64, longest_edge: 512}}"
    make = {"family": "qwen2_5_vl"}
    train_sft(configure(SFTConfig, place, tmp_path / "alone", small, **make))
    train_sft(configure(SFTConfig, place, tmp_path / "parted", small, "run.steps=1", **make))
    for changed in ((), (small, "data.video_fps=1")):
        with pytest.raises(ConfigError, match=r"data\.video_.* as in the checkpoint"):
            train_sft(configure(SFTConfig, place, tmp_path / "parted", *changed, **make))
    train_sft(configure(SFTConfig, place, tmp_path / "parted", small, **make))
    for name in ("model.safetensors", "video_preprocessor_config.json", "processor_config.json"):
        left, right = (tmp_path / one / "hf" / name for one in ("alone", "parted"))
        assert left.read_bytes() == right.read_bytes()


# The local rollout has no cache for Qwen3.5, with images or without.
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_engines_log_probs_of_a_step_are_those_of_the_rollout(tmp_path, place, family):
    folder = train_rl(configure(RLConfig, place, tmp_path / "run", family=family)).folder
    rows = [row for row in read_metrics(folder / METRICS) if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/rms"] < NEAR
        # Three completions of five images and videos.
        assert row["train/images"] == 15
    names = pq.read_table(folder / "rollouts" / "step-000001.parquet")["images"].to_pylist()
    assert ["frame0_16x24.png and 4 more"] in names
    assert ["frame0_24x16.png and 1 more", "a.png", "frame0_16x24.png and 1 more"] in names


def test_an_export_has_the_settings_of_the_videos(tmp_path, place):
    small = "data.video_processor_kwargs={size: {shortest_edge: 64, longest_edge: 512}}"
    make = {"family": "qwen2_5_vl"}
    train_sft(configure(SFTConfig, place, tmp_path / "run", small, "run.steps=1", **make))
    kinds = {"sft": SFTConfig}
    export_checkpoint(tmp_path / "run", tmp_path / "exported", kinds)
    for name in ("video_preprocessor_config.json", "processor_config.json"):
        left, right = (tmp_path / one / name for one in ("run/hf", "exported"))
        assert left.read_bytes() == right.read_bytes()
    saved = json.loads((tmp_path / "exported" / "video_preprocessor_config.json").read_text())
    assert saved["size"] == {"shortest_edge": 64, "longest_edge": 512}
    for changed in (small.replace("512", "1024"), "data.video_fps=1"):
        with pytest.raises(ConfigError, match=r"data\.video_.* as in the checkpoint"):
            export_checkpoint(tmp_path / "run", tmp_path / "other", kinds, overrides=[changed])
    assert not (tmp_path / "other").exists()


def test_an_engine_that_takes_images_alone_is_refused_before_the_run(tmp_path, place, monkeypatch):
    """The row with videos is the second of the training rows, or of the held-out ones."""
    given = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    write_rows(place / "second.jsonl", [given[1], given[0]])
    write_rows(place / "plain.jsonl", [given[1], given[3]])
    resolve = EngineRegistry.resolve

    def strip(**asked: Any) -> Any:
        found = resolve(**asked)
        kept = found.plugin.capabilities - {"video"}
        return replace(found, plugin=replace(found.plugin, capabilities=kept))

    monkeypatch.setattr(EngineRegistry, "resolve", strip)
    second = f"data.source={place / 'second.jsonl'}"
    plain = (f"data.source={place / 'plain.jsonl'}", f"eval.source={place / 'second.jsonl'}")
    for train, kind, overrides in (
        (train_sft, SFTConfig, (second,)),
        (train_sft, SFTConfig, plain),
        (train_rl, RLConfig, (second, "algorithm={prompts_per_step: 2, mini_batches: 1}")),
    ):
        config = configure(kind, place, tmp_path / "run", *overrides, family="qwen3_vl")
        with pytest.raises(UnsupportedCapability, match=r"second\.jsonl:2 has videos") as caught:
            train(config)
        assert caught.value.capability == "video"
        assert "engine 'fsdp2'" in str(caught.value)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_rollout_that_takes_images_alone_is_refused_by_the_capability(
    tmp_path, place, monkeypatch
):
    rows = RolloutRegistry.rows()

    def strip(found: Any) -> Any:
        kept = found.plugin.capabilities - {"video"}
        return replace(found, plugin=replace(found.plugin, capabilities=kept))

    monkeypatch.setattr(RolloutRegistry, "rows", lambda: [(strip(one), row) for one, row in rows])
    with pytest.raises(UnsupportedCapability, match=r"rows\.jsonl:1 has videos") as caught:
        train_rl(configure(RLConfig, place, tmp_path / "run", family="qwen3_vl"))
    assert caught.value.capability == "video"
    assert not (tmp_path / "run").exists()
