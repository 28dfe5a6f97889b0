"""The saved reward model as transformers' sequence classifier: its logits are the run's scores."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_api.errors import CheckpointWriteError
from engine_trainer.config import RewardModelConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.data.preferences import score_token
from engine_trainer.preferences import classifier
from engine_trainer.preferences import pairs as pairs_module
from engine_trainer.preferences.classifier import write_classifier
from engine_trainer.preferences.reward_model import scored_document, train_reward_model

# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PADDINGS = {"own": "<pad>", "eos": "<eos>", "none": None}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    dice = random.Random(4)
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"{dice.randint(0, 9)}+{dice.randint(0, 99)}=",
            "chosen": str(dice.randint(0, 9)),
            "rejected": str(dice.randint(0, 9)) * dice.randint(1, 4),
        }
        for _ in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def value_model(source: Path, folder: Path, padding: str | None) -> Path:
    """Write a value model whose head has a bias, with a tokenizer that pads with ``padding``."""
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.num_labels = 1
    config.pad_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        model.score.bias.fill_(0.75)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = padding
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def train(model: Path, pairs: Path, out: Path, monkeypatch) -> tuple[Path, list[torch.Tensor]]:
    """Train two steps, and return the folder and the scores of the last evaluation."""
    seen: list[torch.Tensor] = []
    real = pairs_module.document_sums

    def noted(outputs, batch):
        seen.append(real(outputs, batch))
        return seen[-1]

    monkeypatch.setattr(pairs_module, "document_sums", noted)
    config = {
        "engine": {
            "model": {"path": str(model)},
            "model_type": "value_model",
            "device": "cpu",
            "optimizer": {"lr": 0.003},
            "precision": {"compute": "float32"},
        },
        "data": {"source": str(pairs), "shuffle": False},
        "batch_size": 8,
        "eval": {"source": str(pairs)},
        "run": {
            "output_dir": str(out),
            "steps": 2,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
    }
    train_reward_model(from_tree(RewardModelConfig, config))
    return out / "hf", seen


@pytest.mark.parametrize("kind", list(PADDINGS))
def test_the_logits_of_transformers_are_the_scores_of_the_run(
    sums_model, pairs, tmp_path, monkeypatch, kind
):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = value_model(sums_model, tmp_path / "model", PADDINGS[kind])
    folder, seen = train(model, pairs, tmp_path / "out", monkeypatch)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert "score.bias" not in load_file(folder / "model.safetensors")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == loaded.config.pad_token_id == (0 if kind == "own" else 1)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts = [row["prompt"] + row[name] for row in rows for name in ("chosen", "rejected")]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    with torch.inference_mode():
        one_by_one = [loaded(input_ids=torch.tensor([row])).logits[0, 0] for row in ids]
        padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        together = loaded(**padded).logits[:, 0]
    scores = seen[-1].float()
    # The bias, which Adam moves by rounding alone, is the same in every row, and is left out.
    offset = scores - torch.stack(one_by_one)
    torch.testing.assert_close(offset, torch.full_like(offset, 0.75), atol=0.02, rtol=0)
    torch.testing.assert_close(
        scores - offset.mean(), torch.stack(one_by_one), atol=2e-6, rtol=1e-6
    )
    torch.testing.assert_close(together, torch.stack(one_by_one), atol=2e-6, rtol=1e-6)
    assert scores.std() > 0.1


def test_a_document_is_longer_by_one_token_only_where_its_last_one_is_scored():
    pad = 9
    assert scored_document([1, 2, 3], pad) == {
        "input_ids": [1, 2, 3, 3],
        "loss_weight": [0, 0, 0, 1],
    }
    assert scored_document([1, 2, 9], pad) == {"input_ids": [1, 2, 9], "loss_weight": [0, 0, 1]}
    assert scored_document([9, 2, 9, 9], pad)["loss_weight"] == [0, 0, 1, 0]
    assert [score_token(ids, pad) for ids in ([1, 2], [1, 9], [9, 9])] == [1, 0, 0]


def test_the_bias_is_taken_out_of_the_file_of_many_that_holds_it(tmp_path):
    weights = {
        "model-00001-of-00002.safetensors": {"a": torch.ones(3)},
        "model-00002-of-00002.safetensors": {
            "score.weight": torch.ones(2),
            "score.bias": torch.ones(1),
        },
    }
    for name, tensors in weights.items():
        save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": 24},
        "weight_map": {t: name for name, tensors in weights.items() for t in tensors},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    write_classifier(tmp_path, 4)
    read = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert read["weight_map"].keys() == {"a", "score.weight"}
    assert read["metadata"]["total_size"] == 20
    assert list(load_file(tmp_path / "model-00002-of-00002.safetensors")) == ["score.weight"]
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 4


def test_a_model_with_several_parts_and_one_without_a_classifier(tmp_path, caplog):
    save_file({"score.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    before = {"model_type": "nothing_known", "architectures": ["X"], "text_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(before))
    write_classifier(tmp_path, 4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == before | {"pad_token_id": 4, "text_config": {"a": 1, "pad_token_id": 4}}
    assert "no sequence classifier of type nothing_known" in caplog.text


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    save_file({"score.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(classifier, "write_text", full)
    with pytest.raises(CheckpointWriteError, match=r"(?s)could not be written.*No space left"):
        write_classifier(tmp_path, 4)


def test_an_embedding_that_the_padding_token_lacks_makes_eos_the_padding(sums_model, tmp_path):
    from engine_api.config import ModelSource
    from engine_trainer.config.sections import DataSection
    from engine_trainer.data import load_tokenizer
    from engine_trainer.preferences.classifier import padding_token

    folder = tmp_path / "model"
    shutil.copytree(sums_model, folder)
    source = ModelSource(path=str(folder))
    tokenizer = load_tokenizer(DataSection(source="x"), source)
    assert padding_token(tokenizer, source) == 0
    tokenizer.pad_token_id = 16
    assert padding_token(tokenizer, source) == 1
