"""The work of a step of RL for benchmarks: a tokenizer, prompts and a reward.

``benchmarks.rl_step`` and ``benchmarks.incumbent`` measure the same work.
"""

from __future__ import annotations

import json
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


def prepare(folder: Path, shape: str, prompts: int, tokens: int) -> list[str]:
    """Write a tokenizer, ``config.json`` and random weights into ``folder``.

    Returns ``prompts`` user turns, each of ``tokens`` tokens with its frame.
    """
    own = config(shape)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in whole_folder(shape).glob("model*"):
        (folder / file.name).symlink_to(file)
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
