"""The walks of ARCHITECTURE.md: each file exists, defines what the step names, and comes once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src"), ROOT / "conformance/src"])
STEP = re.compile(
    r"^\d+\. `(?P<file>[\w/]+\.py)`(?P<rest>.*?)(?=^\d+\. |^\S|\Z)", re.MULTILINE | re.DOTALL
)
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`")


def walks() -> dict[str, list[tuple[str, str]]]:
    """Return the steps of each walk: a file, and the text up to the colon or the end."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.split("\n## Five walks\n")[1].split("\n## ")[0]
    parts = section.split("\n### ")[1:]
    return {
        part.splitlines()[0]: [(step["file"], step["rest"]) for step in STEP.finditer(part)]
        for part in parts
    }


WALKS = walks()


def source_of(file: str) -> Path:
    (found,) = [folder / file for folder in SOURCES if (folder / file).is_file()]
    return found


def definitions(file: Path) -> set[str]:
    """Return the functions and classes of a file, methods as ``Class.method`` and alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_there_are_five_walks_of_several_steps() -> None:
    assert len(WALKS) == 5
    assert all(len(steps) >= 7 for steps in WALKS.values())


@pytest.mark.parametrize("walk", WALKS)
def test_no_file_of_a_walk_is_visited_twice(walk: str) -> None:
    files = [file for file, _ in WALKS[walk]]

    assert len(set(files)) == len(files)


@pytest.mark.parametrize("walk", WALKS)
def test_each_step_names_a_function_that_its_file_defines(walk: str) -> None:
    for file, rest in WALKS[walk]:
        names = NAME.findall(rest)
        assert names, f"{file}: the step names no function"
        assert names[0] in definitions(source_of(file)), f"{file} does not define {names[0]}"
