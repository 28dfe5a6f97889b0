"""Images in rows of SFT: their forms, their places, their defects, and the model's processor."""

from __future__ import annotations

import base64
import errno
import json
import shutil
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictured_models import PLACE, TEMPLATE, draw, save_pictured_model, write_rows
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.image_utils import load_image

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import ChatTokenizer, SFTDataset, load_tokenizer, read_examples
from engine_trainer.data.datasets import make_fields
from engine_trainer.data.images import ImageProcessor
from engine_trainer.data.labelled import tokenize_labelled
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.preferences import tokenize_pairs
from engine_trainer.data.readers import Row, read_rows
from engine_trainer.errors import DataError, ImageError
from engine_trainer.preview.collect import collect
from engine_trainer.preview.show import show
from engine_trainer.rehearsal.checks import check_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_of) -> Path:
    """The folder of a tiny Qwen3-VL with its processor."""
    place = tmp_path_factory.mktemp("pictured") / "model"
    return save_pictured_model(place, "qwen3_vl", tokenizer_of())


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, ChatTokenizer]:
    """Tokenizers that were loaded, by model and settings."""
    return {}


@pytest.fixture
def build(tmp_path, folder, tokenizers):
    """Build the documents of rows."""

    def make(rows: Any, *, model: Path = folder, patches: int | None = None, **settings: Any):
        source = rows
        if not isinstance(rows, Path):
            source = write_rows(tmp_path / "rows.jsonl", rows)
        section = DataSection(source=str(source), **settings)
        key = f"{model} {settings}"
        if key not in tokenizers:
            tokenizers[key] = load_tokenizer(section, ModelSource(path=str(model)))
        tokenizer = tokenizers[key]
        examples = read_examples(section, "response")
        return SFTDataset.build(examples, tokenizer, section, patches=patches)

    return make


