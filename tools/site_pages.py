"""Hook of MkDocs: pages of the site for files of the repository outside docs/.

A page links to such a file by its relative path, so that the link also works where the repository
is browsed. The site gets a page for each of them: a Markdown file as it stands, a source file with
highlighting, a folder as its README.md or a list of its files. Links lead to these pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
# Pages of source files stand below this folder of the site, in no menu.
SOURCES = "source/"
LANGUAGES = {
    ".Dockerfile": "docker",
    ".py": "python",
    ".sbatch": "bash",
    ".toml": "toml",
    ".txt": "text",
    ".yaml": "yaml",
}
# The target of a relative link, without its anchor.
TARGET = re.compile(r"(?<=\]\()[^\s()#:]+(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ to which the navigation or a page links."""
    todo = [DOCS + file.src_uri for file in files.documentation_pages()]
    outside = [path for path in _strings(config.nav) if files.get_file_from_path(path) is None]
    # MkDocs reports an entry without a file.
    todo += [path for path in outside if (ROOT / path).is_file()]
    found: set[str] = set()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        if files.get_file_from_path(_uri(path)) is None:
            files.append(_page(path, config))
        if path.endswith(".md"):
            links = [_resolve(link, path) for link in TARGET.findall(_read(path))]
            todo += [target for target in links if target is not None]
        elif (ROOT / path).is_dir():
            todo += _sources_in(path)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite relative links between files of the repository into links between pages.

    A page that is a tab by itself gets no menu, which would hold this page alone.
    """
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    uri = page.file.src_uri
    if uri.startswith(SOURCES):
        return markdown
    path = uri if page.file.src_dir is None else DOCS + uri

    def rewrite(link: re.Match[str]) -> str:
        target = _resolve(link[0], path)
        if target is None:
            return link[0]
        return posixpath.relpath(_uri(target), posixpath.dirname(uri))

    return TARGET.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the two colons that announce a block in a docstring, which Markdown would show."""
    return html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")


def _strings(nav: Any) -> Iterator[str]:
    """Yield every path of the navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from _strings(list(nav.values()))
    else:
        for part in nav:
            yield from _strings(part)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _resolve(link: str, path: str) -> str | None:
    """Return the file or folder to which ``path`` links, or None where there is none.

    Files and folders are paths from the repository's root. MkDocs reports dead links.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if target.startswith("..") or not (ROOT / target).exists():
        return None
    readme = f"{target}/README.md"
    return readme if (ROOT / readme).exists() else target


def _uri(path: str) -> str:
    """Return the page of a file or folder, as a path below the site's sources."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path.endswith(".md") else f"{SOURCES}{path}.md"


def _page(path: str, config: MkDocsConfig) -> File:
    """Build the page of a file or folder outside docs/.

    Raises ``KeyError`` for a kind of file that is not in ``LANGUAGES``.
    """
    if path.endswith(".md"):
        return File.generated(config, path, abs_src_path=str(ROOT / path))
    if (ROOT / path).is_dir():
        folder = posixpath.basename(path)
        names = [posixpath.basename(file) for file in _sources_in(path)]
        body = "\n".join(f"- [{name}]({folder}/{name}.md)" for name in names)
    else:
        # No source has a line of tildes.
        body = f"~~~~ {LANGUAGES[posixpath.splitext(path)[1]]}\n{_read(path)}\n~~~~"
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n"
    return File.generated(config, _uri(path), content=f"{head}\n# {path}\n\n{body}\n")


def _sources_in(folder: str) -> list[str]:
    """Return the source files of a folder."""
    found = sorted((ROOT / folder).iterdir())
    return [f"{folder}/{file.name}" for file in found if file.suffix in LANGUAGES]
