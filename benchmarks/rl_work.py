"""The work of a step of RL for benchmarks: a tokenizer, prompts and a reward.

``benchmarks.rl_step`` and ``benchmarks.incumbent`` measure the same work.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

from benchmarks.shapes import config, whole_folder

# verl's agent loop needs a Qwen tokenizer with an end of a turn and a newline of one token.
PAD, BOS, EOS, USER, ASSISTANT, NEWLINE = (
    "<|pad|>",
    "<|bos|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "\n",
)
SPECIAL = [PAD, BOS, EOS, USER, ASSISTANT, NEWLINE]
CHAT_TEMPLATE = (
    f"{BOS}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{USER}{{{{ m['content'] }}}}{{% "
    f"else %}}"
    f"{ASSISTANT}{{{{ m['content'] }}}}{EOS}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
TURNS = 3
"""Tokens of a prompt that frame its text: bos, user, assistant."""
# A step has these numbers unless the command line changes them: completions per prompt, prompts,
# tokens of a prompt and of a completion, tokens of a micro-batch on a rank.
N, PROMPTS, PROMPT, NEW, MAX_TOKENS = 8, 64, 128, 1024, 32768


def drawn_reward(text: str) -> float:
    """Return a reward in [0, 1), drawn from the completion."""
    return zlib.crc32(text.encode()) % 1000 / 1000


def tokenizer_of(size: int) -> Any:
    """Return a tokenizer of ``size`` tokens, one per word.

    Every id that the model can draw has a text.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), size))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def end_scale(hidden: int, vocab: int, tokens: float) -> float:
    """Return the factor of a random head's row of the end token that ends completions.

    Logits of random weights are normally distributed over the states, those of the row with the
    factor times the deviation. The end's mean probability is then 1 / ``tokens``, so that lengths
    are about exponentially distributed.
    """
    import torch

    deviation = 0.02 * math.sqrt(hidden)
    others = math.log(vocab) + deviation**2 / 2
    places = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    weights = torch.exp(-(places**2) / 2)
    weights = weights / weights.sum()
    low = 0.0
    high = 100.0
    for _ in range(60):
        factor = (low + high) / 2
        mean = (torch.sigmoid(factor * deviation * places - others) * weights).sum().item()
        if mean < 1 / tokens:
            low = factor
        else:
            high = factor
    return factor


def _copy_with_ends(source: Path, folder: Path, own: dict[str, Any], tokens: float) -> None:
    """Copy weights, whose completions end after ``tokens`` tokens in the mean."""
    from safetensors.torch import load_file, save_file

    head = "model.embed_tokens.weight" if own["tie_word_embeddings"] else "lm_head.weight"
    for file in source.glob("model*"):
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
            continue
        tensors = load_file(file)
        if head in tensors:
            scale = end_scale(own["hidden_size"], own["vocab_size"], tokens)
            tensors[head][SPECIAL.index(EOS)] *= scale
        save_file(tensors, folder / file.name, metadata={"format": "pt"})


def prepare(
    folder: Path, shape: str, prompts: int, tokens: int, ends_after: float | None = None
) -> list[str]:
    """Write a tokenizer, ``config.json`` and random weights into ``folder``.

    ``ends_after``: mean number of tokens of a completion before the limit, or None for completions
    that hardly ever end. Returns ``prompts`` user turns, each of ``tokens`` tokens with its frame.
    """
    own = config(shape)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if ends_after is None:
        for file in whole_folder(shape).glob("model*"):
            (folder / file.name).symlink_to(file)
    else:
        _copy_with_ends(whole_folder(shape), folder, own, ends_after)
    tokenizer_of(own["vocab_size"]).save_pretrained(folder)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(own | ids | {"dtype": "bfloat16"}))
    drawn = random.Random(0)
    return [
        " ".join(
            f"w{drawn.randrange(len(SPECIAL), own['vocab_size'])}" for _ in range(tokens - TURNS)
        )
        for _ in range(prompts)
    ]
