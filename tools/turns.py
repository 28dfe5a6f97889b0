"""A plugin of pytest that runs a part of the tests marked ``slow``.

``python -m pytest -p tools.turns --turn 1/12`` runs a twelfth of them, chosen by their names, and
all other tests. `nox -s tests` chooses the twelfth by its commit. Without ``--turn`` all run.
"""

from __future__ import annotations

import argparse
from zlib import crc32

import pytest


def read_turn(text: str) -> tuple[int, int]:
    """Return the number of a part and the number of parts, of a text such as ``1/12``."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, got {text}")
    return number, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--turn``."""
    parser.addoption(
        "--turn",
        type=read_turn,
        metavar="N/M",
        help="run part N of M of the tests marked `slow`; default: all of them",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked ``slow`` that are of another part."""
    turn: tuple[int, int] | None = config.getoption("turn")
    if turn is None:
        return
    number, parts = turn
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        has_turn = crc32(item.nodeid.encode()) % parts == number - 1
        is_asked = has_turn or item.get_closest_marker("slow") is None
        (chosen if is_asked else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)
