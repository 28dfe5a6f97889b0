"""RL on rows with and without images, over engine-fsdp and the ``local`` rollout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pictured_models import draw, save_pictured_model, write_rows
from rank_runs import run_on_two_ranks

from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.registry import RolloutRegistry
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import PromptDataset, load_tokenizer, read_examples
from engine_trainer.errors import DataError, ImageError
from engine_trainer.explanation.command import explain_step
from engine_trainer.replay.again import replay_step
from engine_trainer.rl.learner import Learner
from engine_trainer.rl.loop import train_rl
from engine_trainer.sampling.evaluate import evaluate_model
from engine_trainer.telemetry.logs import METRICS, read_metrics

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
REWARD = """
def reward(sample):
    return sum(map(ord, sample.completion)) % 7 / 6
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer_of) -> Path:
    """A folder with a model of each family, and rows of one, none and two images."""
    folder = tmp_path_factory.mktemp("pictured")
    for family in FAMILIES:
        save_pictured_model(folder / family, family, tokenizer_of())
    draw(folder, "a.png")
    draw(folder, "b.jpg", (40, 16))
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": "<image>what", "answer": "1", "images": ["b.jpg"]},
        {"prompt": "hi", "answer": "2", "images": None},
        {"prompt": "<image>or<image>", "answer": "3", "images": ["a.png", "b.jpg"]},
        {"prompt": "why", "answer": "4", "images": None},
    ]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "text.jsonl", [rows[1], rows[3]])
    return folder


def configure(place: Path, output: Path, *overrides: str, family: str = "qwen2_5_vl") -> RLConfig:
    tree: dict[str, Any] = {
        "engine": {
            "model": {"path": str(place / family)},
            "backend": "fsdp2",
            "device": "cpu",
            "optimizer": {"lr": 0.01},
            "memory": {"max_tokens": 256, "max_patches": 64},
        },
        "data": {"source": str(place / "rows.jsonl"), "shuffle": False},
        "rollout": {"name": "local", "n": 3, "max_new_tokens": 6, "temperature": 1.0},
        "reward": {
            "function": f"{place / 'reward.py'}:reward",
            "workers": 0,
            "timeout_s": None,
        },
        "algorithm": {"prompts_per_step": 4, "mini_batches": 2},
        "run": {
            "output_dir": str(output),
            "steps": 2,
            "rollouts": "all",
            "progress": False,
            "tensorboard": False,
            "report": False,
        },
    }
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return load_config(RLConfig, file, overrides)


def read_rewards(output: Path) -> list[tuple[float, float]]:
    rows = read_metrics(output / METRICS)
    return [(row["train/reward"], row["train/loss"]) for row in rows if "train/loss" in row]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_log_probs_of_a_step_are_those_of_the_rollout(tmp_path, place, family):
    """Prompts with one image, two and none, in batches of which a part has no image."""
    outcome = train_rl(configure(place, tmp_path / "run", family=family))
    rows = [row for row in read_metrics(outcome.folder / METRICS) if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/rms"] < 1e-4
        # Three completions of three images.
        assert row["train/images"] == 9
        assert row["train/updates"] == 2
    assert rows[0]["train/grad_norm"] > 0


def test_the_images_reach_the_engine(tmp_path, place, monkeypatch):
    """Each document of the step has the images of its prompt, one feature an image token."""
    seen = []
    given = Learner._with_log_probs
    monkeypatch.setattr(
        Learner,
        "_with_log_probs",
        lambda self, shards: (seen.extend(shards), given(self, shards))[1],
    )
    train_rl(configure(place, tmp_path / "run", "run.steps=1"))
    (shard,) = seen
    assert shard.media is not None
    counts = [len(shard.media.images_of(d)) for d in range(shard.num_documents)]
    assert set(counts) == {0, 1, 2}
    token = read_image_token(place)
    assert int((shard.input_ids == token).sum()) == int(shard.media.grid.prod(-1).sum()) // 4


def read_image_token(place: Path) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(place / "qwen2_5_vl").image_token_id


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_left_alone(tmp_path, place):
    train_rl(configure(place, tmp_path / "alone", "run.steps=3"))
    train_rl(configure(place, tmp_path / "parted", "run.steps=2"))
    train_rl(configure(place, tmp_path / "parted", "run.steps=3"))
    alone, parted = (tmp_path / name for name in ("alone", "parted"))
    assert read_rewards(alone) == read_rewards(parted)
    for name in ("model.safetensors", "preprocessor_config.json", "processor_config.json"):
        assert (alone / "hf" / name).read_bytes() == (parted / "hf" / name).read_bytes()


def test_a_processor_that_has_changed_since_the_checkpoint_is_refused(tmp_path, place):
    train_rl(configure(place, tmp_path / "run", "run.steps=1"))
    changed = "data.processor_kwargs={image_mean: [0.5, 0.5, 0.5]}"
    with pytest.raises(ConfigError, match=r"processor_kwargs"):
        train_rl(configure(place, tmp_path / "run", "run.steps=2", changed))


def test_a_recording_names_the_images_and_is_neither_replayed_nor_explained(tmp_path, place):
    folder = train_rl(configure(place, tmp_path / "run", "run.steps=1")).folder
    table = pq.read_table(folder / "rollouts" / "step-000001.parquet")
    names = {tuple(names) for names in table["images"].to_pylist()}
    assert names == {(), ("b.jpg",), ("a.png", "b.jpg")}
    with pytest.raises(DataError, match="prompts of text alone in step 1"):
        replay_step(folder, 1)
    with pytest.raises(DataError, match="prompts of text alone in step 1"):
        explain_step(folder, 1)


def test_accuracy_is_measured_on_rows_with_images(tmp_path, place):
    source = f"eval={{source: {place / 'rows.jsonl'}, temperature: 0}}"
    figures = evaluate_model(configure(place, tmp_path / "run", source))
    assert figures["eval/problems"] == 4


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("algorithm.advantage=gae", "algorithm.critic={optimizer: {lr: 0.1}}"), "critic"),
        (("launcher=ray",), "launcher"),
        ((f"agent.function={Path(__file__)}:none",), "agent"),
    ],
)
def test_what_sees_no_images_is_refused_before_anything_is_loaded(tmp_path, place, overrides, key):
    with pytest.raises(ConfigError, match=f"{key}: expected .* for rows with images"):
        train_rl(configure(place, tmp_path / "run", *overrides))
    assert not (tmp_path / "run").exists()