def expect(folder: Path, text: str, *images: Path) -> dict[str, Any]:
    """Return ids and media as transformers' own parts make them of a rendered text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    media = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        [_show(image) for image in images], return_tensors="pt"
    )
    for grid in media["image_grid_thw"]:
        text = text.replace("[]", "<|image_pad|>" * (int(grid.prod()) // 4), 1)
    return {
        "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
        "pixels": media["pixel_values"],
        "grid": media["image_grid_thw"],
    }


def _show(image: Path) -> Image.Image:
    with Image.open(image) as opened:
        return load_image(opened)


def check(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fields["input_ids"] == expected["input_ids"]
    assert torch.equal(fields["media"]["pixels"], expected["pixels"])
    assert torch.equal(fields["media"]["grid"], expected["grid"])


SHOWN = PLACE.replace("<|image_pad|>", "[]")
PAIR = f"<|bos|><|user|>{SHOWN}or{SHOWN}?<|assistant|>one<|eos|>"


def forms(a: Path, b: Path) -> dict[str, dict[str, Any]]:
    """Return one conversation about two images, in each form that a row may have."""
    said = {"role": "assistant", "content": "one"}
    texts = [{"type": "text", "text": "or"}, {"type": "text", "text": "?"}]
    in_base64 = [base64.b64encode(x.read_bytes()).decode() for x in (a, b)]
    urls = [f"data:image/png;base64,{x}" for x in in_base64]

    def asked(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [first, texts[0], second, texts[1]]}, said]

    marked = {"prompt": "<image>or<image>?", "response": "one"}
    bare = {"type": "image"}
    return {
        "paths": {**marked, "images": [a.name, str(b)]},
        "base64": {**marked, "images": urls},
        "mappings": {**marked, "images": [{"path": a.name}, {"base64": in_base64[1]}]},
        "messages": {
            "messages": [{"role": "user", "content": "<image>or<image>?"}, said],
            "images": [a.name, b.name],
        },
        "parts": {"messages": asked(bare, bare), "images": [a.name, b.name]},
        "parts with images": {
            "messages": asked(bare | {"image": a.name}, bare | {"base64": in_base64[1]})
        },
        "one of each": {"messages": asked(bare | {"path": a.name}, bare), "image": b.name},
        "openai": {
            "messages": asked(
                {"type": "image_url", "image_url": {"url": urls[0]}},
                {"type": "image_url", "image_url": {"url": urls[1], "detail": "low"}},
            )
        },
        "a response in messages": {
            "prompt": asked(bare, bare)[:1],
            "response": [said],
            "images": [a.name, b.name],
        },
    }


def test_every_form_of_a_row_gives_the_processors_own_ids_and_pixels(tmp_path, folder, build):
    a = tmp_path / draw(tmp_path, "a.png")
    b = tmp_path / draw(tmp_path, "b.png", (40, 16))
    expected = expect(folder, PAIR, a, b)
    rows = forms(a, b)
    for name, row in rows.items():
        dataset = build([row])
        (document,) = dataset.documents
        assert document.rows == 24 + 40, name
        check(document.fields(), expected)
        weighed = [i for i, w in enumerate(document.loss_weight) if w]
        assert dataset.figures() == {}
        assert weighed == [*range(len(document) - 4, len(document))], name
    content = [{"bytes": x.read_bytes(), "path": None} for x in (a, b)]
    for kind in (content, [x["bytes"] for x in content]):
        table = pa.table({"prompt": ["<image>or<image>?"], "response": ["one"], "images": [kind]})
        pq.write_table(table, tmp_path / "rows.parquet")
        check(build(tmp_path / "rows.parquet").documents[0].fields(), expected)


def test_a_template_around_the_question_may_place_the_image(tmp_path, folder, build):
    a = tmp_path / draw(tmp_path, "a.png")
    row = {"prompt": "what", "response": "that", "picture": a.name}
    (document,) = build(
        [row],
        prompt_template="<image>{prompt}?",
        columns=ColumnsSection(images="picture"),
    ).documents
    text = f"<|bos|><|user|>{SHOWN}what?<|assistant|>that<|eos|>"
    check(document.fields(), expect(folder, text, a))
    parts = [{"type": "image", "path": a.name}, {"type": "text", "text": "what"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "that"}]
    (document,) = build([{"messages": turns}], prompt_template="{prompt}?").documents
    check(document.fields(), expect(folder, text, a))


def test_an_index_in_a_part_names_the_image_of_the_column(tmp_path, folder, build):
    """Parts of all types share their keys in such datasets, with null where a type has no value."""
    names = [draw(tmp_path, "a.png"), draw(tmp_path, "b.png", (40, 16))]

    def turns(index: int) -> list[dict[str, Any]]:
        parts = [
            {"type": "image", "index": index, "text": None},
            {"type": "image", "index": None, "text": None},
            {"type": "text", "index": None, "text": "what"},
        ]
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": "that"}]

    (document,) = build([{"messages": turns(1), "images": names}]).documents
    text = f"<|bos|><|user|>{SHOWN}{SHOWN}what<|assistant|>that<|eos|>"
    check(document.fields(), expect(folder, text, tmp_path / names[1], tmp_path / names[0]))
    with pytest.raises(DataError, match="has index 2, and the row has 2 images") as caught:
        build([{"messages": turns(2), "images": names}])
    assert caught.value.row == 1


def test_images_that_cameras_and_printers_write_are_shown_as_transformers_shows_them(
    tmp_path, folder, build
):
    for name, mode in (("cmyk.jpg", "CMYK"), ("grey.png", "L"), ("few.png", "P"), ("a.png", "LA")):
        draw(tmp_path, name, mode=mode)
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(tmp_path / draw(tmp_path, "whole.png", (40, 16))) as picture:
        picture.save(tmp_path / "turned.jpg", exif=turned)
        both = {"save_all": True, "append_images": [picture.rotate(180)]}
        picture.save(tmp_path / "two.jpg", format="MPO", **both)
    names = ["cmyk.jpg", "grey.png", "few.png", "a.png", "turned.jpg", "two.jpg"]
    rows = [{"prompt": "<image>", "response": "one", "images": name} for name in names]
    text = f"<|bos|><|user|>{SHOWN}<|assistant|>one<|eos|>"
    for name, document in zip(names, build(rows).documents, strict=True):
        check(document.fields(), expect(folder, text, tmp_path / name))


def _cut(folder: Path, name: str) -> str:
    content = (folder / draw(folder, "whole.png")).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    return name


def _animate(folder: Path, name: str) -> str:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "green", "blue")]
    frames[0].save(folder / name, save_all=True, append_images=frames[1:])
    return name


def _explode(folder: Path, name: str) -> str:
    """Write a small file whose header names 10 gigabytes."""
    content = bytearray((folder / _save(folder, name, "RGB", (8, 8))).read_bytes())
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (folder / name).write_bytes(content)
    return name


def _write_text(folder: Path, name: str, text: str = "no image") -> str:
    (folder / name).write_text(text)
    return name


def _save(folder: Path, name: str, mode: str, size: tuple[int, int]) -> str:
    Image.new(mode, size).save(folder / name)
    return name


BAD = {
    "missing": (lambda _: "none.png", r"none\.png\) is missing"),
    "text": (lambda at: _write_text(at, "t.png"), "(?s)is no image.*begins with 'no im.*PNG"),
    "page": (
        lambda at: _write_text(at, "h.png", "\n<!DOCTYPE html><html>"),
        "(?s)is no image.*begins with '<!DOCTYPE html><html>'.*fetch it again: a page",
    ),
    "pointer": (
        lambda at: _write_text(at, "l.png", "version https://git-lfs.github.com/spec/v1"),
        "(?s)is no image.*git lfs pull",
    ),
    "empty file": (lambda at: _write_text(at, "e.png", ""), "(?s)is empty.*write it again"),
    "nothing in base64": (lambda _: "data:image/png;base64,", "(?s)is empty.*write it again"),
    "a folder": (lambda _: ".", r"(?s)\(\.\) is a folder, expected a file.*a file in it"),
    "below a file": (lambda _: "good.png/a.png", "is missing"),
    "bomb": (lambda at: _explode(at, "bomb.png"), "has more than .* pixels"),
    "wide": (lambda at: _save(at, "w.png", "L", (30_000, 64)), "is 30000 x 64 pixels, which the"),
    "animated": (lambda at: _animate(at, "m.gif"), "has 3 frames, expected one"),
    "16 bits": (lambda at: _save(at, "i.png", "I;16", (8, 8)), "of mode I;16, expected 8 bits"),
    "address": (lambda _: "https://example.org/a.png", "is an address, expected a file"),
    "base64": (lambda _: "data:image/png;base64,!", "is not base64"),
    "empty": (lambda _: "", "is empty, expected a path"),
    "number": (lambda _: 7, "is a int, expected a path"),
    "mapping": (lambda _: {"file": "a.png"}, "is a mapping with file, expected a path"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_refused_by_row_and_file(tmp_path, build, kind):
    make, said = BAD[kind]
    good = {"prompt": "<image>", "response": "one", "images": [draw(tmp_path, "good.png")]}
    bad = {"prompt": "<image><image>", "response": "one", "images": ["good.png", make(tmp_path)]}
    with pytest.raises(ImageError, match=said) as caught:
        build([good, bad])
    error = caught.value
    assert (error.file, error.row, error.column) == (str(tmp_path / "rows.jsonl"), 2, "images")
    assert "image 2" in error.what
    dataset = build([good, bad], on_bad_image="drop")
    assert len(dataset) == 1
    assert dataset.figures() == {"data/bad_images": 1.0}


FAULTS = {
    "open files": OSError(errno.EMFILE, "Too many open files"),
    "disk": OSError(errno.EIO, "Input/output error"),
    "permission": PermissionError(errno.EACCES, "Permission denied"),
    "memory": MemoryError("no memory is left"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_machine_is_an_error_that_drops_no_row(tmp_path, build, monkeypatch, fault):
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png")}
    (document,) = build([row]).documents
    raised = FAULTS[fault]

    def fail(*_: Any, **__: Any) -> None:
        raise raised

    calls = (
        lambda: build([row], on_bad_image="drop"),
        lambda: make_fields([document], drop=True),
    )
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", fail)
        for call in calls:
            with pytest.raises(DataError, match=str(raised.args[-1])) as caught:
                call()
            error = caught.value
            assert not isinstance(error, ImageError)
            assert error.what == "image 1 (a.png) could not be read"
            assert (error.file, error.row) == (str(tmp_path / "rows.jsonl"), 1)
            assert type(raised).__name__ in error.why
            assert error.remedy


def test_pixels_that_do_not_fit_into_memory_are_an_error_of_their_row(tmp_path, build, monkeypatch):
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png")}
    (document,) = build([row]).documents

    def fail(*_: Any) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(ImageProcessor, "_process", fail)
    with pytest.raises(DataError, match="no memory is left") as caught:
        make_fields([document], drop=True)
    assert caught.value.row == 1


def test_an_offset_that_no_file_has_is_a_bad_image(tmp_path, build):
    """The system itself refuses to go there, where the image is a file."""
    with Image.open(tmp_path / draw(tmp_path, "a.png")) as image:
        image.save(tmp_path / "far.tif", big_tiff=True)
    content = bytearray((tmp_path / "far.tif").read_bytes())
    content[8:16] = struct.pack("<Q", 2**63 - 1)
    (tmp_path / "far.tif").write_bytes(content)
    row = {"prompt": "<image>", "response": "one", "images": "far.tif"}
    with pytest.raises(ImageError, match=r"far\.tif"):
        build([row])


def test_a_truncated_image_is_found_when_its_document_is_made(tmp_path, build, caplog):
    rows = [
        {"prompt": "<image>", "response": "one", "images": name}
        for name in (_cut(tmp_path, "cut.png"), draw(tmp_path, "good.png"))
    ]
    documents = build(rows).documents
    with pytest.raises(ImageError, match=r"(?s)cut\.png\) cannot be decoded.*truncated") as caught:
        make_fields(documents, drop=False)
    assert caught.value.row == 1
    (kept,) = make_fields(documents, drop=True)
    assert kept["input_ids"] == documents[1].input_ids.tolist()
    assert "a document is left out of this step" in caplog.text


def test_the_preview_decodes_every_image(tmp_path, folder):
    rows = [
        {"prompt": "<image>what", "response": "one", "images": name}
        for name in (draw(tmp_path, "good.png"), _cut(tmp_path, "cut.png"))
    ]
    tree = {
        "engine": {"model": {"path": str(folder)}, "backend": "fsdp2"},
        "data": {"source": str(write_rows(tmp_path / "rows.jsonl", rows))},
        "run": {"output_dir": "-", "steps": 1},
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(tree))
    config = load_config(SFTConfig, tmp_path / "sft.yaml")
    found = collect(config, "sft")
    assert [row.fate for row in found.rows] == ["kept", "refused"]
    assert "cut.png) cannot be decoded" in found.rows[1].reason
    text = "\n".join(show(found, rows=1, row=None, width=100, color=False))
    assert "<|vision_start|><|image_pad|> × 6<|vision_end|>what" in text
    drops = load_config(SFTConfig, tmp_path / "sft.yaml", ["data.on_bad_image=drop"])
    assert [row.fate for row in collect(drops, "sft").rows] == ["kept", "dropped"]
    with pytest.raises(DataError, match="which a rehearsal does not copy"):
        check_data(drops, "sft", tmp_path)


def test_the_preview_refuses_or_drops_documents_beyond_the_budget_of_patches(tmp_path, folder):
    draw(tmp_path, "a.png")
    draw(tmp_path, "b.png", (40, 40))
    rows = [{"prompt": "<image>", "response": "1", "images": name} for name in ("a.png", "b.png")]
    tree = {
        "engine": {
            "model": {"path": str(folder)},
            "backend": "fsdp2",
            "memory": {"max_patches": 24},
        },
        "data": {"source": str(write_rows(tmp_path / "rows.jsonl", rows))},
        "run": {"output_dir": "-", "steps": 1},
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(tree))
    refused = collect(load_config(SFTConfig, tmp_path / "sft.yaml"), "sft").rows
    assert [row.fate for row in refused] == ["kept", "refused"]
    assert refused[1].reason == "more than 24 patches"
    assert "engine.memory.max_patches" in refused[1].error.remedy
    # A document with too many patches cannot be cut.
    for treatment in ("drop", "truncate"):
        override = [f"data.on_too_long={treatment}"]
        config = load_config(SFTConfig, tmp_path / "sft.yaml", override)
        assert [row.fate for row in collect(config, "sft").rows] == ["kept", "dropped"]


def test_an_image_that_changes_after_its_row_was_read_is_refused(tmp_path, build):
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png")}
    (document,) = build([row]).documents
    draw(tmp_path, "a.png", (40, 40))
    with pytest.raises(ImageError, match="has not the size that its header said"):
        document.fields()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "<image>", "images": ["a.png", "a.png"]}, "2 images and 1 place"),
        ({"prompt": "<image><image>", "images": ["a.png"]}, "1 image and 2 places"),
        ({"prompt": "no place", "images": ["a.png"]}, "1 image and 0 places"),
        ({"prompt": "<image>"}, "0 images and 1 place"),
        (
            {"prompt": "<|image_pad|><image>", "images": ["a.png"]},
            "1 image and 2 placeholders '<|image_pad|>'",
        ),
        ({"prompt": "<|image_pad|>", "images": []}, "1 image token .* and 0 images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "0 images and 1 place"),
        ({"prompt": "<|video_pad|>"}, "1 video token .* and 0 videos"),
        (
            {"prompt": "<image><|video_pad|>", "images": ["a.png"]},
            "0 videos and 1 placeholder '<|video_pad|>'",
        ),
    ],
)
def test_images_and_their_places_must_be_as_many(tmp_path, build, row, said):
    draw(tmp_path, "a.png")
    good = {"prompt": "<image>", "response": "one", "images": ["a.png"]}
    with pytest.raises(ImageError, match=said.replace("|", r"\|")) as caught:
        build([good, {**row, "response": "one"}])
    assert caught.value.row == 2


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_pairs_and_labelled_rows_with_tokens_of_images_are_refused_by_row(tmp_path, folder, token):
    """The engine would end a step for them, without the row's name."""
    tokenizer = load_tokenizer(DataSection(source="-"), ModelSource(path=str(folder)))
    values = {"prompt": f"{token}what", "chosen": "one", "rejected": "two"}
    pair = Row(values=values, file="pairs.jsonl", number=3)
    kind = token[2:7]
    with pytest.raises(DataError, match=f"the row has tokens of an? {kind}") as caught:
        tokenize_pairs([pair], tokenizer, ColumnsSection())
    assert (caught.value.file, caught.value.row) == ("pairs.jsonl", 3)
    values = {"prompt": "what", "completion": f"one{token}", "label": True}
    labelled = Row(values=values, file="labelled.jsonl", number=4)
    with pytest.raises(DataError, match=f"the row has tokens of an? {kind}") as caught:
        tokenize_labelled([labelled], tokenizer, ColumnsSection(), "label")
    assert (caught.value.file, caught.value.row) == ("labelled.jsonl", 4)


