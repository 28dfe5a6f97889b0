"""Packages that tests install: metadata with entry points, and a module, in a folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES


def install(
    folder: Path, name: str, entries: Mapping[str, Mapping[str, str]], code: str = ""
) -> Path:
    """Write the distribution ``name`` with entry points by group, and its module.

    The module's name is that of the distribution. Returns the folder for the path.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in found.items())
        for group, found in entries.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    if code:
        (folder / f"{name}.py").write_text(code)
    forget()
    return folder


def forget() -> None:
    """Forget what was read from packages before."""
    importlib.invalidate_caches()
    LOSSES.forget()
    ADVANTAGES.forget()
