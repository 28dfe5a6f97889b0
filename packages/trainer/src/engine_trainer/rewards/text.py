"""Functions that extract the answer from a text."""

from __future__ import annotations

import re
from decimal import Decimal

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.rewards.sample import RewardError, Sample

MARKER = "####"
# A minus after a word or a bracket is a subtraction: 12-5 is two numbers. A comma ends a number
# unless a digit follows.
_NUMBER = re.compile(r"(?P<sign>(?<![\w)])-(?=\$?[\d.]))?\$?(?P<size>\d+(?:,\d+)*(?:\.\d+)?|\.\d+)")


def after_marker(text: str, marker: str = MARKER) -> str | None:
    """Return the text from the last ``marker`` to the end of its line, or None without a marker."""
    _, found, rest = text.rpartition(marker)
    return rest.split("\n", 1)[0].strip() if found else None


def numbers(text: str) -> list[str]:
    """Return every number in ``text`` as written, without a dollar sign.

    ``-$1,200`` becomes ``-1,200``.
    """
    return [(found["sign"] or "") + found["size"] for found in _NUMBER.finditer(text)]


def last_number(text: str) -> str | None:
    """Return the last number in ``text``, as ``numbers`` writes it, or None without one."""
    return next(reversed(numbers(text)), None)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{…}``, or None without a whole one.

    Inner braces are matched.
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at].strip()
    return None


def inside_answer_tags(text: str) -> str | None:
    """Return the contents of the last ``<answer>…</answer>``, or None without one."""
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


EXTRACTORS = {
    "none": str.strip,
    "marker": after_marker,
    "number": last_number,
    "boxed": last_boxed,
    "tags": inside_answer_tags,
}


def check_extractor(how: str) -> None:
    """Raise ``ConfigError`` unless ``how`` is a key of ``EXTRACTORS``."""
    if how not in EXTRACTORS:
        raise ConfigError(
            "reward.kwargs.extract",
            f"unknown extraction {how!r}",
            remedy=near_matches(how, list(EXTRACTORS)),
        )


def require_answer(sample: Sample, function: str) -> str:
    """Return the sample's expected answer.

    Raises:
        RewardError: the data has none.
    """
    if sample.answer is None:
        raise RewardError(
            function,
            sample,
            "the problem has no answer to compare with",
            remedy="name the column that holds it: data.columns.answer",
        )
    return sample.answer


def to_decimal(number: str | None) -> Decimal | None:
    """Return the exact value of a number that ``numbers`` found, or None for None."""
    return None if number is None else Decimal(number.replace(",", ""))


def format_number(number: Decimal) -> str:
    """Return the normal form of ``number``, with all of its digits.

    ``1200.0`` becomes ``1200``, and ``-0`` becomes ``0``.
    """
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
