"""What the tutorial quotes of this package is what stands in it, and the package stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
TUTORIAL = (HERE.parents[1] / "docs/adding-an-engine.md").read_text()
QUOTED = re.findall(
    r"^```python\n# (engine_minimal/\S+)\n(.*?)^```$", TUTORIAL, flags=re.MULTILINE | re.DOTALL
)


def test_the_tutorial_quotes_the_descriptor_and_the_engine() -> None:
    assert {name for name, _ in QUOTED} == {"engine_minimal/plugin.py", "engine_minimal/engine.py"}


def test_every_python_block_says_where_it_is_from() -> None:
    assert TUTORIAL.count("```python\n") == len(QUOTED)


@pytest.mark.parametrize(
    ("name", "text"), QUOTED, ids=lambda value: value.strip().partition("\n")[0][:60]
)
def test_a_quotation_is_verbatim(name: str, text: str) -> None:
    assert text.strip()
    assert text in (HERE / "src" / name).read_text()


def test_the_whole_engine_has_at_most_150_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (HERE / "src").rglob("*.py")) <= 150
