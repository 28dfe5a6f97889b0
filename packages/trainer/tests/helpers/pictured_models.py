"""Tiny vision-language models with their processors, and rows with drawn images."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_models import tiny_pictured_model

IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
"""An image of 8 by 8 pixels has four patches, which are one token."""


def save_pictured_model(folder: Path, model_type: str, tokenizer: Any) -> Path:
    """Write a tiny model with tokenizer and processor. Return its folder."""
    from transformers import Qwen2VLImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    model = tiny_pictured_model(
        model_type,
        {"vocab_size": len(tokenizer)},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(**SETTINGS).save_pretrained(folder)
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