def test_a_rollout_that_takes_no_images_is_refused_by_the_capability(tmp_path, place, monkeypatch):
    rows = RolloutRegistry.rows()
    monkeypatch.setattr(
        RolloutRegistry,
        "rows",
        lambda: [(strip(found), row) for found, row in rows],
    )

    def strip(found):
        from dataclasses import replace

        return replace(found, plugin=replace(found.plugin, capabilities=frozenset()))

    with pytest.raises(UnsupportedCapability, match=r"rollout 'local'.*vision|vision.*'local'"):
        train_rl(configure(place, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    # Rows of text alone are served as before.
    text = (f"data.source={place / 'text.jsonl'}", "algorithm.prompts_per_step=2")
    train_rl(configure(place, tmp_path / "text", *text))


def test_a_broken_image_is_an_error_that_names_its_row(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    file = tmp_path / "place" / "b.jpg"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ImageError, match=r"b\.jpg\) cannot be decoded"):
        train_rl(configure(tmp_path / "place", tmp_path / "run"))
    file.unlink()
    with pytest.raises(ImageError, match=r"b\.jpg\) is missing"):
        train_rl(configure(tmp_path / "place", tmp_path / "run"))
    drop = ("data.on_bad_image=drop", "algorithm.prompts_per_step=2")
    train_rl(configure(tmp_path / "place", tmp_path / "run", *drop))
    assert read_metrics(tmp_path / "run" / METRICS)[0]["data/bad_images"] == 2


def break_pixels(place: Path, name: str = "b.jpg") -> None:
    """Cut a file behind its header, which stays right."""
    file = place / name
    file.write_bytes(file.read_bytes()[:-40])


DROP = "data.on_bad_image=drop"


def test_prompts_with_broken_pixels_are_left_out_of_their_step_and_counted(tmp_path, place, caplog):
    shutil.copytree(place, tmp_path / "place")
    break_pixels(tmp_path / "place")
    # A right image beside the broken ones.
    with (tmp_path / "place" / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "<image>it", "answer": "5", "images": ["a.png"]}\n')
    config = configure(tmp_path / "place", tmp_path / "run", DROP, "algorithm.prompts_per_step=5")
    outcome = train_rl(config)
    rows = [row for row in read_metrics(outcome.folder / METRICS) if "train/loss" in row]
    assert [row["train/bad_images"] for row in rows] == [2, 2]
    assert [row["rollout/groups"] for row in rows] == [3, 3]
    # Three completions of one image.
    assert [row["train/images"] for row in rows] == [3, 3]
    assert all(row["mismatch/rms"] < 1e-4 for row in rows)
    assert "b.jpg) cannot be decoded" in caplog.text
    table = pq.read_table(outcome.folder / "rollouts" / "step-000001.parquet")
    assert {tuple(names) for names in table["images"].to_pylist()} == {(), ("a.png",)}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_whose_prompts_are_all_left_out_goes_on_with_the_others(tmp_path, place):
    """Of two ranks the first generates for the first and third row, whose pixels are broken."""
    shutil.copytree(place, tmp_path / "place")
    break_pixels(tmp_path / "place")
    configure(tmp_path / "place", tmp_path / "run")
    run_on_two_ranks(tmp_path, [["rl", str(tmp_path / "run.yaml"), DROP]])
    rows = [row for row in read_metrics(tmp_path / "run" / METRICS) if "train/loss" in row]
    assert [(row["train/bad_images"], row["rollout/groups"]) for row in rows] == [(2, 2), (2, 2)]


def test_a_step_whose_prompts_all_have_broken_pixels_is_an_error(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    break_pixels(tmp_path / "place")
    with pytest.raises(DataError, match=r"no image of this step can be decoded"):
        train_rl(
            configure(
                tmp_path / "place",
                tmp_path / "run",
                DROP,
                "algorithm.prompts_per_step=1",
                "algorithm.mini_batches=1",
            )
        )


def test_with_dynamic_sampling_prompts_with_broken_pixels_are_replaced(tmp_path, place):
    """A round of bad images alone is no error if another one follows."""
    shutil.copytree(place, tmp_path / "place")
    break_pixels(tmp_path / "place")
    rounds = "algorithm.dynamic_sampling={enabled: true, max_rounds: 4}"
    config = configure(
        tmp_path / "place",
        tmp_path / "run",
        DROP,
        rounds,
        "algorithm.prompts_per_step=1",
        "algorithm.mini_batches=1",
        "run.steps=1",
        "rollout.n=8",
    )
    outcome = train_rl(config)
    (row,) = [row for row in read_metrics(outcome.folder / METRICS) if "rollout/rounds" in row]
    assert row["train/bad_images"] == 1
    assert row["rollout/rounds"] > 1
    assert row["rollout/groups"] == 1


def test_held_out_problems_with_broken_pixels_are_not_measured_and_counted(tmp_path, place):
    shutil.copytree(place, tmp_path / "place")
    break_pixels(tmp_path / "place")
    source = f"eval={{source: {tmp_path / 'place' / 'rows.jsonl'}, temperature: 0}}"
    figures = evaluate_model(configure(tmp_path / "place", tmp_path / "run", source, DROP))
    assert figures["eval/problems"] == 2
    assert figures["eval/bad_images"] == 2
    with pytest.raises(ImageError, match=r"b\.jpg\) cannot be decoded"):
        evaluate_model(configure(tmp_path / "place", tmp_path / "error", source))


def build(config: RLConfig, **kwargs: Any) -> PromptDataset:
    tokenizer = load_tokenizer(config.data, config.engine.model)
    return PromptDataset.build(
        read_examples(config.data, "prompt"), tokenizer, config.data, **kwargs
    )


def test_a_prompt_has_its_image_tokens_and_one_placeholder_for_each_image(tmp_path, place):
    config = configure(place, tmp_path / "run")
    token = read_image_token(place)
    prompts = build(config).prompts
    assert [p.tokens.count(token) for p in prompts] == [p.rows // 4 for p in prompts]
    assert [list(p.placeholders).count(token) for p in prompts] == [1, 0, 2, 0]
    assert [p.rendered.count("<|image_pad|>") for p in prompts] == [1, 0, 2, 0]


def test_a_prompt_is_cut_before_its_first_image_or_dropped(tmp_path, place):
    whole = build(configure(place, tmp_path / "run")).prompts
    first = whole[0]
    spare = len(first) - 1
    config = configure(
        place, tmp_path / "cut", f"data.max_length={spare}", "data.on_too_long=truncate"
    )
    cut = build(config)
    assert cut.prompts[0].tokens == first.tokens[1:]
    assert list(cut.prompts[0].placeholders) == list(first.placeholders)[1:]
    # The second row with images is longer, and would be cut inside one.
    assert cut.dropped == 1


def test_a_prompt_with_too_many_patches_is_refused_or_dropped(tmp_path, place):
    config = configure(place, tmp_path / "run")
    with pytest.raises(DataError, match=r"rows\.jsonl:3.*64 patches"):
        build(config, patches=63)
    dropping = configure(place, tmp_path / "drop", "data.on_too_long=drop")
    assert build(dropping, patches=63).dropped == 1


def test_a_rollout_gets_the_images_in_both_forms(tmp_path, place):
    from engine_trainer.data.datasets import make_prompt_images

    prompts = build(configure(place, tmp_path / "run")).prompts
    left, images = make_prompt_images(prompts, drop=False)
    assert left == [0, 1, 2, 3]
    assert images is not None
    assert [one is None for one in images] == [False, True, False, True]
    third = images[2]
    assert third is not None
    assert [tuple(picture.shape) for picture in third.pictures] == [(24, 16, 3), (16, 40, 3)]
    assert all(picture.dtype == torch.uint8 for picture in third.pictures)
    assert third.placeholders == list(prompts[2].placeholders)
    assert make_prompt_images(prompts[1:2], drop=False) == ([0], None)
