"""The recipes that ship with this package: their list, and copies of them to edit.

They are the repository's folder ``recipes``, to which ``engine_trainer/recipes`` is a link in the
tree; a wheel and a source distribution hold the files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.explain import first_sentence
from engine_trainer.config.loading import schema_text

FOLDER = Path(__file__).parents[1] / "recipes"
ALL = "all"
# The folder that commands and paths inside the recipes name.
DEFAULT_FOLDER = Path("recipes")
# A folder with this script is one recipe, and in any other folder each YAML file is one.
SCRIPT = "run.py"
_NAMED = re.compile(r"\brecipes/(?P<path>\w+/\w+\.(?:py|yaml))\b")
_BASE = re.compile(r"^base: (?P<path>\S+)$", re.MULTILINE)
_SCHEMA = re.compile(r"(?<=^# yaml-language-server: \$schema=)\S+/(?P<task>\w+)\.json")


def list_recipes() -> dict[str, str]:
    """Return a sentence about each recipe, by name."""
    found: dict[str, str] = {}
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
        script = folder / SCRIPT
        if script.is_file():
            text = ast.get_docstring(ast.parse(_read(script))) or ""
            found[folder.name] = first_sentence(text)
        else:
            for file in sorted(folder.glob("*.yaml")):
                found[f"{folder.name}/{file.stem}"] = first_sentence(_introduction(file))
    return found


def copy_recipe(name: str, folder: Path) -> dict[Path, str]:
    """Copy a recipe, or ``all`` of them, and the files that it names, to ``folder``.

    Paths inside the copies follow them. The JSON schemas that an editor needs are copied, too.
    Return the command that runs each copied recipe that was asked for, by its file.

    Raises:
        ConfigError: There is no such recipe, or a file in ``folder`` differs from the copy. Then
            nothing is written.
    """
    asked = _files_of(name)
    texts: dict[Path, str] = {}
    for path in _closure(asked):
        text = _read(FOLDER / path)
        if schema := _SCHEMA.search(text):
            task = schema["task"]
            texts[folder / "schemas" / f"{task}.json"] = schema_text(task)
            text = _SCHEMA.sub(f"../schemas/{task}.json", text)
        texts[folder / path] = _NAMED.sub(lambda m: f"{folder.as_posix()}/{m['path']}", text)
    try:
        _write(texts)
    except OSError as error:
        raise ConfigError(
            str(folder),
            "the recipe cannot be copied there",
            why=str(error),
            remedy="name a folder that can be written: engine-train recipes copy NAME FOLDER",
        ) from error
    return {folder / path: command for path in asked if (command := _command(path, folder))}


def _files_of(name: str) -> list[Path]:
    """Return the files of a recipe, of a folder of recipes, or of all."""
    sources = sorted(p for p in FOLDER.glob("*/*") if p.suffix in {".py", ".yaml"})
    files = [path.relative_to(FOLDER) for path in sources]
    wanted = name.removesuffix(".yaml")
    found = [
        path
        for path in files
        if wanted in (ALL, path.parent.as_posix()) or path == Path(f"{wanted}.yaml")
    ]
    if not found:
        raise ConfigError(
            "recipes",
            f"expected a recipe, a folder of recipes or `{ALL}`, got {name!r:.100}",
            remedy=near_matches(wanted, [*list_recipes(), ALL]),
        )
    return found


def _closure(asked: list[Path]) -> Iterator[Path]:
    """Yield the files, their bases, and the files of recipes that they name."""
    todo = list(asked)
    done: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in done or not (FOLDER / path).is_file():
            continue
        done.add(path)
        yield path
        text = _read(FOLDER / path)
        todo += [Path(found["path"]) for found in _NAMED.finditer(text)]
        todo += [path.parent / found["path"] for found in _BASE.finditer(text)]


def _write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        if path.exists() and _read(path) != text:
            raise ConfigError(
                str(path),
                "the file exists and differs from the recipe's",
                remedy="copy to another folder: engine-train recipes copy NAME FOLDER",
            )
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _command(path: Path, folder: Path) -> str | None:
    """Return the command that runs a file, or None for a file that is a part of another recipe."""
    if path.name == SCRIPT:
        return f"python {folder / path}"
    schema = _SCHEMA.search(_read(FOLDER / path))
    if schema is None or (FOLDER / path.parent / SCRIPT).is_file():
        return None
    return f"engine-train {schema['task']} {folder / path}"


def _introduction(file: Path) -> str:
    """Return the first paragraph of a YAML file's comments, without the line for editors."""
    lines = []
    for line in _read(file).splitlines()[1:]:
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    return " ".join(lines)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
