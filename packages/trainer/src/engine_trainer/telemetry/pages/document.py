"""One HTML file that needs no network, and in which texts of a run are text, never markup.

The page's policy lets no script run other than its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from pathlib import Path

from engine_api.folders import write_text

_PACKAGE = "engine_trainer.telemetry"


def document(title: str, body: str, *, style: str, script: str) -> str:
    """Return a page as HTML.

    Args:
        title: title of the page, as text.
        body: content of ``<body>`` as HTML, in which texts are escaped.
        style: CSS in addition to the style that all pages share.
        script: the page's own script, which may not make markup of a text.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>"
        f"<style>{resource('pages', 'base.css')}{style}</style></head><body>"
        f"{body}<script>{script}</script></body></html>\n"
    )


def resource(package: str, name: str) -> str:
    """Return the text of a file that lies in ``package``, a part of ``telemetry``."""
    return files(f"{_PACKAGE}.{package}").joinpath(name).read_text(encoding="utf-8")


def write_page(path: Path, text: str) -> None:
    """Replace the page ``path``. A kill leaves the former page or the new one."""
    # A text in a file of JSON may have half of a surrogate pair.
    write_text(path, text.encode("utf-8", "replace").decode("utf-8"))
