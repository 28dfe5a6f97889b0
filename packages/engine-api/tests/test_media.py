"""Tests of images by document: packing, moving, micro-batches, and the check against tokens."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from engine_api import Batch, EngineConfig, Memory, ModelSource, Topology
from engine_api.codec import decode, encode
from engine_api.errors import (
    BatchError,
    ConfigError,
    RankFailure,
    RolloutError,
    UnsupportedCapability,
)
from engine_api.hf_noise import noise_rates
from engine_api.hf_vision import Vision, find_runs, read_vision, refuse_vision
from engine_api.media import Media
from engine_api.microbatch import PixelBudget, least_bins, split_micro_batches
from engine_api.prepare import prepare
from engine_api.requests import check_images
from engine_api.rollout import PromptImages

IMAGE = 90
VISION = Vision(image_token=IMAGE, video_token=91, row_shape=(3,), merge=2)
MOVING = replace(VISION, takes_videos=True)


def document(*parts, first=0.0):
    """Return a document of numbers of text tokens, and heights and widths of images."""
    ids = []
    pixels = []
    grid = []
    for part in parts:
        if isinstance(part, int):
            ids += [5] * part
            continue
        height, width = part
        ids += [IMAGE] * (height * width // 4)
        start = first + sum(len(one) for one in pixels)
        pixels.append(torch.arange(height * width).float()[:, None].repeat(1, 3) + start)
        grid.append([1, height, width])
    found = {"input_ids": ids, "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
    if grid:
        found["media"] = {"pixels": torch.cat(pixels), "grid": torch.tensor(grid)}
    return found


def batch():
    return Batch.pack(
        [document(2, (2, 4), 1), document(3), document(1, (2, 2), 1, (4, 2), first=100.0)]
    )


def starts_of(media):
    """Return the first number of each image's first row."""
    return [float(rows[0, 0]) for rows in media.pixels.split(list(media.rows))]


def test_images_are_packed_by_document():
    media = batch().media
    assert media is not None
    assert media.bounds == (0, 1, 1, 3)
    assert media.rows == (8, 4, 8)
    assert media.rows_by_document == [8, 0, 12]
    assert starts_of(media) == [0.0, 100.0, 104.0]
    assert Batch.pack([document(3), document(2)]).media is None


def test_selected_documents_bring_their_own_images_in_their_order():
    media = batch().select([2, 1, 0]).media
    assert media is not None
    assert media.bounds == (0, 2, 2, 3)
    assert starts_of(media) == [100.0, 104.0, 0.0]
    assert batch().select([1]).media.num_images == 0
    assert batch().select([]).media.bounds == (0,)


def test_batches_with_and_without_images_are_joined():
    text = Batch.pack([document(4)])
    joined = Batch.concat([text, batch(), text, batch().select([0])])
    assert joined.media.bounds == (0, 0, 1, 1, 3, 3, 4)
    assert starts_of(joined.media) == [0.0, 100.0, 104.0, 0.0]
    assert Batch.concat([text, text]).media is None


@pytest.mark.parametrize(
    "travel",
    [
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: decode(encode(one)),
        lambda one: one.to("cpu"),
        lambda one: one.with_fields(extra=torch.zeros(one.num_tokens)),
        lambda one: one.with_computed(extra=torch.zeros(one.num_tokens)),
    ],
    ids=["pickle", "codec", "to", "with_fields", "with_computed"],
)
def test_images_travel_with_their_batch(travel):
    media = travel(batch()).media
    assert media.bounds == (0, 1, 1, 3)
    assert torch.equal(media.pixels, batch().media.pixels)
    assert torch.equal(media.grid, batch().media.grid)
    assert batch().with_media(None).media is None


def test_fields_alone_are_left_out():
    kept = batch().with_fields(extra=torch.zeros(batch().num_tokens)).keep_fields("extra")
    assert set(kept.fields) == {"extra"}
    assert kept.media.bounds == (0, 1, 1, 3)
    assert torch.equal(kept.input_ids, batch().input_ids)
    with pytest.raises(BatchError, match="missing field") as caught:
        batch().keep_fields("absent")
    assert caught.value.field == "absent"


def moving_batch():
    """Return a batch of a video between two images, a document without any, and a video."""
    first = document(1, (2, 2), 1, (2, 4), 1, (2, 2))
    first["media"]["seconds"] = torch.tensor([0.0, 0.5, 0.0])
    first["input_ids"][3:5] = [91, 91]
    last = document(2, (2, 2), first=100.0)
    last["media"] = {
        "pixels": last["media"]["pixels"].repeat(2, 1),
        "grid": torch.tensor([[2, 2, 2]]),
        "seconds": torch.tensor([2.0]),
    }
    last["input_ids"][2:] = [91, 91]
    last["loss_weight"] += [1.0]
    return Batch.pack([first, document(2), last])


