"""The tutorial's quotations of the examples are verbatim, and the examples stay short."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest
from layout import ROOT

TUTORIAL = (ROOT / "docs/adding-an-engine.md").read_text()
QUOTED = re.findall(
    r"^```python\n# (engine_\w+/\S+)\n(.*?)^```$", TUTORIAL, flags=re.MULTILINE | re.DOTALL
)


def test_the_tutorial_quotes_the_descriptor_and_the_engine() -> None:
    assert {name for name, _ in QUOTED} == {
        "engine_minimal/plugin.py",
        "engine_minimal/engine.py",
        "engine_ddp/engine.py",
    }


def test_every_python_block_says_where_it_is_from() -> None:
    assert TUTORIAL.count("```python\n") == len(QUOTED)


@pytest.mark.parametrize(
    ("name", "text"), QUOTED, ids=lambda value: value.strip().partition("\n")[0][:60]
)
def test_a_quotation_is_verbatim(name: str, text: str) -> None:
    assert text.strip()
    (path,) = ROOT.glob(f"examples/*/src/{name}")
    assert text in path.read_text()


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


@pytest.mark.parametrize(("example", "most"), [("engine-minimal", 150), ("engine-ddp", 200)])
def test_an_example_stays_short(example: str, most: int) -> None:
    files = (ROOT / "examples" / example / "src").rglob("*.py")
    assert sum(lines_of_code(path.read_text()) for path in files) <= most
