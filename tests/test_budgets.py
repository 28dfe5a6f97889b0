"""Files and functions stay small; all offenders are reported at once. (Docstrings and annotations: ruff, D and ANN.)"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from layout import PACKAGES, ROOT

FILE_LINES, FUNCTION_LINES, MEDIAN_LINES = 400, 60, 10
Function = ast.FunctionDef | ast.AsyncFunctionDef
SOURCES = [p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def body_lines(node: Function) -> int:
    first = node.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node, clean=False) else 0
    return lines(node) - docstring


def test_files_and_functions_are_short() -> None:
    long = [f"{p}: {n} lines" for p in SOURCES if (n := len(p.read_text().splitlines())) > FILE_LINES]
    long += [f"{p}:{f.lineno} {f.name}: {lines(f)}" for p in SOURCES for f in functions(p) if lines(f) > FUNCTION_LINES]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_most_functions_are_very_short(package: Path) -> None:
    assert statistics.median(body_lines(f) for p in package.glob("src/**/*.py") for f in functions(p)) <= MEDIAN_LINES
