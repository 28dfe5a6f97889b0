"""The configurations that the steps of a run were made with.

``config.yaml`` is that of the newest start. A start with a different configuration keeps the former
one as ``config-until-000120.yaml``, where 120 is the last step that was made with it.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine_api.errors import ConfigError
from engine_api.folders import write_text

CONFIG = "config.yaml"
_FORMER = re.compile(r"config-until-(\d+)\.yaml")


def config_file(folder: Path, step: int) -> Path:
    """Return the file with the configuration that ``step`` of the run in ``folder`` was made with.

    Raises ``ConfigError`` for a folder without ``config.yaml``.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            "RUN",
            f"there is no {folder / CONFIG}",
            why="every run of engine-train writes it to its run.output_dir",
            remedy="name the folder of a run",
        )
    former = _former(folder)
    return next((former[last] for last in sorted(former) if last >= step), folder / CONFIG)


def keep_config(folder: Path, step: int, text: str) -> None:
    """Write ``text`` as the configuration of the steps after ``step``, and keep those before it."""
    if step and (folder / CONFIG).is_file():
        before = config_file(folder, step).read_text(encoding="utf-8")
        if before != text:
            write_text(folder / f"config-until-{step:06d}.yaml", before)
    # Steps after this one are made again, or for the first time.
    for last, path in _former(folder).items():
        if last > step or not step:
            path.unlink()
    write_text(folder / CONFIG, text)


def _former(folder: Path) -> dict[int, Path]:
    """Return the files of former configurations by the last step that was made with each."""
    found = {path: _FORMER.fullmatch(path.name) for path in folder.glob("config-until-*.yaml")}
    return {int(match[1]): path for path, match in found.items() if match}
