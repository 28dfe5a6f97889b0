"""Rendering of ``certificate.md`` and ``report.html`` from the document of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from engine_conformance.report import view
from engine_conformance.report.chart import make_chart
from engine_conformance.report.document import read_document
from engine_conformance.verdict import exit_code

__all__ = ["certificate", "html"]

# A name in a docstring.
_QUOTED = re.compile(r"(`{1,2})([^`]+)\1")
# The punctuation that has a meaning in Markdown within a line.
_SPECIAL = re.compile(r"([\\`*_\[\]~|])")


def certificate(document: Mapping[str, Any]) -> str:
    """Return a report as Markdown, named a certificate only if one was asked for and earned."""
    return _templates().get_template("certificate.md").render(_context(document))


def html(document: Mapping[str, Any]) -> str:
    """Return a report as one HTML file without scripts, images, fonts or other files."""
    run, _ = read_document(document)
    template = _templates().get_template("report.html")
    return template.render(_context(document), chart=make_chart(run.rows))


def _context(document: Mapping[str, Any]) -> dict[str, Any]:
    run, verdicts = read_document(document)
    install, notes = view.requirements(run)
    return {
        "run": run,
        "verdicts": verdicts,
        "certified": run.certify
        and not run.is_part
        and exit_code(run.rows, verdicts, certify=True) == 0,
        "coverage": view.coverage(run) if run.is_part else "",
        "profiles": view.profiles(run, verdicts),
        "counts": {status: number for status, number in document["counts"].items() if number},
        "facts": view.facts(run, document["digest"]),
        "problems": view.problems(run.rows),
        "deviations": [row for row in run.rows if row.outcome.status == "deviation"],
        "absent": view.absent(run.rows),
        "cases": view.by_case(run.rows),
        "install": shlex.join(["pip", "install", *install]),
        "notes": notes,
        "command": "\n".join(view.commands(run)),
    }


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("engine_conformance.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "prose": _prose,
        "code": _code,
        "fence": _fence,
        "link": _link,
        "names": _names,
        "names_prose": _names_prose,
        "margin": view.margin_text,
        "asked": view.describe_selection,
    }
    return made


def _prose(text: str) -> Markup:
    """Return one line of Markdown that shows ``text`` as it is, in a table too."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> Markup:
    return Markup(_SPECIAL.sub(r"\\\1", str(escape(text))))  # noqa: S704 - escaped right here


def _code(text: str) -> Markup:
    """Return a code span, or prose for a text that a code span in a table cannot hold."""
    if not text or set("`|\n") & set(text):
        return _prose(text)
    return Markup(f"`{text}`")  # noqa: S704 - Markdown shows a code span as it is


def _names(text: str) -> Markup:
    """Return a docstring's text as HTML, with its quoted names as code."""
    marked = _QUOTED.sub(r"<code>\2</code>", str(escape(text)))
    return Markup(marked)  # noqa: S704 - escaped in the line above


def _names_prose(text: str) -> Markup:
    """Return a docstring's text as Markdown, with its quoted names as code."""
    # The pattern has two groups, so split returns: outside, quotes, inside, outside, quotes …
    parts = _QUOTED.split(" ".join(text.split()))
    outside = parts[::3]
    inside = [*parts[2::3], ""]
    return Markup("").join(_escaped(o) + _code(i) for o, i in zip(outside, inside, strict=True))


def _fence(text: str, language: str = "text") -> Markup:
    """Return a fenced block whose fence is longer than any in ``text``."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    # Markdown shows a fenced block as it is.
    return Markup(f"{fence}{language}\n{text.rstrip()}\n{fence}")  # noqa: S704 - shown, not parsed


def _link(address: str) -> Markup:
    """Return a link for an address of the web, and the bare text for any other."""
    if not address.startswith(("https://", "http://")):
        return escape(address)
    return Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(address)