def test_videos_keep_their_seconds_in_every_way():
    moving = moving_batch()
    MOVING.check(moving)
    assert moving.media.are_videos == (False, True, False, True)
    assert moving.media.seconds.tolist() == [0.0, 0.5, 0.0, 2.0]
    assert moving.media.rows == (4, 8, 4, 8)
    assert moving.select([2, 0]).media.seconds.tolist() == [2.0, 0.0, 0.5, 0.0]
    assert moving.select([1]).media.are_videos == ()
    joined = Batch.concat([batch(), moving, Batch.pack([document(2)])])
    assert joined.media.seconds.tolist() == [0.0] * 3 + [0.0, 0.5, 0.0, 2.0]
    MOVING.check(joined)
    for travelled in (
        pickle.loads(pickle.dumps(moving)),
        decode(encode(moving)),
        moving.to("cpu"),
        moving.with_fields(extra=torch.zeros(moving.num_tokens)),
    ):
        assert torch.equal(travelled.media.seconds, moving.media.seconds)
        assert travelled.media.are_videos == moving.media.are_videos
        assert set(travelled.media.tensors) == {"pixels", "grid", "cu_images", "seconds"}
    assert batch().to("cpu").media.seconds is None


def test_patches_of_videos_fill_a_micro_batch():
    moving = moving_batch()
    budget = PixelBudget(rows=moving.media.rows_by_document, most=16)
    assert least_bins(moving.lengths, 100, budget) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (torch.zeros(2), r"expected a float32 tensor \[3\]"),
        (torch.zeros(3, dtype=torch.float64), "float32"),
        (torch.tensor([0.0, -1.0, 0.0]), "got -1.0 for image 1"),
        (torch.tensor([0.0, 1.0, float("nan")]), "got nan for image 2"),
    ],
)
def test_seconds_that_fit_no_images_are_refused(seconds, message):
    media = batch().media
    with pytest.raises(BatchError, match=message) as caught:
        replace(media, seconds=seconds)
    assert caught.value.field == "media.seconds"


def test_a_video_by_frame_has_a_run_for_each_row_in_time():
    framed = replace(MOVING, by_frame=True)
    ids = [5, 91, 91, 5, 91, 91]
    shown = {"pixels": torch.zeros(16, 3), "grid": torch.tensor([[2, 2, 4]])}
    shown["seconds"] = torch.tensor([1.0])
    framed.check(Batch.pack([{"input_ids": ids, "media": shown}]))
    with pytest.raises(BatchError, match="in 2 runs"):
        MOVING.check(Batch.pack([{"input_ids": ids, "media": shown}]))
    ids[3] = 91
    with pytest.raises(BatchError, match="expected 2, one for each row in time"):
        framed.check(Batch.pack([{"input_ids": ids, "media": shown}]))


def test_a_video_is_refused_by_name_where_images_alone_are_taken():
    with pytest.raises(UnsupportedCapability) as caught:
        VISION.check(moving_batch())
    assert caught.value.capability == "video"
    assert caught.value.remedy


def bad(**changes):
    parts = {
        "pixels": torch.zeros(8, 3),
        "grid": torch.tensor([[1, 2, 4]]),
        "cu_images": torch.tensor([0, 1]),
    }
    return lambda: Media(**{**parts, **changes})


