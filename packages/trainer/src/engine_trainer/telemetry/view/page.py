"""The page of a run: one HTML file that needs no network.

Completions are text, never markup. What this module writes into the page is escaped, JSON is
embedded without any ``<``, the script writes text nodes only, and the page's policy lets no script
run other than its own.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from engine_trainer.telemetry.pages.charts import histogram_over_steps
from engine_trainer.telemetry.pages.document import document, resource, write_page
from engine_trainer.telemetry.pages.evaluations import problem_table
from engine_trainer.telemetry.view.content import Content, read_content

NAME = "view.html"


def write_view(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run in the folder ``run``, and return its path.

    By default it is ``view.html`` in that folder. A kill leaves the former page or the new one.

    Raises ``DataError`` (see ``read_content``).
    """
    path = run / NAME if output is None else output
    write_page(path, page(run.resolve().name, read_content(run)))
    return path


def page(name: str, content: Content) -> str:
    """Return the page of a run as HTML."""
    body = (
        f"<header><h1>{html.escape(name)}</h1>{_counts(content)}</header><main>"
        f"{_charts(content)}{_completions(content)}{_evaluations(content)}</main>"
    )
    return document(
        name, body, style=resource("view", "page.css"), script=resource("view", "page.js")
    )


def embed(identifier: str, value: Any) -> str:
    """Return ``value`` as JSON in an element that no text in it can end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Outside of its strings JSON has none of these characters, and in them each is an escape.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>'


def _counts(content: Content) -> str:
    every = len(content.overview.steps)
    if not every:
        return "<p>The run has kept no completions of its training.</p>"
    part = (
        f"{every} completions"
        if content.rows == every
        else f"{content.rows} of {every} completions, in groups from all steps; the charts have all"
    )
    return f"<p>{part}.</p>"


def _charts(content: Content) -> str:
    overview = content.overview
    if not len(overview.steps):
        return ""
    about = "by step; the line is the mean"
    rewards = histogram_over_steps("Reward", overview.steps, overview.rewards, about)
    lengths = histogram_over_steps("Tokens", overview.steps, overview.lengths, about)
    return f'<section class="charts">{rewards}{lengths}</section>'


def _completions(content: Content) -> str:
    if not content.rows:
        return ""
    blocks: list[str] = []
    steps: list[int] = []
    for step, groups in content.steps():
        steps.append(step)
        blocks.append(embed(f"step-{step}", groups))
    return (
        '<section id="completions"><h2>Completions</h2><div class="controls">'
        '<label>Step <select id="step"></select></label>'
        '<label>Problem <select id="group"></select></label>'
        '<label>Colour <select id="colour">'
        '<option value="advantages">advantage</option>'
        '<option value="gap">log-prob gap: rollout − old policy</option>'
        '<option value="entropy">entropy</option>'
        "</select></label></div>"
        '<p id="legend"></p>'
        '<details id="prompt" open><summary>Prompt</summary><pre></pre></details>'
        '<div id="cards" tabindex="0" aria-label="completions of the problem"></div>'
        '<article id="one" aria-live="polite"></article>'
        f"{embed('steps', steps)}{''.join(blocks)}</section>"
    )


def _evaluations(content: Content) -> str:
    titles = {
        name: f"Held-out problems of {name}" if name else "Held-out problems"
        for name in content.evaluations
    }
    return "".join(
        f"<section><h2>{html.escape(titles[name])}</h2>{problem_table(problems)}</section>"
        for name, problems in content.evaluations.items()
    )