def test_a_template_that_leaves_images_out_is_refused(tmp_path, build):
    row = {"prompt": "<image>?", "response": "one", "images": draw(tmp_path, "a.png")}
    without = TEMPLATE.replace("IMAGE", "")
    with pytest.raises(ImageError, match="1 image and 0 placeholders"):
        build([row], chat_template=without)


def test_images_are_refused_where_no_task_or_model_takes_them(tmp_path, build, model_folder):
    draw(tmp_path, "a.png")
    part = {"type": "image", "path": "a.png"}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": [part]}]
    with pytest.raises(DataError, match="a message of the assistant with a part of type 'image'"):
        build([{"messages": turns}])
    section = DataSection(source=str(write_rows(tmp_path / "r.jsonl", [{"messages": turns[:1]}])))
    (row,) = read_rows(section.source)
    with pytest.raises(DataError, match="images are read in sft and rl alone"):
        to_examples([row], ColumnsSection(), "prompt")
    assert len(read_examples(section, "prompt")[0].images) == 1
    row = {"prompt": "<image>", "response": "one", "images": "a.png"}
    plain = {"prompt": "a", "response": "b"}
    for column, noun in (("images", "images"), ("video", "videos")):
        given = plain | {column: "https://host/clip"}
        said = rf"rows\.jsonl:2 has {noun} \(column '{column}'\), and .* has no vision tower"
        with pytest.raises(ConfigError, match=said) as caught:
            build([plain, given], model=model_folder)
        assert "a column that is metadata" in caught.value.remedy
    with pytest.raises(ConfigError, match="has no vision tower"):
        build([row], model=model_folder)


