"""An estimate of the size of a configuration's references (``${…}``), made before any is resolved.

A value may be named twice by the next value, and the next value twice by a third one, so that
thirty lines make a billion texts. OmegaConf resolves them without a limit, also where it merges two
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from engine_api.errors import ConfigError

# Largest number of characters that all references of a configuration come to.
LIMIT = 10_000_000
# Number of characters that a key, an element of a list or a step of resolving counts for.
_NODE = 1_000
_OPEN = "${"
# Largest number of references that a key may lead through.
_HOPS = 50
# Resolvers whose argument is a key.
_OF_NODES = ("oc.select", "oc.deprecated", "oc.dict.keys", "oc.dict.values")
# A resolver whose text may have references that are not in the file.
_COMPUTED = ("oc.decode",)
# A part of a key.
_NAME = re.compile(r"[^.\[\]]+")
Path = tuple[str | int, ...]


def check_references(tree: Any) -> None:
    """Raise ``ConfigError`` if the references of a plain tree come to more than ``LIMIT``.

    The references of the tree must be unresolved.
    """
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
        # The value of a computed name may have a computed name itself, and so on. Each of these
        # names needs one more round.
        if rounds >= estimate.computed_names:
            return
        rounds += 1


def _too_much(path: Path) -> ConfigError:
    return ConfigError(
        ".".join(map(str, path)),
        f"the references up to this one come to more than {LIMIT} characters "
        "when they are resolved",
        why="a value is written out once for each reference to it, and so are references in it",
        remedy="write the values out, or name each of them fewer times",
    )


class _Estimate:
    """Upper bounds of the sizes of resolved values, in characters.

    Args:
        tree: plain mappings, lists and scalars.
        computed: the size of a reference whose name is known only when it is resolved.

    Attributes:
        computed_names: the number of such references.
    """

    def __init__(self, tree: Any, computed: int) -> None:
        self.computed_names = 0
        self._tree = tree
        self._computed = computed
        self._known: dict[Path, int] = {}

    def of(self, value: Any, path: Path) -> int:
        """Return the bound of the value at a path.

        The bound is 0 for a value that is being computed: a circle that cannot be resolved.
        """
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
            return 0  # the references among the resolver's arguments are counted separately
        place = None if key is None or key in _COMPUTED else self._find(key, path)
        if place is None:
            self.computed_names += 1
            return self._computed
        return self.of(place[1], place[0])

    def _key(self, text: str, at: int, path: Path) -> tuple[str | None, int]:
        """Return the name that begins at a position of a text, and the position of its end.

        The name is None where it is known only when it is resolved.
        """
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
        """Return the path and the value that a key names, both empty where there is no value.

        Returns None where the value is known only when it is resolved.
        """
        above = len(key) - len(key.lstrip("."))
        names: Path = (*(path[:-above] if above else ()), *_NAME.findall(key))
        here: Path = ()
        value = self._tree
        for name in names:
            if isinstance(value, str):  # the text may be a reference to a section
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
        """Return the path and the value of a text that is one reference as a whole.

        Both are empty for any other text and for a circle. Returns None where the value is known
        only when it is resolved.
        """
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
