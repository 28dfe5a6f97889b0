"""The tokenizer of a step of RL: the tokens that verl needs, and the length of its prompts."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.rl_work import ASSISTANT, BOS, EOS, NEWLINE, USER, tokenizer_of


def test_tokenizer(tmp_path: Path) -> None:
    """A newline and the end of a turn are tokens, and no prompt holds either.

    Every id has a text of its own.
    """
    tokenizer_of(64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(NEWLINE, add_special_tokens=False) == [5]
    assert (
        tokenizer.convert_tokens_to_ids("<|im_end|>")
        == tokenizer.convert_tokens_to_ids(EOS)
        == tokenizer.eos_token_id
        == 2
    )
    turn = [{"role": "user", "content": "w6 w63"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert tokenizer.tokenize(text) == [BOS, USER, "w6", "w63", ASSISTANT]
    assert len({tokenizer.decode([i]) for i in range(64)}) == len(tokenizer) == 64
