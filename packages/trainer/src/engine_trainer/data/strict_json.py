"""A JSON parser that also refuses what Python's parser accepts or breaks on.

Deep nesting breaks recursive parsers and writers, the first of two equal keys would be lost, and no
tokenizer accepts half of a surrogate pair.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from typing import Any

# Largest number of nested lists and objects.
MAX_DEPTH = 100
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# A surrogate as JSON escapes it. UTF-8 has no surrogates.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class HalfCharacter(ValueError):
    """The error of half of a surrogate pair in a text.

    Args:
        half: the half.
        keys: keys and indices that lead to the text, outermost first.
    """

    def __init__(self, half: str, keys: tuple[str | int, ...]) -> None:
        self.keys = keys
        super().__init__(f"{half!r} is half of a surrogate pair, which UTF-8 does not have")


def loads(text: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: the text is not JSON, is nested deeper than ``MAX_DEPTH``, or has an object
            with the same key twice.
        HalfCharacter: a text or key has half of a surrogate pair.
    """
    if _is_deep(text):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    if _SURROGATE.search(text):
        _require_text(value)
    return value


def _is_deep(text: bytes) -> bool:
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        # Almost every text takes this shortcut.
        return False
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return (
        max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
        > MAX_DEPTH
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice!r:.100} twice")
    return values


def _require_text(value: Any, keys: tuple[str | int, ...] = ()) -> None:
    """Raise ``HalfCharacter`` for a text or key in ``value``, to which ``keys`` lead."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise HalfCharacter(value[error.start], keys) from error
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _require_text(part, (*keys, index))
    elif isinstance(value, dict):
        for key, part in value.items():
            _require_text(key, keys)
            _require_text(part, (*keys, key))
