"""The page of a run: one HTML file that needs no network.

Completions are text, never markup. What this module writes into the page is escaped, JSON is
embedded without any ``<``, the script writes text nodes only, and the page's policy lets no script
run other than its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine_api.folders import write_text
from engine_trainer.telemetry.samples import spread
from engine_trainer.telemetry.view.charts import histogram_over_steps
from engine_trainer.telemetry.view.content import Content, Problem, read_content

NAME = "view.html"
MOST_PROBLEMS = 1000
MOST_EVALUATIONS = 25
"""Columns of the table of problems: these evaluations, in equal distances, and the last one."""
LONGEST = 160
"""Largest number of characters of a question in the table."""


def write_view(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run in the folder ``run``, and return its path.

    By default it is ``view.html`` in that folder. A kill leaves the former page or the new one.

    Raises ``DataError`` (see ``read_content``).
    """
    path = run / NAME if output is None else output
    text = page(run.resolve().name, read_content(run))
    # A question in a file of JSON may have half of a surrogate pair.
    write_text(path, text.encode("utf-8", "replace").decode("utf-8"))
    return path


def page(name: str, content: Content) -> str:
    """Return the page of a run as HTML."""
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    style = _resource("page.css")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{style}</style></head><body>"
        f"<header><h1>{html.escape(name)}</h1>{_counts(content)}</header><main>"
        f"{_charts(content)}{_completions(content)}{_evaluations(content)}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def embed(identifier: str, value: Any) -> str:
    """Return ``value`` as JSON in an element that no text in it can end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Outside of its strings JSON has none of these characters, and in them each is an escape.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>'


def _resource(name: str) -> str:
    return files("engine_trainer.telemetry.view").joinpath(name).read_text(encoding="utf-8")


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
    return "".join(_table(name, problems) for name, problems in content.evaluations.items())


def _table(name: str, problems: list[Problem]) -> str:
    every = sorted({step for problem in problems for step in problem.correct})
    steps = [every[i] for i in spread(len(every) - 1, MOST_EVALUATIONS - 1)] + every[-1:]
    title = f"Held-out problems of {name}" if name else "Held-out problems"
    head = "".join(f"<th>step {step}</th>" for step in steps)
    rows = "".join(
        f'<tr><th scope="row">{problem.number}</th>'
        f"{''.join(_fraction(problem.correct.get(step)) for step in steps)}"
        f'<td class="text">{html.escape(_shortened(problem.answer or ""))}</td>'
        f'<td class="text question">{html.escape(_shortened(problem.question))}</td></tr>'
        for problem in problems[:MOST_PROBLEMS]
    )
    left = len(problems) - MOST_PROBLEMS
    more = f"<p>{left} more problems are in the files of the run.</p>" if left > 0 else ""
    return (
        f"<section><h2>{html.escape(title)}</h2>"
        "<p>The fraction of correct completions at each evaluation.</p>"
        '<div class="table" tabindex="0"><table><thead><tr><th>#</th>'
        f'{head}<th class="text">answer</th><th class="text">question</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>{more}</section>"
    )


def _fraction(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    return f'<td class="f{round(value * 10)}">{value:.0%}</td>'


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
