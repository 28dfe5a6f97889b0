"""The folders of the packages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# All folders that a release is built from. enginehouse has no code.
PUBLISHED = sorted(
    p.parent for p in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance/pyproject.toml"]
)
PACKAGES = [package for package in PUBLISHED if (package / "src").is_dir()]


def project(package: Path) -> dict[str, Any]:
    """Return the ``[project]`` table of a package."""
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def module_folder(package: Path) -> Path:
    """Return ``src/<import name>`` of a package."""
    return next(path.parent for path in sorted((package / "src").glob("*/__init__.py")))


def is_engine(package: Path) -> bool:
    """Return whether the package offers engines."""
    return "engine_api.engines" in project(package).get("entry-points", {})