BAD = {
    "fewer rows than the grid has": (bad(pixels=torch.zeros(7, 3)), "media.pixels"),
    "a NaN": (bad(pixels=torch.full((8, 3), float("nan"))), "media.pixels"),
    "integer pixels": (bad(pixels=torch.zeros(8, 3, dtype=torch.uint8)), "media.pixels"),
    "a list of pixels": (bad(pixels=[1.0]), "media.pixels"),
    "pixels without values": (bad(pixels=torch.zeros(8, 3, device="meta")), "media.pixels"),
    "pixels with a gradient": (
        bad(pixels=torch.zeros(8, 3, requires_grad=True)),
        "media.pixels",
    ),
    "a grid of two numbers": (bad(grid=torch.tensor([[2, 4]])), "media.grid"),
    "a grid of zeros": (bad(grid=torch.tensor([[0, 2, 4]])), "media.grid"),
    "a floating grid": (bad(grid=torch.tensor([[1.0, 2.0, 4.0]])), "media.grid"),
    "more images than grids": (bad(cu_images=torch.tensor([0, 2])), "media.cu_images"),
    "falling numbers": (bad(cu_images=torch.tensor([0, 1, 0, 1])), "media.cu_images"),
    "another number of documents": (
        lambda: batch().with_media(Media.none(2)),
        "media.cu_images",
    ),
    "no media": (lambda: batch().with_media(torch.zeros(1)), "media"),  # type: ignore[arg-type]
    "a field of that name": (
        lambda: Batch.pack([document(2)]).with_fields(media=torch.zeros(2)),
        "fields",
    ),
    "pixels under another key": (
        lambda: Batch.pack([{**document(2), "media": {"pixel_values": 1}}]),
        "media",
    ),
    "images of other patches": (
        lambda: Media.pack([{"pixels": torch.zeros(1, 3)}, {"pixels": torch.zeros(1, 4)}]),
        "media.pixels",
    ),
}


@pytest.mark.parametrize(("make", "field"), BAD.values(), ids=BAD.keys())
def test_images_that_do_not_fit_are_refused_by_name(make, field):
    with pytest.raises(BatchError) as caught:
        make()
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_document_of_bad_images_is_named():
    wrong = {"pixels": torch.zeros(7, 3), "grid": torch.tensor([[1, 2, 4]])}
    with pytest.raises(BatchError, match="document 1: expected 8 rows") as caught:
        Batch.pack([document(2), {**document(2), "media": wrong}])
    assert caught.value.index == 1


def test_rows_are_images_where_there_is_no_grid():
    media = Media.pack([None, {"pixels": torch.zeros(2, 3, 4, 4)}])
    assert media is not None
    assert media.rows == (1, 1)
    assert media.bounds == (0, 0, 2)


def test_micro_batches_keep_both_budgets():
    lengths = [10, 9, 8, 7]
    pixels = PixelBudget(rows=[4, 4, 0, 4], most=4)
    bins = least_bins(lengths, 40, pixels)
    assert sorted(i for b in bins for i in b) == [0, 1, 2, 3]
    assert all(pixels.holds(b) for b in bins)
    assert len(bins) == 3
    split = split_micro_batches(lengths, 40, 4, pixels)
    assert len(split) == 4
    assert all(pixels.holds(b) for b in split)
    with pytest.raises(BatchError, match="document 0 has 4 rows of pixels, the budget is 3"):
        least_bins(lengths, 40, replace(pixels, most=3))


@pytest.mark.parametrize("value", [0, -1, "8"])
def test_a_bad_budget_of_patches_is_refused(value):
    with pytest.raises(ConfigError, match=r"memory\.max_patches"):
        EngineConfig(model=ModelSource(path="x"), memory=Memory(max_patches=value))


@pytest.mark.parametrize("value", ["vision", ["tower"], None])
def test_unknown_parts_cannot_be_frozen(value):
    with pytest.raises(ConfigError, match=r"model\.freeze: expected a list of parts of vision"):
        EngineConfig(model=ModelSource(path="x", freeze=value))


def split(ranks, documents, **arguments):
    """Return each rank's micro-batches."""

    def work(comm):
        topology = Topology(rank=comm.rank, world_size=2, dp_rank=comm.rank, dp_size=2)
        return prepare(
            Batch.pack(documents[comm.rank]),
            comm=comm,
            topology=topology,
            max_tokens=8,
            vocab_size=100,
            needs_weight=False,
            **arguments,
        )

    return ranks(2, work)


def images_of(parts):
    return [None if part.media is None else part.media.num_images for part in parts]


def test_ranks_agree_on_micro_batches_with_images(ranks):
    """The tower runs in as few of them as possible, on all ranks at once, and last."""
    text = document(6)
    pictured = document(3, (2, 4), 2)
    first, second = split(ranks, [[pictured, text, pictured], [text, text]])
    assert images_of(first.parts) == [None, 1, 1]
    assert images_of(second.parts) == [None, 0, 0]
    for one in (first, second):
        assert [part.lengths for part in one.parts] == [
            [one.batch.lengths[d] for d in documents] for documents in one.documents
        ]


def test_no_rank_has_media_where_none_has_an_image(ranks):
    one, other = split(ranks, [[document(6), document(5)], [document(4)]])
    assert images_of(one.parts) == [None, None]
    assert images_of(other.parts) == [None, None]


