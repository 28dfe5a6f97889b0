"""How much the references of a configuration (``${…}``) come to, estimated before anything resolves one.

A value may be named twice by the next one, and that one twice again: thirty lines make a billion texts. OmegaConf resolves
them without a limit, also where it merges two files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from engine_api.errors import ConfigError

LIMIT = 10_000_000  # characters that all references of a configuration come to
_NODE = 1_000  # characters that a key, a list's element or a step of resolving is worth
_OPEN = "${"
_HOPS = 50  # references that a key may lead through
_OF_NODES = (
    "oc.select",
    "oc.deprecated",
    "oc.dict.keys",
    "oc.dict.values",
)  # resolvers whose argument is a key
_COMPUTED = ("oc.decode",)  # its text may have references that stand nowhere in the file
_NAME = re.compile(r"[^.\[\]]+")  # a part of a key
Path = tuple[str | int, ...]


def check_references(tree: Any) -> None:
    """Raise ``ConfigError`` where the references of a plain, unresolved tree come to more than ``LIMIT``."""
    computed = 0
    rounds = 0
    while True:
        estimate = _Estimate(tree, computed)
        computed = 0
        for path, text in _texts(tree):
            if _OPEN in text:
                computed += estimate.of(text, path)
                if computed > LIMIT:
                    raise _too_much(path)
        # What a computed name leads to may have a computed name itself, and so on: each of them once.
        if rounds >= estimate.computed_names:
            return
        rounds += 1


def _too_much(path: Path) -> ConfigError:
    return ConfigError(
        ".".join(map(str, path)),
        f"the references up to this one come to more than {LIMIT} characters when they are resolved",
        why="a value that is named several times is written out as often, and so is what names it",
        remedy="write the values out, or name each of them fewer times",
    )


class _Estimate:
    """Upper bounds of what values come to.

    Args:
        tree: plain mappings, lists and scalars.
        computed: what a reference comes to whose name is known only when it is resolved.

    Attributes:
        computed_names: how many of those there are.
    """

    def __init__(self, tree: Any, computed: int) -> None:
        self.computed_names = 0
        self._tree = tree
        self._computed = computed
        self._known: dict[Path, int] = {}

    def of(self, value: Any, path: Path) -> int:
        """Return the bound of the value at a path; 0 for one that is being asked for, a circle that cannot be resolved."""
        if path not in self._known:
            self._known[path] = 0
            self._known[path] = self._sum(value, path)
        return self._known[path]

    def _sum(self, value: Any, path: Path) -> int:
        if not isinstance(value, str):
            return _NODE + sum(self.of(part, (*path, name)) for name, part in _parts(value))
        openings = re.finditer(re.escape(_OPEN), value)
        return (
            _NODE
            + len(value)
            + sum(_NODE + self._reference(value, found.end(), path) for found in openings)
        )

    def _reference(self, text: str, start: int, path: Path) -> int:
        key, end = self._key(text, start, path)
        if key in _OF_NODES and text[end : end + 1] == ":":
            key, end = self._key(text, end + 1, path)
        elif key is not None and key not in _COMPUTED and text[end : end + 1] == ":":
            return 0  # the references among its arguments are counted for themselves
        place = None if key is None or key in _COMPUTED else self._find(key, path)
        if place is None:
            self.computed_names += 1
            return self._computed
        return self.of(place[1], place[0])

    def _key(self, text: str, at: int, path: Path) -> tuple[str | None, int]:
        """Return the name that begins at a place of a text, and where it ends; None where it is known only later."""
        name = ""
        while at < len(text) and text[at] not in "},:":
            if not text.startswith(_OPEN, at):
                name += text[at]
                at += 1
                continue
            inner, at = self._key(text, at + len(_OPEN), path)
            place = None if inner is None else self._find(inner, path)
            if (
                text[at : at + 1] != "}"
                or place is None
                or not isinstance(place[1], str | int)
                or _OPEN in str(place[1])
            ):
                return None, at
            name += str(place[1])
            at += 1
        return name.strip(" \t'\""), at

    def _find(self, key: str, path: Path, hops: int = 0) -> tuple[Path, Any] | None:
        """Return path and value that a key names, both empty where nothing is; None where that is known only later."""
        above = len(key) - len(key.lstrip("."))
        names: Path = (*(path[:-above] if above else ()), *_NAME.findall(key))
        here: Path = ()
        value = self._tree
        for name in names:
            if isinstance(value, str):  # a section that stands elsewhere
                place = self._section(value, here, hops + 1)
                if place is None:
                    return None
                here, value = place
            wanted = str(name).strip(" \t'\"")
            found = next((known for known, _ in _parts(value) if str(known) == wanted), None)
            if found is None:
                return (), None
            here, value = (*here, found), value[found]
        return here, value

    def _section(self, text: str, path: Path, hops: int) -> tuple[Path, Any] | None:
        """Return what a text refers to that is a reference as a whole; empty for any other, and for a circle."""
        text = text.strip()
        if not text.startswith(_OPEN) or hops > _HOPS:
            return (), None
        key, end = self._key(text, len(_OPEN), path)
        if key is None or text[end:] != "}":
            return None
        place = self._find(key, path, hops)
        return (
            self._section(place[1], place[0], hops + 1)
            if place and isinstance(place[1], str)
            else place
        )


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    for name, part in _parts(value):
        yield from _texts(part, (*path, name))
