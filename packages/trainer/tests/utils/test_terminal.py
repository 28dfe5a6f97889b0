"""Text of unknown origin on a terminal."""

from __future__ import annotations

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_trainer.utils.terminal import columns, escape, paint, wrap


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ü, 漢字, 🎉", "plain text, ü, 漢字, 🎉"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("\x9b31m\x07\x08\r\x00\x7f", "\\x9b31m\\x07\\x08\\r\\x00\\x7f"),
        ("right\u202eleft\u2066x\u200f", "right\\u202eleft\\u2066x\\u200f"),
        ("\ud800\u2028\u2029\ufeff", "\\ud800\\u2028\\u2029\\ufeff"),
        ("a\u00a0b\u3000c", "a\u00a0b\u3000c"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("a\tb\nc", "a\\tb\nc"),
    ],
)
def test_what_a_terminal_may_act_on_is_escaped(text, shown):
    assert escape(text) == shown


@fuzz()
@given(st.text(max_size=40))
def test_no_control_character_is_left(text):
    shown = escape(text, keep="")
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    assert not any(0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 for c in shown)
    shown.encode("utf-8")


@fuzz()
@given(st.text(max_size=80).map(escape).map(lambda t: t.replace("\n", " ")), st.integers(2, 30))
def test_lines_are_wrapped_without_loss(text, width):
    pieces = list(wrap(text, width))
    assert "".join(pieces) == text
    assert all(columns(piece) <= width for piece in pieces)


def test_wide_characters_take_two_columns_and_marks_none():
    assert [columns(text) for text in ("abc", "漢字", "e\u0301", "")] == [3, 4, 1, 0]
    assert list(wrap("漢字漢字", 5)) == ["漢字", "漢字"]
    assert list(wrap("one two three", 9)) == ["one two ", "three"]


def test_paint_is_an_escape_sequence_that_ends():
    assert paint("x", "bold", "red") == "\x1b[1;31mx\x1b[0m"
