"""Tiny vision-language models with their processors, and rows with drawn images."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_models import tiny_pictured_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Text that Qwen's template writes for an image."""
VIDEO_PLACE = "<|vision_start|><|video_pad|><|vision_end|>"
"""Text that Qwen's template writes for a video."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The tokens and the processor of a family."""

    tokens: Mapping[str, str]
    """Special tokens by the names that the processor reads."""
    ids: Mapping[str, str]
    """Names of tokens by the keys of config.json."""
    place: str
    """Text of an image in the template."""
    processor: str
    settings: Mapping[str, Any]
    also: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Content of processor_config.json."""
    video_processor: str = ""
    """Class of the processor of videos, which has the same settings."""


_QWEN = _Family(
    tokens={
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    },
    ids={
        "image_token_id": "image_token",
        "video_token_id": "video_token",
        "vision_start_token_id": "vision_start_token",
        "vision_end_token_id": "vision_end_token",
    },
    place=PLACE,
    processor="Qwen2VLImageProcessorPil",
    # An image of 8 by 8 pixels has four patches, which are one token.
    settings={
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    video_processor="Qwen2VLVideoProcessor",
)
# Its processor of videos counts the pixels of all frames together.
_QWEN3 = replace(_QWEN, video_processor="Qwen3VLVideoProcessor")
_TILE = {"size": {"height": 16, "width": 16}}
_FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": _Family(
        tokens={"boi_token": "<soi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
        ids={
            "image_token_id": "image_token",
            "boi_token_index": "boi_token",
            "eoi_token_index": "eoi_token",
        },
        place="<soi>",
        processor="Gemma3ImageProcessorPil",
        settings=_TILE,
        also={"image_seq_length": 4},
    ),
    # Its processor cuts an image into up to four tiles, and adds the whole one.
    "internvl": _Family(
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "context_image_token"},
        place="<IMG_CONTEXT>",
        processor="GotOcr2ImageProcessorPil",
        settings={**_TILE, "min_patches": 1, "max_patches": 4},
        also={"image_seq_length": 4},
    ),
}
PICTURED_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "internvl")
"""Families whose processors differ."""


def save_pictured_model(
    folder: Path,
    model_type: str,
    tokenizer: Any,
    *,
    served: bool = False,
    text: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny model with tokenizer and processor. Return its folder.

    ``served`` gives it the sizes that servers need. ``text`` are keys of its language model, and
    ``changes`` those of the whole.
    """
    import transformers

    family = _FAMILIES[model_type]
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", family.place).replace("VIDEO", VIDEO_PLACE)
    number = tokenizer.convert_tokens_to_ids
    tiny_pictured_model(
        model_type,
        {"vocab_size": len(tokenizer), **(text or {})},
        served=served,
        **{key: number(family.tokens[name]) for key, name in family.ids.items()},
        **changes,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    names = {"extra_special_tokens": family.tokens, "model_specific_special_tokens": family.tokens}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    getattr(transformers, family.processor)(**family.settings).save_pretrained(folder)
    if family.video_processor:
        # Written without its class, which needs torchvision.
        of_videos = {"video_processor_type": family.video_processor, **family.settings}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    if family.also:
        (folder / "processor_config.json").write_text(json.dumps(dict(family.also)))
    return folder


def draw(folder: Path, name: str, size: tuple[int, int] = (16, 24), mode: str = "RGB") -> str:
    """Write an image whose pixels differ, and return its name."""
    width, height = size
    image = Image.linear_gradient("L").resize((width, height))
    bands = [image.rotate(90 * i).resize((width, height)) for i in range(3)]
    Image.merge("RGB", bands).convert(mode).save(folder / name)
    return name


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
