"""Videos in rows of SFT: their forms, their frames, and their defects."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from moving_pictures import HAS_TORCHVISION, draw_frames, needs_torchvision
from pictured_models import VIDEO_PLACE, draw, save_pictured_model, write_rows
from PIL import Image

from engine_api import Batch
from engine_api.config import ModelSource
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_vision import read_vision
from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import SFTDataset, load_tokenizer, read_examples
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.readers import Row
from engine_trainer.data.sources import VideoSource
from engine_trainer.errors import DataError, ImageError
from engine_trainer.utils.hf_models import hf_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def source(value: object, folder: Path) -> VideoSource:
    return VideoSource(
        value=value, file=str(folder / "rows.jsonl"), row=3, column="videos", number=1
    )


def animate(folder: Path, name: str, durations: list[int], **options: Any) -> str:
    """Write an animation whose frames are red in steps of 40, each shown for some milliseconds."""
    frames = [Image.new("RGB", (8, 8), (40 * n, 0, 0)) for n in range(len(durations))]
    frames[0].save(
        folder / name,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        **options,
    )
    return name


def shown(video: VideoSource, fps: float) -> list[int]:
    """Return the numbers of the frames that are taken of an animation."""
    reds = [frame.getpixel((4, 4))[0] for frame in video.decode(fps)]
    return [round(red / 40) for red in reds]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.gif", {}),
        ("a.png", {}),
        ("a.webp", {"lossless": True}),
        ("shown_elsewhere.png", {"default_image": True}),
    ],
)
def test_frames_of_an_animation_are_taken_by_its_own_times(tmp_path, name, options):
    """They are shown from 0 to 0.1, 0.4, 0.5 and 1.0 seconds."""
    durations = [100, 300, 100, 500]
    if "default_image" in options:
        frames = [Image.new("RGB", (8, 8), (40 * n, 0, 0)) for n in range(4)]
        Image.new("RGB", (8, 8), (255, 0, 0)).save(
            tmp_path / name,
            save_all=True,
            append_images=frames,
            duration=durations,
            default_image=True,
        )
    else:
        animate(tmp_path, name, durations, **options)
    video = source(name, tmp_path)
    assert video.read_size(10) == (10, 8, 8)
    assert shown(video, 10) == [0, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert shown(video, 4) == [0, 1, 3, 3]
    assert video.read_size(4) == (4, 8, 8)
    slow = source({"path": name, "fps": 2}, tmp_path)
    assert slow.find_fps(10.0) == 2
    assert shown(slow, 10) == [0, 3]


@pytest.mark.parametrize(
    ("durations", "fps", "count"),
    [
        ([7000] * 3, 3, 63),
        ([14000] * 3, 1.5, 63),
        ([3500] * 3, 6, 63),
        ([1750] * 3, 12, 63),
        ([100] * 6, 10, 6),
    ],
)
@pytest.mark.parametrize("name", ["a.gif", "a.png"])
def test_no_frame_is_taken_at_the_end_of_the_file(tmp_path, name, durations, fps, count):
    video = source(animate(tmp_path, name, durations), tmp_path)
    assert video.read_size(fps) == (count, 8, 8)
    found = shown(video, fps)
    assert found == sorted(found)
    assert {found.count(n) for n in range(len(durations))} == {count // len(durations)}


def test_a_frame_is_shown_from_the_end_of_the_one_before(tmp_path):
    """The time of a frame, 195 / 3 s or 3 / 30 s, is the border of two others exactly."""
    video = source(animate(tmp_path, "a.png", [65000, 1000]), tmp_path)
    assert shown(video, 3) == [0] * 195 + [1] * 3
    thirds = [1000 / 30] * 30
    frames = [Image.new("RGB", (8, 8), (8 * n, 0, 0)) for n in range(30)]
    frames[0].save(tmp_path / "b.png", save_all=True, append_images=frames[1:], duration=thirds)
    reds = [frame.getpixel((4, 4))[0] for frame in source("b.png", tmp_path).decode(30)]
    assert reds == [8 * n for n in range(30)]


def test_a_file_may_be_bytes_or_base64(tmp_path):
    animate(tmp_path, "a.gif", [500, 500])
    content = (tmp_path / "a.gif").read_bytes()
    url = f"data:image/gif;base64,{base64.b64encode(content).decode()}"
    for value in (content, url, {"bytes": content, "path": None}, {"video": url, "fps": 2.0}):
        assert shown(source(value, tmp_path), 2) == [0, 1]
    assert source(content, tmp_path).name.startswith("sha256:")
    assert source(content, tmp_path).key != source({"bytes": content, "fps": 1}, tmp_path).key


def test_frames_are_the_images_of_a_list(tmp_path):
    names = draw_frames(tmp_path, 3)
    video = source({"frames": [names[0], {"path": names[1]}, names[2]], "fps": 4}, tmp_path)
    assert video.read_size(2.0) == (3, 24, 16)
    assert video.find_fps(2.0) == 4.0
    for frame, name in zip(video.decode(2.0), names, strict=True):
        with Image.open(tmp_path / name) as image:
            assert frame.tobytes() == image.tobytes()
    assert source(names, tmp_path).find_fps(2.0) == 2.0
    assert video.name == f"{names[0]} and 2 more"
    assert video.key != source(names, tmp_path).key


def test_each_form_of_a_row_gives_the_same_videos(tmp_path):
    names = draw_frames(tmp_path, 2)
    said = {"role": "assistant", "content": "one"}
    part = {"type": "video"}
    text = {"type": "text", "text": "?"}
    rows = [
        {"prompt": "<video>?", "response": "one", "videos": [names]},
        {"prompt": "<video>?", "response": "one", "video": {"frames": names}},
        {"messages": [{"role": "user", "content": "<video>?"}, said], "videos": [names]},
        {"messages": [{"role": "user", "content": [part, text]}, said], "videos": [names]},
        {"messages": [{"role": "user", "content": [part | {"video": names}, text]}, said]},
        {
            "messages": [{"role": "user", "content": [part | {"index": 0}, text]}, said],
            "videos": [names],
        },
    ]
    for number, values in enumerate(rows, start=1):
        row = Row(values=values, file=str(tmp_path / "rows.jsonl"), number=number)
        (example,) = to_examples([row], ColumnsSection(), "response", images=True)
        (video,) = example.videos
        assert not example.images
        assert video.read_size(2.0) == (2, 24, 16), values
        assert "video" not in example.metadata


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "video 1 has 0 frames, expected at least two"),
        (["frame0_16x24.png"], "video 1 has 1 frame, expected at least two"),
        (
            ["frame0_16x24.png", "frame1_16x24.png", "wide.png"],
            "a frame 3 of 24 x 16 pixels, expected 16 x 24 as its first",
        ),
        (["frame0_16x24.png", "cut.png"], r"video 1, frame 2 \(cut.png\) cannot be decoded"),
        (["frame0_16x24.png", "none.png"], r"video 1, frame 2 \(none.png\) is missing"),
        (["frame0_16x24.png", 5], "video 1, frame 2 is a int, expected a path"),
        ("frame0_16x24.png", "is a PNG of 1 frame, expected an animation"),
        ("clip.mp4", r"video 1 \(clip.mp4\) is no animation"),
        ("cut.gif", r"video 1 \(cut.gif\) cannot be decoded"),
        ("short.gif", "lasts 0.3 s, of which 1 frame is taken at 2 frames in a second"),
        ({"frames": ["frame0_16x24.png", "frame1_16x24.png"], "fps": 0}, "has fps 0, expected"),
        ({"path": "short.gif", "fps": "fast"}, "has fps 'fast', expected a number from 0.001"),
        ({"path": "short.gif", "fps": True}, "has fps True, expected a number from 0.001"),
        ({"path": "short.gif", "fps": 1e8}, "has fps 100000000.0, expected a number from 0.001"),
        ({"path": "short.gif", "fps": 9e-4}, "has fps 0.0009, expected .* to 1000"),
        ({"video": "short.gif"}, r"video 1 \(short.gif\) lasts"),
        (["frame0_16x24.png"] * 769, "video 1 has 769 frames, expected at most 768"),
        ({"path": "long.gif", "fps": 400}, "lasts 2.5 s, .* 1000 frames .* at most 768"),
    ],
)
def test_defects_name_row_video_and_frame(tmp_path, value, said):
    draw_frames(tmp_path, 2)
    draw(tmp_path, "wide.png", (24, 16))
    whole = (tmp_path / "frame1_16x24.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(100))
    animate(tmp_path, "long.gif", [500] * 5)
    whole = (tmp_path / "long.gif").read_bytes()
    (tmp_path / "cut.gif").write_bytes(whole[: len(whole) // 2])
    animate(tmp_path, "short.gif", [100] * 3)
    video = source(value, tmp_path)

    def look() -> None:
        video.read_size(2.0)
        video.decode(2.0)

    with pytest.raises(ImageError, match=said) as caught:
        look()
    assert str(tmp_path / "rows.jsonl") in str(caught.value)
    assert caught.value.row == 3
    assert caught.value.column == "videos"
    assert caught.value.remedy
    assert video.key


def test_a_long_video_is_refused_before_its_frames_are_listed(tmp_path):
    video = source(animate(tmp_path, "a.png", [65000] * 3), tmp_path)
    with pytest.raises(ImageError, match="of which 195000 frames are taken at 1000") as caught:
        video.read_size(1000)
    assert "lower data.video_fps" in caught.value.remedy
    with pytest.raises(ImageError, match=r"3 frames .* expected at most 2"):
        video.read_size(1 / 65, max_frames=2)
    with pytest.raises(ImageError, match=r"3 frames .* expected at most 2"):
        video.decode(1 / 65, max_frames=2)


@pytest.mark.parametrize("fps", [0, 9e-4, 1e8, float("nan"), True])
def test_a_rate_of_the_configuration_has_the_limits_of_a_rows(fps):
    with pytest.raises(ConfigError, match=r"data\.video_fps: expected a number from 0.001 to 1000"):
        DataSection(source="rows.jsonl", video_fps=fps)


def test_the_pixels_of_all_frames_have_a_limit(tmp_path, monkeypatch):
    names = draw_frames(tmp_path, 3)
    animate(tmp_path, "a.gif", [500] * 3)
    # Each file is opened below this limit, and its frames together are above eight times as many.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    for value in ([*names, *names, *names], {"path": "a.gif", "fps": 36}):
        for look in (VideoSource.read_size, VideoSource.decode):
            with pytest.raises(ImageError, match="has more than 3200 pixels in its frames"):
                look(source(value, tmp_path), 2.0)


@pytest.mark.parametrize("name", ["a.webp", "a.png"])
def test_an_animation_is_turned_as_images_are(tmp_path, name):
    """An orientation of 6 shows the first row of the file as the last column."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.new("RGB", (16, 8)) for _ in range(2)]
    for number, frame in enumerate(frames):
        frame.paste((80 + 80 * number, 0, 0), (0, 0, 16, 4))
    frames[0].save(
        tmp_path / name,
        save_all=True,
        append_images=frames[1:],
        duration=500,
        exif=exif,
        lossless=True,
    )
    video = source(name, tmp_path)
    assert video.read_size(2) == (2, 16, 8)
    for number, frame in enumerate(video.decode(2)):
        assert frame.size == (8, 16)
        assert frame.getpixel((7, 0)) == frame.getpixel((7, 15)) == (80 + 80 * number, 0, 0)
        assert frame.getpixel((0, 0)) == (0, 0, 0)