def test_long_documents_are_cut_behind_their_images_only(tmp_path, build):
    draw(tmp_path, "a.png")
    row = {"prompt": "<image>", "response": "a long answer", "images": "a.png"}
    (whole,) = build([row]).documents
    last = max(i for i, t in enumerate(whole.input_ids) if whole.images.is_in([t]))
    cut = whole.cut(last + 5)
    assert cut is not None
    assert cut.images is whole.images
    assert whole.cut(last) is None
    other = {"prompt": "a", "response": "b"}
    kept = build([other, row], max_length=last, on_too_long="truncate")
    assert (len(kept), kept.dropped, kept.truncated) == (1, 1, 0)


def test_a_budget_of_patches_is_checked_by_row(tmp_path, build):
    draw(tmp_path, "a.png")
    rows = [
        {"prompt": "<image>", "response": "one", "images": ["a.png"]},
        {"prompt": "<image><image>", "response": "two", "images": ["a.png", "a.png"]},
    ]
    assert len(build(rows, patches=48)) == 2
    with pytest.raises(DataError, match=r"48 patches, engine\.memory\.max_patches is 47") as caught:
        build(rows, patches=47)
    assert caught.value.row == 2
    kept = build(rows, patches=47, on_too_long="truncate")
    assert (len(kept), kept.dropped) == (1, 1)
    with pytest.raises(DataError, match="all 2 rows have more than 3 patches"):
        build(rows, patches=3, on_too_long="drop")


