"""An error of a server is described by its text, or by its place."""

from __future__ import annotations

import pytest

from rollout_fp8.failures import describe_error


def test_an_error_has_its_type_and_text() -> None:
    assert describe_error(ValueError("too long")) == "ValueError: too long"


def test_an_error_without_a_text_is_described_by_the_place_that_raised_it() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    text = describe_error(caught.value)
    assert text.startswith("AssertionError at ")
    assert text.endswith("test_failures.py:16: raise AssertionError")


def test_an_error_that_was_never_raised_is_described_by_its_type() -> None:
    assert describe_error(AssertionError()) == "AssertionError"