def test_a_list_of_frames_in_a_column_is_read_as_videos_of_one_frame_each(tmp_path):
    names = draw_frames(tmp_path, 2)
    row = Row(
        values={"prompt": "<video>?", "response": "one", "videos": names},
        file=str(tmp_path / "rows.jsonl"),
        number=1,
    )
    (example,) = to_examples([row], ColumnsSection(), "response", images=True)
    with pytest.raises(ImageError, match="is a PNG of 1 frame") as caught:
        example.videos[0].read_size(2.0)
    assert '[["0001.png", "0002.png"]]' in caught.value.remedy
    assert '{"frames": ["0001.png", "0002.png"]}' in caught.value.remedy


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer_of) -> dict[str, Path]:
    """The folders of tiny models with their processors, by family."""
    root = tmp_path_factory.mktemp("moving")
    types = (*FAMILIES, "gemma3")
    return {one: save_pictured_model(root / one, one, tokenizer_of()) for one in types}


@pytest.fixture
def build(tmp_path, folders):
    """Build the documents of rows."""

    def make(rows: list[dict[str, Any]], model_type: str = "qwen3_vl", **settings: Any):
        section = DataSection(source=str(write_rows(tmp_path / "rows.jsonl", rows)), **settings)
        tokenizer = load_tokenizer(section, ModelSource(path=str(folders[model_type])))
        examples = read_examples(section, "response")
        return SFTDataset.build(examples, tokenizer, section), tokenizer

    return make