def test_settings_replace_the_processors_own_and_are_saved_with_the_model(
    tmp_path, folder, build, tokenizer_of
):
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png", (64, 64))}
    (document,) = build([row]).documents
    assert document.rows == 64
    small = {"size": {"shortest_edge": 64, "longest_edge": 256}}
    (document,) = build([row], processor_kwargs=small).documents
    assert document.rows == 16
    shutil.copytree(folder, tmp_path / "saved")
    document.images.processor.save(tmp_path / "saved")
    (document,) = build([row], model=tmp_path / "saved").documents
    assert document.rows == 16
    with pytest.raises(ConfigError, match=r"processor_kwargs\.largest.*no such setting"):
        build([row], processor_kwargs={"largest": 3})
    tiled = save_pictured_model(tmp_path / "tiled", "internvl", tokenizer_of())
    with pytest.raises(ConfigError, match=r"processor_kwargs\.crop_to_patches.*in each call"):
        build([row], model=tiled, processor_kwargs={"crop_to_patches": False})


def test_a_size_that_the_models_own_limits_would_replace_is_refused(tmp_path, folder, build):
    limited = _copy(
        folder, tmp_path / "limited", preprocessor_config={"min_pixels": 64, "max_pixels": 4096}
    )
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png", (64, 64))}
    asked = {"size": {"shortest_edge": 64, "longest_edge": 256}}
    with pytest.raises(ConfigError, match=r"processor_kwargs\.size: expected .*256.* got .*4096"):
        build([row], model=limited, processor_kwargs=asked)
    assert asked == {"size": {"shortest_edge": 64, "longest_edge": 256}}
    limits = {"min_pixels": 64, "max_pixels": 256}
    (document,) = build([row], model=limited, processor_kwargs=limits).documents
    assert document.rows == 16


