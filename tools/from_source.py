"""Run the packages of this tree from source, without installing them.

``python tools/from_source.py FOLDER`` writes the metadata by which Python finds entry points (one
``NAME-VERSION.dist-info`` per package) and prints the PYTHONPATH to use. It is meant for machines
that cannot install anything.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def entry_points(project: dict[str, Any]) -> str:
    """Return the text of ``entry_points.txt``."""
    groups: dict[str, dict[str, str]] = dict(project.get("entry-points", {}))
    if scripts := project.get("scripts"):
        groups["console_scripts"] = scripts
    return "\n".join(
        f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items()
    )


def metadata(project: dict[str, Any]) -> str:
    """Return the text of ``METADATA``, without what optional dependencies require."""
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {one}" for one in project.get("dependencies", ())]
    return "\n".join(lines) + "\n"


def write(folder: Path) -> list[Path]:
    """Write the metadata of every package into ``folder``.

    Returns the source folders to put on the path.
    """
    sources = []
    for pyproject in sorted(
        [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"]
    ):
        project = tomllib.loads(pyproject.read_text())["project"]
        name = project["name"]
        version = project["version"]
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(metadata(project))
        (info / "entry_points.txt").write_text(entry_points(project))
        sources.append(pyproject.parent / "src")
    return sources


def main() -> None:
    """Write the metadata and print the path."""
    folder = Path(sys.argv[1]).resolve()
    print(":".join(str(path) for path in [folder, *write(folder)]))


if __name__ == "__main__":
    main()