def test_ranks_agree_on_the_number_of_micro_batches_by_patches(ranks):
    small = document(1, (2, 4), 1)
    one, other = split(ranks, [[small, small], [document(2)]], max_patches=8)
    assert len(one.parts) == len(other.parts) == 2


def test_too_many_patches_on_one_rank_fail_on_all(ranks):
    own, other = split(ranks, [[document(1, (2, 4), 1)], [document(2)]], max_patches=7)
    assert isinstance(own, BatchError)
    assert isinstance(other, RankFailure)
    assert "document 0 has 8 rows of pixels, the budget is 7" in other.failures[0]


WRONG = {
    "too few tokens": (lambda ids: [*ids[:3], 5, *ids[4:]], "expected 2 image tokens"),
    "cut inside": (lambda ids: ids[:3], "expected 2 image tokens"),
    "a second run": (lambda ids: [*ids, IMAGE], "1 images of 2 features, and 3 image tokens"),
    "no tokens": (lambda ids: [5] * len(ids), "1 images of 2 features, and 0 image tokens"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG.keys())
def test_image_tokens_must_be_as_many_as_features(change, text):
    given = document(2, (2, 4), 1)
    given["input_ids"] = change(given["input_ids"])
    del given["loss_weight"]
    VISION.check(batch())
    plain = {"input_ids": [5, 5]}
    with pytest.raises(BatchError, match=text) as caught:
        VISION.check(Batch.pack([plain, given]))
    assert "document 1" in str(caught.value)
    assert caught.value.field == "input_ids"


def test_two_images_in_one_run_are_refused():
    """Their features would be told apart by nothing."""
    given = document(1, (2, 4), (2, 4), 1)
    with pytest.raises(BatchError, match="document 0 has 2 images of 4 features, and 4 image"):
        VISION.check(Batch.pack([given]))


def test_images_at_the_ends_of_documents_are_two_runs():
    packed = Batch.pack([document(1, (2, 4)), document((2, 4), 1)])
    VISION.check(packed)
    assert [(run.document, run.start, run.length) for run in find_runs(packed, IMAGE)] == [
        (0, 1, 2),
        (1, 3, 2),
    ]
    assert VISION.number_image_tokens(packed).tolist() == [-1, 0, 0, 1, 1, -1]


def test_images_of_another_model_are_refused():
    with pytest.raises(BatchError, match=r"expected rows of shape \(4,\), got \(3,\)"):
        replace(VISION, row_shape=(4,)).check(batch())
    with pytest.raises(BatchError, match="a height and width that 3 divides"):
        replace(VISION, merge=3).check(batch())
    with pytest.raises(BatchError, match="document 1 has a token of a video"):
        VISION.check(Batch.pack([{"input_ids": [5]}, {"input_ids": [5, 91]}]))


def test_a_model_with_a_tower_is_refused_by_name():
    raw = {"model_type": "qwen3_vl", "vision_config": {}}
    with pytest.raises(UnsupportedCapability, match="vision_config") as caught:
        refuse_vision(raw, (), "an engine")
    assert caught.value.capability == "vision"
    refuse_vision(raw, ("vision",), "an engine")
    refuse_vision({"model_type": "qwen3"}, (), "an engine")


def test_a_family_that_no_test_has_compared_is_refused():
    from transformers import LlavaConfig

    with pytest.raises(UnsupportedCapability, match="no test has compared its tower") as caught:
        read_vision(LlavaConfig(), "an engine")
    assert caught.value.capability == "vision"


def test_noise_of_a_tower_is_found():
    from transformers import InternVLConfig

    config = InternVLConfig(vision_config={"hidden_dropout_prob": 0.1})
    assert noise_rates(config)["vision_config.hidden_dropout_prob"] == 0.1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda media: replace(media, pixels=media.pixels[:, :2]),
        lambda media: replace(media, grid=torch.tensor([[1, 1, 8]])),
        lambda media: replace(media, pixels=media.pixels[:4], grid=torch.tensor([[1, 2, 2]])),
    ],
    ids=["patches of another width", "a grid that does not merge", "another size"],
)
def test_an_error_of_a_prompts_images_names_the_prompt(spoil):
    one = document(2, (2, 4))
    media = Media.pack([one["media"]])
    assert media is not None
    shown = PromptImages(media=spoil(media), placeholders=[], pictures=())
    with pytest.raises(RolloutError, match=r"^test: prompt 1") as caught:
        check_images([[5], one["input_ids"]], [None, shown], VISION, "test")
    assert caught.value.remedy
