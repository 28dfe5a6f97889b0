"""SFT on rows with and without images, over engine-fsdp, against transformers in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pictured_models import PICTURED_FAMILIES, draw, save_pictured_model, write_rows
from transformers import AutoModelForImageTextToText

from engine_api import Batch
from engine_api.checkpoint import locate
from engine_api.comm import SingleComm
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.manifest import read_manifest
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import SFTDataset, load_tokenizer, read_examples
from engine_trainer.errors import DataError, ImageError
from engine_trainer.export import export_checkpoint
from engine_trainer.run.run import Run
from engine_trainer.sft import evaluate_sft, train_sft
from engine_trainer.telemetry import throughput
from engine_trainer.telemetry.logs import METRICS, read_metrics
from engine_trainer.telemetry.throughput import Throughput

# Difference of float32 from float64, in nats.
NEAR = 1e-4


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer_of) -> Path:
    """A folder with a model of each family, and rows of two, one and no images."""
    folder = tmp_path_factory.mktemp("pictured")
    for family in PICTURED_FAMILIES:
        save_pictured_model(folder / family, family, tokenizer_of())
    draw(folder, "a.png")
    draw(folder, "b.jpg", (40, 16))
    both = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    turns = [
        {"role": "user", "content": both},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "so"},
    ]
    rows = [
        {"messages": turns, "images": ["a.png", "b.jpg"]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]},
        {
            "messages": [
                {"role": "user", "content": "<image>what"},
                {"role": "assistant", "content": "this"},
            ],
            "images": ["b.jpg"],
        },
        {"messages": turns[2:]},
    ]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def configure(place: Path, output: Path, *overrides: str, family: str = "qwen3_vl") -> SFTConfig:
    tree = {
        "engine": {
            "model": {"path": str(place / family)},
            "backend": "fsdp2",
            "device": "cpu",
            "optimizer": {"lr": 0.01},
            "memory": {"max_tokens": 128, "max_patches": 64},
        },
        "data": {"source": str(place / "rows.jsonl"), "shuffle": False},
        "batch_size": 3,
        "run": {
            "output_dir": str(output),
            "steps": 4,
            "progress": False,
            "tensorboard": False,
            "report": False,
        },
    }
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return load_config(SFTConfig, file, overrides)


def read_losses(output: Path) -> list[float]:
    rows = read_metrics(output / METRICS)
    return [row["train/loss"] for row in rows if "train/loss" in row]


def build(config: SFTConfig) -> SFTDataset:
    tokenizer = load_tokenizer(config.data, config.engine.model)
    return SFTDataset.build(read_examples(config.data, "response"), tokenizer, config.data)


def score(folder: Path, fields: dict[str, Any]) -> torch.Tensor:
    """Return ``[t]`` log-probs of a document, which transformers computes alone in float64."""
    load: Any = AutoModelForImageTextToText.from_pretrained
    model = load(folder, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.tensor(fields["input_ids"])
    given: dict[str, Any] = {}
    if "media" in fields:
        types = (ids == model.config.image_token_id).int()[None]
        given = {"pixel_values": fields["media"]["pixels"].double()}
        if model.config.model_type.startswith("qwen"):
            given |= {"image_grid_thw": fields["media"]["grid"], "mm_token_type_ids": types}
        if model.config.model_type == "gemma3":
            given["token_type_ids"] = types
    with torch.no_grad():
        scores = model(input_ids=ids[None], use_cache=False, **given).logits[0].log_softmax(-1)
    picked = scores[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


@pytest.mark.parametrize("family", PICTURED_FAMILIES)
def test_every_token_of_a_run_has_the_loss_that_transformers_computes(
    tmp_path, place, family, monkeypatch
):
    """Log-probs of packed documents before a step, and the loss of the step."""
    seen: list[tuple[Batch, torch.Tensor]] = []
    pack = Run.pack_local

    def watch(run: Run, documents: Any) -> Batch:
        batch = pack(run, documents)
        seen.append((batch, run.engine.infer_batch(batch).log_probs))
        return batch

    monkeypatch.setattr(Run, "pack_local", watch)
    config = configure(place, tmp_path / "run", "run.steps=1", family=family)
    outcome = train_sft(config)
    ((batch, log_probs),) = seen
    fields = [document.fields() for document in build(config).documents[:3]]
    expected = torch.cat([score(place / family, one) for one in fields])
    torch.testing.assert_close(log_probs.double(), expected, atol=NEAR, rtol=0)
    assert batch.media is not None
    assert batch.media.cu_images.tolist() == [0, 2, 2, 3]
    weight = batch.loss_weight.double()
    loss = float(-(weight * expected).sum() / weight.sum())
    assert read_losses(outcome.folder) == pytest.approx([loss], abs=NEAR)
    row = read_metrics(outcome.folder / METRICS)[-1]
    assert (row["train/images"], row["train/patches"]) == (3, batch.media.grid.prod(1).sum())
    # Two documents with images are beyond the budget of patches together.
    assert (row["train/micro_batches"] == 2) == (row["train/patches"] > 64)


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_left_alone(tmp_path, place):
    """Weights, losses, and the folders that are exported, with smaller images than the model's."""
    small = "data.processor_kwargs={size: {shortest_edge: 64, longest_edge: 512}}"
    train_sft(configure(place, tmp_path / "alone", small))
    train_sft(configure(place, tmp_path / "parted", small, "run.steps=2"))
    train_sft(configure(place, tmp_path / "parted", small))
    alone, parted = (tmp_path / name for name in ("alone", "parted"))
    assert read_losses(alone) == read_losses(parted)
    for name in ("model.safetensors", "preprocessor_config.json", "processor_config.json"):
        assert (alone / "hf" / name).read_bytes() == (parted / "hf" / name).read_bytes()
    export_checkpoint(parted, tmp_path / "exported", {"sft": SFTConfig})
    kept = read_manifest(locate(parted / "checkpoints")).extra["loop"]["image_processor"]
    for folder in (parted / "hf", tmp_path / "exported"):
        saved = json.loads((folder / "processor_config.json").read_text())["image_processor"]
        assert saved | {"backend": "pil"} == kept
        assert saved["size"] == {"shortest_edge": 64, "longest_edge": 512}
        again = build(configure(place, tmp_path / "again", f"engine.model.path={folder}"))
        assert [one.rows for one in again.documents] == [24 + 16, 0, 16, 0]


