"""From a YAML file and dotted overrides to a typed configuration, and back to YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine_api.errors import ConfigError
from engine_trainer.binding import bind

T = TypeVar("T")
BASE = "base"  # `base: other.yaml` takes that file first; paths are relative to the file that says so


def load_config(cls: type[T], path: Path | str, overrides: Sequence[str] = ()) -> T:
    """The configuration ``cls`` from a YAML file, its ``base`` files and ``key.sub=value`` overrides.

    Raises ``ConfigError``: file missing or not YAML, key unknown, value of a wrong type, mandatory value missing.
    """
    tree = _read(Path(path), ())
    for override in overrides:
        _apply(tree, override)
    return from_tree(cls, tree)


def from_tree(cls: type[T], tree: Any) -> T:
    """The configuration ``cls`` from a mapping; ``${...}`` references are resolved."""
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error.full_key or "?"), "the reference cannot be resolved", why=_first_line(error),
                          remedy="correct the ${...} reference") from error  # fmt: skip
    return bind(cls, plain)


def to_plain(config: Any) -> dict[str, Any]:
    """The configuration as plain mappings, lists and scalars."""
    return _plain(asdict(config))


def to_yaml(config: Any) -> str:
    """The whole configuration, defaults included, as YAML that ``load_config`` reads back to an equal one."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def flatten(tree: Any, key: str = "") -> dict[str, Any]:
    """Dotted key → scalar (lists stay whole)."""
    if not isinstance(tree, dict):
        return {key: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{key}.{name}" if key else str(name))
    return flat


def _read(path: Path, above: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in above:
        chain = " -> ".join(str(p) for p in (*above, path.resolve()))
        raise ConfigError(BASE, "the files include each other", why=chain, remedy="remove one `base`")
    tree = _parse(path)
    base = tree.pop(BASE, None)
    if base is None:
        return tree
    merged = OmegaConf.merge(_read(path.parent / str(base), (*above, path.resolve())), tree)
    assert isinstance(merged, DictConfig)
    return merged


def _parse(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file", remedy="name a YAML file; recipes/ holds some")
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), "not valid YAML", why=" ".join(str(error).split()), remedy="correct the file"
        ) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(str(path), "not a mapping at the top", remedy="write `key: value` lines")
    return tree


def _apply(tree: DictConfig, override: str) -> None:
    key, separator, _ = override.partition("=")
    if not separator or not key:
        raise ConfigError(override, "not an override", remedy="write key.sub=value")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={override[len(key) + 1 :]}"]))
        assert isinstance(value, dict)
        OmegaConf.update(tree, key, value["value"], merge=True)
    except (yaml.YAMLError, OmegaConfBaseException, TypeError, IndexError) as error:
        raise ConfigError(key, "the override cannot be applied", why=_first_line(error),
                          remedy="write key.sub=value with a YAML value; a text with braces or colons goes into quotes: key='\"…\"'") from error  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
