"""The tutorial's quotations of this package are verbatim, and the package stays short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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


def lines_of_code(source: str) -> int:
    """Count the lines that hold code, without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, node.value.end_lineno + 1))
    return len(lines)


def test_the_whole_engine_has_at_most_150_lines_of_code() -> None:
    files = (HERE / "src").rglob("*.py")
    assert sum(lines_of_code(path.read_text()) for path in files) <= 150
