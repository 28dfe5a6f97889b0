"""The tutorial's quotations of the examples are verbatim, and the examples stay short."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from types import SimpleNamespace

import pytest
from layout import ROOT

from engine_api import BaseEngine
from engine_api.plugin import CONTRACT, contract_problem, is_older

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


def test_the_members_that_a_backend_adds_are_shown_with_their_arguments() -> None:
    table = TUTORIAL.partition("| member | task | here |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"`(\w+)\(([^`]*)\)`", table))
    assert set(shown) == set(BaseEngine.__abstractmethods__)
    for name, arguments in shown.items():
        signature = inspect.signature(getattr(BaseEngine, name))
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        want = str(inspect.Signature(plain)).strip("()").removeprefix("self").removeprefix(", ")
        assert arguments == want


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


def test_the_example_of_an_older_contract_is_served_and_asked_for_nothing_newer() -> None:
    """engine-minimal stays where it is, and `nox -s examples` certifies its wheel."""
    from engine_conformance.cases import Target, load_cases
    from engine_minimal.plugin import PLUGIN

    assert is_older(PLUGIN.contract, CONTRACT)
    assert contract_problem(PLUGIN.contract) is None
    target = Target(backend="minimal", root=ROOT)
    target.__dict__["resolution"] = SimpleNamespace(plugin=PLUGIN)
    newer = [one for one in load_cases().values() if is_older(PLUGIN.contract, one.since)]
    assert {one.id for one in newer} >= {"moe.replay", "refusal.sinks", "mechanisms.sinks"}
    for one in newer:
        assert f"the engine was written for {PLUGIN.contract}" in (one.why_not(target) or "")
    assert load_cases()["train.policy"].why_not(target) is None