def test_a_processor_that_has_changed_since_the_checkpoint_is_refused(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    train_sft(configure(tmp_path / "place", tmp_path / "run", "run.steps=1"))
    file = tmp_path / "place" / "qwen3_vl" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.5, 0.5, 0.5]}))
    with pytest.raises(ConfigError, match=r"processor_kwargs\.image_mean: expected \[0\.48"):
        train_sft(configure(tmp_path / "place", tmp_path / "run", "run.steps=2"))


def test_a_model_with_a_tower_has_no_mfu_as_patches_are_no_tokens(tmp_path, place, monkeypatch):
    monkeypatch.setattr(throughput, "_peak", lambda device, dtype: 1e9)
    config = configure(place, tmp_path / "run", "run.steps=1")
    train_sft(config)
    (row,) = (one for one in read_metrics(tmp_path / "run" / METRICS) if one["step"] == 1)
    assert "perf/tokens_per_s" in row
    assert "perf/mfu" not in row
    assert throughput.of_config(config.engine.build(seed=0, total_steps=1), "cuda", 2) is None


def test_an_evaluation_refuses_a_processor_other_than_the_checkpoints(tmp_path, place):
    train_sft(configure(place, tmp_path / "run", "run.steps=1"))
    measured = (
        f"run.resume={locate(tmp_path / 'run' / 'checkpoints')}",
        f"eval.source={place / 'rows.jsonl'}",
    )
    evaluate_sft(configure(place, tmp_path / "same", *measured))
    small = "data.processor_kwargs={size: {shortest_edge: 64, longest_edge: 512}}"
    with pytest.raises(ConfigError, match=r"processor_kwargs\.size: expected"):
        evaluate_sft(configure(place, tmp_path / "small", *measured, small))


