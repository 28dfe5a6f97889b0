"""Tests of the fixtures: one seed gives the same bytes, and batches are as described."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_conformance.cases._expect import documents
from engine_conformance.cases._pictured import mixed_prompts
from engine_conformance.cases.rl import _grouped
from engine_conformance.fixtures import (
    LENGTHS,
    TinyModel,
    concatenate,
    nearby,
    packed_documents,
    write_checkpoint,
)
from engine_conformance.fixtures.pictured_prompts import (
    draw_prompt,
    write_other_tower,
    write_other_weights,
    write_served_model,
)
from engine_conformance.fixtures.pictures import IMAGE, PictureOracle
from engine_conformance.oracle import read_safetensors
from engine_conformance.seeds import current_seed, use_seed


def test_checkpoint_depends_on_its_seed_only(tmp_path: Path) -> None:
    folders = [
        write_checkpoint(tmp_path / str(i), TinyModel(seed=seed))
        for i, seed in enumerate((3, 3, 4))
    ]
    files = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1] != files[2]
    configs = [(folder / "config.json").read_bytes() for folder in folders]
    assert configs[0] == configs[2]


def test_a_tensor_depends_on_its_name_and_the_seed(tmp_path: Path) -> None:
    shallow = read_safetensors(write_checkpoint(tmp_path / "a", TinyModel()))
    deep = read_safetensors(write_checkpoint(tmp_path / "b", TinyModel(num_layers=3, shards=2)))
    assert shallow.keys() < deep.keys()
    assert all(tensor.equal(deep[name]) for name, tensor in shallow.items())
    norm = shallow["model.norm.weight"]
    assert 0.1 < norm.std() < 0.3
    assert abs(norm.mean() - 1) < 0.1


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_batches_are_packed_and_repeatable(lengths: tuple[int, ...]) -> None:
    batch = packed_documents(5, lengths)
    again = packed_documents(5, lengths)
    assert batch.lengths == list(lengths)
    assert all(
        np.array_equal(value, again.arrays()[name]) for name, value in batch.arrays().items()
    )
    assert not batch.loss_weight[batch.cu_seqlens[:-1]].any()
    assert batch.denominator > 0
    assert all(value.shape == (sum(lengths),) for value in batch.per_token().values())
    assert batch.per_token().keys() == batch.arrays().keys() - {"input_ids", "cu_seqlens"}


def test_weights_are_masked_and_fractional() -> None:
    weights = packed_documents(0, LENGTHS["uneven"]).loss_weight
    assert {0.0, 1.0} < set(weights.tolist())
    assert np.array_equal(weights * 4, np.round(weights * 4))


def test_take_split_and_concatenate_keep_documents() -> None:
    batch = packed_documents(0, LENGTHS["uneven"])
    parts = batch.split(2)
    assert [part.lengths for part in parts] == [[7, 12, 3], [1, 5, 9]]
    back = concatenate(parts).take([0, 3, 1, 4, 2, 5])
    assert all(np.array_equal(value, back.arrays()[name]) for name, value in batch.arrays().items())
    assert sum(part.denominator for part in parts) == batch.denominator
    with pytest.raises(ValueError, match="1 documents cannot be dealt to 2"):
        packed_documents(0, [4]).split(2)


def test_nearby_values_keep_off_the_clip_kinks() -> None:
    distance = np.abs(nearby(np.full(1000, -3.0), seed=0) + 3.0)
    small = distance < 0.16
    large = distance > 0.34
    assert np.all(small | large)
    assert 300 < small.sum() < 700
    batch = packed_documents(0, [5]).near(1, old_log_probs=np.zeros(5))
    assert batch.old_log_probs.dtype == np.float32
    assert np.abs(batch.old_log_probs).max() < 0.61


def test_another_seed_draws_other_batches_and_forgets_those_before() -> None:
    drawn = documents(1)
    near = nearby(drawn.returns, seed=1)
    try:
        use_seed(1)
        assert documents(1).input_ids.tolist() != drawn.input_ids.tolist()
        assert nearby(drawn.returns, seed=1).tolist() != near.tolist()
        with pytest.raises(ValueError, match="expected a seed of 0 or more, got -1"):
            use_seed(-1)
        assert current_seed() == 1
    finally:
        use_seed(0)
    assert documents(1).input_ids.tolist() == drawn.input_ids.tolist()


def test_rewards_of_grpo_follow_the_seed() -> None:
    batch = documents(122)
    drawn = _grouped(batch, 1).advantages.tolist()
    try:
        use_seed(3)
        assert _grouped(batch, 1).advantages.tolist() != drawn
    finally:
        use_seed(0)
    assert _grouped(batch, 1).advantages.tolist() == drawn


def test_lengths_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        packed_documents(0, [3, 0])


def test_pictures_of_prompts_become_the_patches_of_the_models_own_processor(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")
    folder = write_served_model(tmp_path / "model")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    for prompt in mixed_prompts():
        if prompt.images is None:
            assert IMAGE not in prompt.ids
            continue
        pictures = [picture.numpy() for picture in prompt.images.pictures]
        made = processor(images=pictures, return_tensors="pt")
        assert torch.equal(made["pixel_values"], prompt.images.media.pixels)
        assert torch.equal(made["image_grid_thw"], prompt.images.media.grid)
        # A server that replaces each placeholder by as many tokens arrives at the prompt's ids.
        counts = iter((prompt.images.media.grid.prod(-1) // 4).tolist())
        expanded = [
            [token] * (next(counts) if token == IMAGE else 1)
            for token in prompt.images.placeholders
        ]
        assert [token for run in expanded for token in run] == list(prompt.ids)


def test_a_served_model_may_have_another_tower_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, tower, whole = (
        read_safetensors(write(tmp_path / write.__name__))
        for write in (write_served_model, write_other_tower, write_other_weights)
    )
    assert first.keys() == tower.keys() == whole.keys()
    changed = {name for name in first if not torch.equal(first[name], tower[name])}
    assert changed == {name for name in first if name.startswith("visual.")}
    assert changed
    assert not any(torch.equal(first[name], whole[name]) for name in first)


def test_prompts_with_the_same_ids_and_other_pictures_have_other_log_probs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    oracle = PictureOracle(write_served_model(tmp_path / "model"))
    rows = []
    for pictures in (1, 2):
        prompt = draw_prompt(5, 3, (2, 4), 2, pictures=pictures)
        assert prompt.images is not None
        media = prompt.images.media
        with torch.no_grad():
            logits = oracle.logits(torch.tensor(prompt.ids), media.pixels, media.grid)
        rows.append(logits.log_softmax(-1)[-1])
    assert float((rows[0] - rows[1]).abs().max()) > 1
