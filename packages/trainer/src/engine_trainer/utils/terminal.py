"""Text of unknown origin on a terminal: escaped, measured in columns, and colored."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

# Joiners of letters and of emoji, which change no other text.
_JOINERS = "\u200c\u200d"
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def escape(text: str, *, keep: str = "\n") -> str:
    """Return the text with characters that a terminal may act on, or not show, as escapes.

    These are control characters, such as the beginning of an escape sequence, characters that
    change the direction of text, and others without a form of their own. ``keep`` is left as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or _is_harmless(c) else _escaped(c) for c in text)


def columns(text: str) -> int:
    """Return the columns that a printable text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def wrap(text: str, width: int) -> Iterator[str]:
    """Yield a line of printable text in pieces of at most ``width`` columns, losing nothing.

    A piece ends behind a space where one is in its second half.
    """
    start = used = 0
    space = 0
    for at, character in enumerate(text):
        size = _columns_of(character)
        if used + size > width and at > start:
            end = space if space - start > width // 2 else at
            yield text[start:end]
            start = end
            used = columns(text[start:at])
        used += size
        if character == " ":
            space = at + 1
    yield text[start:]


def paint(text: str, *styles: str) -> str:
    """Return the text in the given ``STYLES``, as ANSI escape sequences."""
    return f"\x1b[{';'.join(STYLES[style] for style in styles)}m{text}\x1b[0m"


def _is_harmless(character: str) -> bool:
    return (
        character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _columns_of(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
