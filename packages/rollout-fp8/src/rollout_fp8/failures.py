"""The words of an error that a server raised."""

from __future__ import annotations

import traceback


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, or the place where it was raised if it has no text."""
    name = type(error).__name__
    if text := str(error):
        return f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    place = frames[-1]
    return f"{name} at {place.filename}:{place.lineno}: {place.line}"
