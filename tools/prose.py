"""Measure how the source reads: line lengths, docstring openings, modules in one folder.

`python tools/prose.py` prints one table over every package's `src`; `--list` also prints the
docstrings that a measure counts. The measures are aims for a reader's eye, not limits: no test
runs this script. Given other folders, it measures those, so that code bases can be compared.
"""

from __future__ import annotations

import argparse
import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).parents[1]
QUESTION = re.compile(r"(What|Which|Whether|How|Who|Whose|Where|When)\b")
FRAGMENT = re.compile(
    r"(Of|In|On|At|By|For|From|To|With|Without|Under|Over|As|If|After|Before|Beside|Into|Until)\b"
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstring:
    """First line of a docstring, and where it stands."""

    where: str
    line: str


# In two parts, so that a search for it finds no file.
SKIP = "fmt: {}".format("skip")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="default: src of every package")
    parser.add_argument("--list", action="store_true", help="print the docstrings counted")
    asked = parser.parse_args(arguments)
    folders = asked.folders or sorted([*ROOT.glob("packages/*/src"), ROOT / "conformance/src"])
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    if not files:
        parser.error(f"no Python file in {', '.join(map(str, folders))}")

    texts = {path: path.read_text("utf-8") for path in files}
    lines = [line for text in texts.values() for line in text.splitlines() if line.strip()]
    lengths = sorted(map(len, lines))
    trees = {path: ast.parse(text) for path, text in texts.items()}
    docstrings = [found for path, tree in trees.items() for found in docstrings_of(path, tree)]
    packed = sum(is_packed(node) for tree in trees.values() for node in ast.walk(tree))
    comments = [text for path in files for text in comments_of(path)]

    openings = {
        "open with What, Which, Whether, How …": [d for d in docstrings if QUESTION.match(d.line)],
        'open with a bare preposition ("Of its text.")': [
            d for d in docstrings if is_fragment(d.line)
        ],
        "semicolon in the first line": [d for d in docstrings if ";" in d.line],
    }
    rows = [
        ("files, lines that are not blank", f"{len(files)}, {len(lines)}"),
        ("exceptions from the formatter", str(sum(SKIP in text for text in comments))),
        ("lines over 100 columns", str(sum(length > 100 for length in lengths))),
        ("90th percentile of line length", f"{quantiles(lengths, n=10)[-1]:.0f}"),
        ("packed tuple assignments per 1,000 lines", f"{1000 * packed / len(lines):.1f}"),
        ("docstrings", str(len(docstrings))),
        *(
            (f"… {name}", f"{len(found)} ({len(found) / len(docstrings):.1%})")
            for name, found in openings.items()
        ),
        *(
            (f"top-level modules of `{package.parent.name}`", str(count_modules(package.parent)))
            for folder in folders
            for package in sorted(folder.glob("*/__init__.py"))
        ),
    ]
    print("| measured over `src` | |\n| --- | --- |")
    for name, value in rows:
        print(f"| {name} | {value} |")
    if asked.list:
        for name, found in openings.items():
            print(f"\n{name}")
            for docstring in found:
                print(f"  {docstring.where}: {docstring.line}")


def docstrings_of(path: Path, tree: ast.Module) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                line = getattr(node, "lineno", 1)
                yield Docstring(f"{path}:{line}", text.splitlines()[0])
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                match field, below:
                    case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                        line = text.strip().splitlines()[0]
                        yield Docstring(f"{path}:{field.lineno}", line)


def is_fragment(line: str) -> bool:
    """Tell whether a docstring's first line is a preposition with its object and no verb.

    "With ``n`` ranks, raise …" is a sentence that a preposition opens: it has a comma.
    """
    return bool(FRAGMENT.match(line)) and "," not in line


def is_packed(node: ast.AST) -> bool:
    """Tell whether a statement assigns several values at once (``a, b = c, d``)."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def comments_of(path: Path) -> Iterator[str]:
    """Yield a file's comments."""
    with tokenize.open(path) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def count_modules(package: Path) -> int:
    """Count the modules that stand directly in a package's folder."""
    return sum(path.name != "__init__.py" for path in package.glob("*.py"))


if __name__ == "__main__":
    main()