def test_a_document_whose_image_cannot_be_decoded_is_left_out_and_counted(
    tmp_path, place, monkeypatch
):
    shutil.copytree(place, tmp_path / "place")
    file = tmp_path / "place" / "b.jpg"
    config = configure(tmp_path / "place", tmp_path / "run")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ImageError, match=r"b\.jpg\) cannot be decoded"):
        train_sft(config)
    speeds: list[list[int]] = []
    metrics = Throughput.metrics

    def watch(speed: Throughput, lengths: Any, seconds: float) -> dict[str, float]:
        speeds.append(sorted(lengths))
        return metrics(speed, lengths, seconds)

    monkeypatch.setattr(Throughput, "metrics", watch)
    drop = ("data.on_bad_image=drop", "run.steps=2")
    train_sft(configure(tmp_path / "place", tmp_path / "dropped", *drop))
    rows = read_metrics(tmp_path / "dropped" / METRICS)
    assert [row.get("train/bad_images") for row in rows] == [None, 2, 1]
    # All images are in documents that are left out, and count nowhere.
    assert [row["train/images"] for row in rows[1:]] == [0, 0]
    assert [row["train/patches"] for row in rows[1:]] == [0, 0]
    assert [sum(lengths) for lengths in speeds] == [row["train/tokens"] for row in rows[1:]]
    file.unlink()
    train_sft(configure(tmp_path / "place", tmp_path / "missing", *drop, "batch_size=2"))
    assert read_metrics(tmp_path / "missing" / METRICS)[0]["data/bad_images"] == 2


def test_a_held_out_document_that_is_left_out_of_the_loss_is_counted(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    held_out = tmp_path / "held-out"
    shutil.copytree(place, held_out)
    file = held_out / "b.jpg"
    file.write_bytes(file.read_bytes()[:-40])
    drop = ("data.on_bad_image=drop", f"eval.source={held_out / 'rows.jsonl'}", "run.steps=1")
    train_sft(configure(tmp_path / "place", tmp_path / "run", *drop))
    first, last = read_metrics(tmp_path / "run" / METRICS)
    assert [row["eval/bad_images"] for row in (first, last)] == [2, 2]
    assert "train/bad_images" not in last


def test_a_step_without_a_document_is_refused(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    file = tmp_path / "place" / "b.jpg"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match="no image of this step can be decoded"):
        train_sft(
            configure(
                tmp_path / "place",
                tmp_path / "run",
                "data.on_bad_image=drop",
                "batch_size=1",
            )
        )


def test_an_engine_without_vision_refuses_before_data_are_read(tmp_path, place, bigram):
    overrides = (f"engine.backend={bigram}", f"data.source={tmp_path / 'none.jsonl'}")
    config = configure(place, tmp_path / "run", *overrides)
    with pytest.raises(UnsupportedCapability, match=f"{bigram}.*vision|vision.*{bigram}"):
        train_sft(config)


def test_each_rank_decodes_the_images_of_its_own_documents(tmp_path, place, monkeypatch):
    documents = build(configure(place, tmp_path / "run")).documents
    decoded: list[str] = []
    source = type(documents[0].images.planned[0].source)
    whole = source.decode
    monkeypatch.setattr(source, "decode", lambda one: (decoded.append(one.value), whole(one))[1])
    batches = []
    for rank in range(2):
        run = SimpleNamespace(
            policy=SimpleNamespace(dp_size=2, local_dp_ranks=[rank]),
            config=SimpleNamespace(data=SimpleNamespace(on_bad_image="error")),
            comm=SingleComm(),
        )
        decoded.clear()
        batches.append(Run.pack_local(run, documents))
        own = 0 if batches[-1].media is None else batches[-1].media.num_images
        assert len(decoded) == own
    assert sum(batch.num_documents for batch in batches) == 4
