"""The texts of single tokens, for people who read a completion token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are no whole character."""
LONGEST = 8
"""Largest number of tokens that are looked at for the rest of a character."""


class TokenTexts:
    """The texts of tokens by a Hugging Face tokenizer, special tokens included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop a space at the beginning of a text, which therefore begins with a
        # different token.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode(self._before))
        self._known: dict[int, str] = {}

    def texts_of_tokens(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token.

        Of tokens that only together are whole characters, the first one has the whole text and the
        others have none.
        """
        texts = [self._text(token) for token in tokens]
        for begin, text in enumerate(texts):
            if BROKEN not in text:
                continue
            for end in range(begin + 2, min(begin + LONGEST, len(tokens)) + 1):
                whole = self._decode_after_anchor(tokens[begin:end])
                if BROKEN not in whole:
                    texts[begin:end] = [whole, *[""] * (end - begin - 1)]
                    break
        return texts

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a stretch of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode_after_anchor([token])
        return self._known[token]

    def _decode_after_anchor(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._before, *tokens])[self._skipped :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
