"""The quickstart's model folder, made without any download: tokenizer and shape, no weights.

``python recipes/quickstart/prepare.py FOLDER`` makes it; the tokenizer encodes any text.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_trainer.config import GymSection, SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data.gym import gym_examples

# The model is Qwen3's architecture with 0.67 M parameters. The initial weights are wider than
# usual: at this depth and width 0.02 takes hundreds of steps to leave the plateau at the start.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.06,
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}{{ eos_token }}"
    "{% else %}"
    "{{ raise_exception('this template knows the roles user and assistant, not ' + m['role']) }}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PAD, BOS, EOS, *TURNS = SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
# Digits are separate, and words stay together with the spaces between them, so that a question is
# about 17 tokens.
WORDS = r"\d|[A-Za-z ]*[A-Za-z] ?|\n+|#+ ?| ?[^A-Za-z\d\s] ?| "


def prepare(folder: Path, problems: GymSection, model: Mapping[str, Any] = MODEL) -> None:
    """Write the model folder without weights into ``folder``.

    It has the tokenizer, trained on ``problems``, and ``model`` as config.json.
    """
    texts = [
        f"{e.messages[0]['content']}\n{e.messages[1]['content']}"
        for e in gym_examples(problems, "train")
    ]
    tokenizer = _tokenizer(texts)
    tokenizer.save_pretrained(folder)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": len(tokenizer),
    }
    (folder / "config.json").write_text(json.dumps({**model, **ids}, indent=1))


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=768,
            special_tokens=SPECIAL,
            show_progress=False,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=TURNS,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    """Prepare the folder that the command line names, with the quickstart's problems."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="gets config.json and the tokenizer's files")
    folder = parser.parse_args().folder
    # Packages below reasoning-gym cause these warnings.
    warnings.simplefilter("ignore", SyntaxWarning)
    config = load_config(
        SFTConfig,
        Path(__file__).parent / "sft.yaml",
        [f"engine.model.path={folder}", "run.output_dir=."],
    )
    assert config.data.reasoning_gym is not None
    prepare(folder, config.data.reasoning_gym)


if __name__ == "__main__":
    main()