@pytest.mark.parametrize("need", ["prompt", "response"])
def test_a_place_for_an_image_is_refused_where_images_are_not_read(need):
    values = {"prompt": "<image>How many?", "response": "1", "answer": "1", "image": "a.png"}
    row = Row(values=values, file="a.jsonl", number=3)
    with pytest.raises(DataError, match="images are read in sft and rl alone") as caught:
        to_examples([row], ColumnsSection(), need)
    assert (caught.value.row, caught.value.column) == (3, "image")
    plain = Row(values=values | {"prompt": "How many?"}, file="a.jsonl", number=3)
    assert len(to_examples([plain], ColumnsSection(), need)) == 1


def _copy(folder: Path, to: Path, **changes: Any) -> Path:
    """Copy a model with other values in the files that ``changes`` name, without suffix."""
    shutil.copytree(folder, to)
    for name, values in changes.items():
        file = to / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return to


def test_a_processor_of_another_model_is_refused(tmp_path, folder, build):
    row = {"prompt": "<image>", "response": "one", "images": draw(tmp_path, "a.png")}
    patches = _copy(folder, tmp_path / "patches", preprocessor_config={"patch_size": 8})
    with pytest.raises(ConfigError, match=r"rows of pixels of shape \(384,\), the model takes"):
        build([row], model=patches)
    merge = _copy(folder, tmp_path / "merge", preprocessor_config={"merge_size": 1})
    with pytest.raises(ConfigError, match=r"image tokens .* for an image of .* features"):
        build([row], model=merge)
    ids = _copy(folder, tmp_path / "ids", config={"image_token_id": 9})
    with pytest.raises(ConfigError, match=r"writes 0 image tokens \(id 9\)"):
        build([row], model=ids)
    with pytest.raises(ConfigError, match=r"the processor of '.*patches' makes rows of pixels"):
        build([row], tokenizer=str(patches))
    none = shutil.copytree(folder, tmp_path / "none")
    (none / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="no processor of images can be read"):
        build([row], model=none)
    torn = shutil.copytree(folder, tmp_path / "torn")
    (torn / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="no processor of images can be read"):
        build([row], model=torn)


def test_bytes_of_any_kind_are_an_image_or_a_typed_error(tmp_path, build):
    """Every cut of a file, and changes of each of its first bytes."""
    content = BytesIO()
    Image.new("RGB", (8, 8), "red").save(content, format="GIF")
    whole = content.getvalue()
    kinds = [whole[:i] for i in range(1, len(whole), 7)]
    kinds += [whole[:i] + bytes([255 - whole[i]]) + whole[i + 1 :] for i in range(20)]
    table = pa.table(
        {
            "prompt": ["<image>"] * len(kinds),
            "response": ["one"] * len(kinds),
            "image": kinds,
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = build(tmp_path / "rows.parquet", on_bad_image="drop")
    made = make_fields(dataset.documents, drop=True)
    assert 0 < len(made) < len(kinds)
