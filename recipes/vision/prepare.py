"""Drawn pictures with questions, and a small vision-language model without weights.

``python recipes/vision/prepare.py FOLDER [--seed N]`` writes both, and needs no download. There are
three kinds of questions: how many circles are among circles and squares, which digit is drawn, and
which of two bars is longer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE = 48
"""Height and width of a picture, of 6 by 6 patches, which become 9 tokens."""
COUNTS = {"sft": 3072, "rl": 2048, "heldout": 384}
"""Number of rows of each file; held-out rows are also written with their pictures exchanged."""
COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#000000")

# Qwen2.5-VL's architecture with 0.9 M parameters. The initial weights are wider than usual, because
# so small a model takes long to leave the plateau at the start with 0.02.
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [0, 1],
    "initializer_range": 0.06,
}
PROCESSOR: dict[str, Any] = {
    "patch_size": TOWER["patch_size"],
    "merge_size": TOWER["spatial_merge_size"],
    "temporal_patch_size": TOWER["temporal_patch_size"],
    "size": {"shortest_edge": SIZE**2, "longest_edge": SIZE**2},
}

PAD, BOS, EOS, UNKNOWN = "<|pad|>", "<|bos|>", "<|eos|>", "<|unknown|>"
VISION = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
SPECIAL = [PAD, BOS, EOS, "<|user|>", "<|assistant|>", *VISION.values()]
WORDS = ["How", "many", "circles", "Which", "digit", "bar", "is", "longer", "?", "red", "blue"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% else %}<|assistant|>{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    """Write the pictures and the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(options.folder, options.seed)


def prepare(folder: Path, seed: int) -> None:
    """Write ``model`` and ``data`` below a folder, from a seed."""
    write_model(folder / "model")
    # The data come last: a folder that has them is whole.
    write_data(folder / "data", seed)


def write_data(folder: Path, seed: int) -> None:
    """Write the pictures, and the files of questions."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed)
    for name, count in COUNTS.items():
        rows = [draw_row(folder, f"{name}-{i}", KINDS[i % 3], numbers) for i in range(count)]
        write_rows(folder / f"{name}.jsonl", rows)
        if name == "heldout":
            write_rows(folder / "shuffled.jsonl", exchange_pictures(rows))


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def exchange_pictures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with the picture of another row that asks the same question."""
    found: list[dict[str, Any]] = []
    for kind in range(3):
        own = rows[kind::3]
        found += [row | {"images": own[i - 1]["images"]} for i, row in enumerate(own)]
    return found


def draw_row(
    folder: Path, name: str, kind: Callable[..., tuple[str, str]], numbers: random.Random
) -> dict[str, Any]:
    """Write one picture, and return its row."""
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    question, answer = kind(ImageDraw.Draw(picture), numbers)
    picture.save(folder / "pictures" / f"{name}.png")
    return {
        "prompt": f"<image>{question}",
        "response": answer,
        "answer": answer,
        "images": [f"pictures/{name}.png"],
    }


def count_shapes(draw: ImageDraw.ImageDraw, numbers: random.Random) -> tuple[str, str]:
    """Draw circles and squares, and ask for the number of circles."""
    circles = numbers.randint(1, 4)
    shapes = ["circle"] * circles + ["square"] * numbers.randint(0, 3)
    places = numbers.sample([(x, y) for x in range(3) for y in range(3)], len(shapes))
    for shape, (column, row) in zip(shapes, places, strict=True):
        left = 16 * column + numbers.randint(1, 3)
        top = 16 * row + numbers.randint(1, 3)
        box = (left, top, left + 11, top + 11)
        if shape == "circle":
            draw.ellipse(box, fill=numbers.choice(COLORS))
        else:
            draw.rectangle(box, fill=numbers.choice(COLORS))
    return "How many circles ?", str(circles)


def read_digit(draw: ImageDraw.ImageDraw, numbers: random.Random) -> tuple[str, str]:
    """Draw a digit, and ask which one it is."""
    digit = str(numbers.randint(0, 9))
    at = (numbers.randint(6, 18), numbers.randint(-1, 8))
    font = ImageFont.load_default(numbers.randint(34, 40))
    draw.text(at, digit, font=font, fill=numbers.choice(COLORS))
    return "Which digit ?", digit


def compare_lengths(draw: ImageDraw.ImageDraw, numbers: random.Random) -> tuple[str, str]:
    """Draw a red and a blue bar, and ask which one is longer."""
    short = numbers.randint(8, 32)
    long = numbers.randint(short + 6, 44)
    order = numbers.sample(["red", "blue"], 2)
    for row, name in enumerate(numbers.sample(order, 2)):
        length = long if name == order[0] else short
        left = numbers.randint(1, SIZE - 1 - length)
        top = 24 * row + numbers.randint(4, 12)
        color = COLORS[("red", "blue").index(name)]
        draw.rectangle((left, top, left + length - 1, top + 7), fill=color)
    return "Which bar is longer ?", order[0]


KINDS = (count_shapes, read_digit, compare_lengths)


def write_model(folder: Path) -> None:
    """Write config.json, tokenizer and image processor."""
    from transformers import Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

    tokenizer = _make_tokenizer()
    number = tokenizer.convert_tokens_to_ids
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen2_5_VLConfig(
        text_config=TEXT | ids | {"vocab_size": len(tokenizer)},
        vision_config=TOWER,
        tie_word_embeddings=True,
        **{f"{name}_id": number(token) for name, token in VISION.items()},
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The processor of the family reads these tokens by their names.
    file = folder / "tokenizer_config.json"
    names = {"extra_special_tokens": VISION, "model_specific_special_tokens": VISION}
    file.write_text(json.dumps(json.loads(file.read_text()) | names, indent=1))
    Qwen2VLImageProcessorPil(**PROCESSOR).save_pretrained(folder)


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, UNKNOWN, *WORDS, *map(str, range(10))]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=VISION,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    main()
