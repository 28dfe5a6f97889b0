"""The way from a YAML file and dotted overrides to a typed configuration, and back to YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine_api.errors import ConfigError
from engine_trainer.config.binding import bind
from engine_trainer.config.references import check_references
from engine_trainer.config.secrets import masked, refer

T = TypeVar("T")
# `base: other.yaml` reads that file first. Its path is relative to the file with the key.
BASE = "base"
# Largest number of levels of keys and lists, because YAML's and OmegaConf's parsers are recursive.
MAX_DEPTH = 50
# Largest number of files that one configuration is made of.
MAX_BASES = 20
# OmegaConf's and PyYAML's own errors, the errors of converting a scalar ("0x_", "!!timestamp x"),
# and the errors that their recursion ends in.
_UNREADABLE = (
    OmegaConfBaseException,
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    AssertionError,
)


def load_config(cls: type[T], path: Path | str, overrides: Sequence[str] = ()) -> T:
    """Load ``cls`` from a YAML file, its ``base`` files and ``key.sub=value`` overrides.

    Raises ``ConfigError`` for a file that is missing or not YAML, an unknown key, a value of a
    wrong type, and a mandatory value that is missing.
    """
    return from_tree(cls, read_tree(path, overrides))


def read_tree(path: Path | str, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the values of a YAML file, its ``base`` files and overrides, as they are written.

    Raises ``ConfigError`` for a file that is missing or not YAML.
    """
    tree = _read(Path(path), ())
    for override in overrides:
        _apply(tree, override)
    return tree


def from_tree(cls: type[T], tree: Any) -> T:
    """Build the configuration ``cls`` from a mapping, and resolve its ``${...}`` references."""
    with _refused("?", "the reference cannot be resolved", "correct the ${...} reference"):
        made = OmegaConf.create(tree)
        _check_references(made)
        resolved = OmegaConf.to_container(made, resolve=True)
        plain = refer(resolved, OmegaConf.to_container(made, resolve=False))
    return bind(cls, plain)


def to_plain(config: Any) -> dict[str, Any]:
    """Return the configuration as plain mappings, lists and scalars, without secrets.

    In this form it may be written to files.
    """
    return masked(asdict(config))


def to_yaml(config: Any) -> str:
    """Return the whole configuration, defaults included, as YAML.

    ``load_config`` reads the YAML back to an equal configuration. References stay references.
    Values that are masked (see ``engine_trainer.config.secrets``) must be given again.
    """
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def schema_text(task: str) -> str:
    """Return the JSON schema of the files of ``task``, as an editor's language server reads it.

    The files are made by tools/configuration.py from the dataclasses of this package.
    """
    file = resources.files("engine_trainer.config") / "schemas" / f"{task}.json"
    return file.read_text(encoding="utf-8")


def flatten(tree: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key.

    Lists stay whole.
    """
    if not isinstance(tree, dict):
        return {key: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{key}.{name}" if key else str(name))
    return flat


def _read(path: Path, above: tuple[Path, ...]) -> DictConfig:
    # A loop of links raises RuntimeError.
    with _refused(
        BASE,
        f"{str(path)!r:.200} is not a path to a file",
        "name a YAML file",
        OSError,
        RuntimeError,
    ):
        here = path.resolve()
        there = path.is_file()
    if here in above or len(above) >= MAX_BASES:
        chain = " -> ".join(str(p) for p in (*above, here))
        what = (
            "the files include each other"
            if here in above
            else f"more than {MAX_BASES} files include each other"
        )
        raise ConfigError(BASE, what, why=chain[:2000], remedy="remove one `base`")
    if not there:
        raise ConfigError(
            str(path), "there is no such file", remedy="name a YAML file; recipes/ holds some"
        )
    tree = _parse(path)
    with _refused(BASE, "the reference cannot be resolved", "write a file's path"):
        _check_references(tree)
        base = tree.pop(BASE, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(
            BASE, f"expected a file's path, got {base!r:.100}", remedy="write base: other.yaml"
        )
    below = _read(path.parent / base, (*above, here))
    with _refused(
        str(path),
        f"cannot be merged with {base!r:.100}",
        "give both files the same kind of value at each key",
    ):
        merged = OmegaConf.merge(below, tree)
    assert isinstance(merged, DictConfig)
    return merged


def _parse(path: Path) -> DictConfig:
    with _refused(str(path), "not valid YAML", "correct the file", OSError):
        text = path.read_text(encoding="utf-8")
        _check_yaml(text)
        tree = OmegaConf.create(text) if text.strip() else OmegaConf.create()
    if not isinstance(tree, DictConfig):
        raise ConfigError(str(path), "not a mapping at the top", remedy="write `key: value` lines")
    return tree


def _check_yaml(text: str) -> None:
    """Raise ``ValueError`` for YAML that a recursive parser would fail on.

    The text is read event by event, without recursion.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ValueError(
                f"nested deeper than {MAX_DEPTH} levels, in line {event.start_mark.line + 1}"
            )
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(
                f"the tag {tag!r:.100} in line {event.start_mark.line + 1}: "
                "a configuration has none"
            )


def _apply(tree: DictConfig, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            _shown(override) or "overrides", "not an override", remedy="write key.sub=value"
        )
    remedy = (
        "write key.sub=value with a YAML value; "
        "a text with braces or colons goes into quotes: key='\"…\"'"
    )
    with _refused(_shown(key), "the override cannot be applied", remedy):
        if key.count(".") + key.count("[") > MAX_DEPTH:
            raise ValueError(f"a key of more than {MAX_DEPTH} levels")
        _check_yaml(text)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        assert isinstance(value, dict)
        _check_references(tree)
        # A mapping changes the keys that it has. One without keys removes those that are there,
        # such as the options of another plug-in.
        OmegaConf.update(tree, key, value["value"], merge=value["value"] != {})


def _check_references(tree: DictConfig) -> None:
    """Raise ``ConfigError`` for references that multiply.

    The check must come before any code that may resolve a reference.
    """
    check_references(OmegaConf.to_container(tree, resolve=False))


@contextmanager
def _refused(key: str, what: str, remedy: str, *more: type[Exception]) -> Iterator[None]:
    """Turn the errors of a library into a ``ConfigError`` at ``key``.

    With ``key="?"`` it is the key that OmegaConf names, if it names one.
    """
    try:
        yield
    except (*_UNREADABLE, *more) as error:
        named = str(getattr(error, "full_key", None) or "")
        raise ConfigError(
            _shown(named if key == "?" and named else key),
            what,
            why=_first_line(error),
            remedy=remedy,
        ) from error


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _first_line(error: Exception) -> str:
    """Return a library's message in one line, with the place in a YAML file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return _shown(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}")
    return _shown((str(error).splitlines() or [type(error).__name__])[0])