def expect(folder: Path, text: str, images: list[Path], videos: list[tuple[list[Path], float]]):
    """Return what transformers' own processor makes of a rendered text."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, AutoVideoProcessor

    config = transformers.AutoConfig.from_pretrained(folder)
    family = {
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
        "qwen3_vl": transformers.Qwen3VLProcessor,
        "qwen3_5": transformers.Qwen3VLProcessor,
    }[config.model_type]
    processor = family(
        AutoImageProcessor.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        AutoVideoProcessor.from_pretrained(folder),
    )
    return processor(
        text=[text],
        images=[Image.open(one).convert("RGB") for one in images] or None,
        videos=[[Image.open(one).convert("RGB") for one in frames] for frames, _ in videos],
        do_sample_frames=False,
        video_metadata=[
            {"total_num_frames": len(f), "fps": fps, "frames_indices": list(range(len(f)))}
            for f, fps in videos
        ],
        return_tensors="pt",
        add_special_tokens=False,
    )


IMAGE_PLACE = VIDEO_PLACE.replace("video", "image")


@needs_torchvision
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("count", [2, 5, 6])
def test_ids_pixels_and_times_are_those_of_transformers(
    tmp_path, build, folders, model_type, count
):
    """Videos with an even and an odd number of frames, between images, in the order of the text."""
    long, short = draw_frames(tmp_path, count), draw_frames(tmp_path, 2, (32, 16))
    draw(tmp_path, "a.png")
    row = {
        "prompt": "<video>or<image>or<video>?",
        "response": "one",
        "images": ["a.png"],
        "videos": [{"frames": long, "fps": 3.0}, short],
    }
    dataset, _ = build([row], model_type, video_fps=1.5)
    (document,) = dataset.documents
    fields = document.fields()
    text = f"<|bos|><|user|>{VIDEO_PLACE}or{IMAGE_PLACE}or{VIDEO_PLACE}?<|assistant|>one<|eos|>"
    videos = [([tmp_path / n for n in long], 3.0), ([tmp_path / n for n in short], 1.5)]
    want = expect(folders[model_type], text, [tmp_path / "a.png"], videos)
    assert fields["input_ids"] == want["input_ids"][0].tolist()
    media = fields["media"]
    grids = want["video_grid_thw"]
    assert media["grid"].tolist() == [
        grids[0].tolist(),
        want["image_grid_thw"][0].tolist(),
        grids[1].tolist(),
    ]
    assert media["grid"][0, 0] == -(-count // 2)
    first = int(grids[0].prod())
    moving = want["pixel_values_videos"]
    assert torch.equal(
        media["pixels"], torch.cat([moving[:first], want["pixel_values"], moving[first:]])
    )
    assert media["seconds"].tolist() == pytest.approx([2 / 3, 0.0, 2 / 1.5])
    if model_type == "qwen2_5_vl":
        own = torch.as_tensor(want["second_per_grid_ts"], dtype=torch.float32)
        assert torch.equal(media["seconds"][[0, 2]], own)
    assert document.rows == len(media["pixels"])
    vision = read_vision(
        hf_config(ModelSource(path=str(folders[model_type]))), "a test", videos=True
    )
    assert vision is not None
    vision.check(Batch.pack([fields]))


@needs_torchvision
def test_more_marks_than_videos_and_other_tokens_are_refused(tmp_path, build):
    names = draw_frames(tmp_path, 2)
    good = {"prompt": "<video>", "response": "one", "videos": [names]}
    for row, said in (
        ({"prompt": "<video><video>", "videos": [names]}, "1 video and 2 places"),
        ({"prompt": "none", "videos": [names]}, "1 video and 0 places"),
        ({"prompt": "<video>", "videos": []}, "0 videos and 1 place"),
        ({"prompt": "<video><|video_pad|>", "videos": [names]}, "1 video and 2 placeholders"),
        ({"prompt": "<video><|image_pad|>", "videos": [names]}, "0 images and 1 placeholder"),
    ):
        with pytest.raises(ImageError, match=said) as caught:
            build([good, row | {"response": "one"}])
        assert caught.value.row == 2
        dataset, _ = build([good, row | {"response": "one"}], on_bad_image="drop")
        assert (len(dataset), dataset.bad_images) == (1, 1)


@needs_torchvision
def test_settings_reach_the_processor_the_checkpoint_and_the_export(tmp_path, build, folders):
    names = draw_frames(tmp_path, 4, (64, 64))
    row = {"prompt": "<video>", "response": "one", "videos": [names]}
    size = {"shortest_edge": 64, "longest_edge": 512}
    (plain, first), (small, tokenizer) = (
        build([row], "qwen2_5_vl", video_processor_kwargs=kwargs) for kwargs in ({}, {"size": size})
    )
    assert small.documents[0].rows < plain.documents[0].rows
    settings = tokenizer.image_processor.settings
    assert settings["video_processor"]["size"] == size
    assert settings["video_processor"]["video_fps"] == 2.0
    with pytest.raises(ConfigError, match=r"data\.video_processor_kwargs\.size: expected"):
        first.image_processor.require(settings)
    first.image_processor.require(
        {k: v for k, v in first.image_processor.settings.items() if k != "video_processor"}
    )
    shutil.copytree(folders["qwen2_5_vl"], tmp_path / "export")
    tokenizer.save_pretrained(tmp_path / "export")
    for file, read in (
        ("video_preprocessor_config.json", lambda one: one),
        ("processor_config.json", lambda one: one["video_processor"]),
    ):
        assert read(json.loads((tmp_path / "export" / file).read_text()))["size"] == size
    with pytest.raises(ConfigError, match=r"video_processor_kwargs\.fps") as caught:
        build([row], video_processor_kwargs={"fps": 1})
    assert "data.video_fps" in caught.value.remedy
    with pytest.raises(ConfigError, match=r"video_processor_kwargs\.colour"):
        build([row], video_processor_kwargs={"colour": 1})
    with pytest.raises(ConfigError, match=r"video_processor_kwargs: .* makes rows of videos"):
        build([row], video_processor_kwargs={"patch_size": 8})


@needs_torchvision
def test_a_long_document_is_not_cut_inside_its_video(tmp_path, build):
    names = draw_frames(tmp_path, 4)
    dataset, tokenizer = build([{"prompt": "<video>", "response": "a long one", "videos": [names]}])
    (document,) = dataset.documents
    ids = document.input_ids.tolist()
    last = max(i for i, one in enumerate(ids) if one == tokenizer.video_token)
    assert document.cut(last) is None
    assert document.cut(len(ids) - 2) is not None


@needs_torchvision
def test_a_family_whose_videos_are_not_known_is_refused_by_name(tmp_path, build):
    row = {"prompt": "<video>", "response": "one", "videos": [draw_frames(tmp_path, 2)]}
    with pytest.raises(UnsupportedCapability) as caught:
        build([row], "gemma3")
    assert caught.value.capability == "video"
    assert "qwen3_vl" in str(caught.value)


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is there")
def test_without_torchvision_the_remedy_is_to_install_it(tmp_path, build):
    row = {"prompt": "<video>", "response": "one", "videos": [draw_frames(tmp_path, 2)]}
    with pytest.raises(ConfigError, match="torchvision") as caught:
        build([row])
    assert "uv pip install" in caught.value.remedy


def test_videos_for_text_alone_are_refused(tmp_path):
    row = Row(values={"prompt": "<video>", "videos": ["a.gif"]}, file="rows.jsonl", number=1)
    with pytest.raises(DataError, match="the text has <video>"):
        to_examples([row], ColumnsSection(), "prompt")
