"""A configuration as YAML with the meaning and the allowed values of each key above it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES, PAIR_LOSSES, UNPAIRED_LOSSES

WIDTH = 100
# A sentence ends before a capital letter or code. "Dr." at the start of a text, and "eq. 1", end
# none.
_SENTENCE = re.compile(r".{10,}?[.](?=\s+[A-Z`]|$)")
# Values of the types that a key may have in addition to those of a list.
_TYPES = {
    "#/$defs/boolean": ("true", "false"),
    "#/$defs/integer": ("an integer",),
    "#/$defs/number": ("a number",),
}


def explain(
    tree: Mapping[str, Any],
    schema: Mapping[str, Any],
    installed: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return ``tree`` as YAML, with comments from the JSON schema of its file.

    A parser reads the YAML back to an equal tree. ``installed`` has the names that a key may have
    besides those of the schema, by dotted key.
    """
    return "".join(f"{line}\n" for line in _lines(tree, schema, "", installed or {}))


def installed_names() -> dict[str, list[str]]:
    """Return the names of plug-ins, losses and advantages here, by the key that takes them."""
    engines = [row for _, row in EngineRegistry.rows()]
    rollouts = [row for _, row in RolloutRegistry.rows()]
    return {
        "engine.backend": sorted({name for row in engines for name in row.backends}),
        "engine.model_type": sorted({name for row in engines for name in row.model_types}),
        "rollout.name": sorted({name for row in rollouts for name in row.backends}),
        "algorithm.loss": LOSSES.names(),
        "algorithm.advantage": ADVANTAGES.names(),
        "dpo.loss": PAIR_LOSSES.names(),
        "kto.loss": UNPAIRED_LOSSES.names(),
    }


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line."""
    line = " ".join(text.split())
    found = _SENTENCE.match(line)
    return found[0] if found else line


def _about_auto(text: str) -> str:
    """Return the sentence of a text that says what ``auto`` is, or "" where there is none."""
    found = re.search(rf"(?<!\S)`auto` {_SENTENCE.pattern}", " ".join(text.split()))
    return found[0] if found else ""


def _lines(
    tree: Mapping[str, Any],
    schema: Mapping[str, Any],
    above: str,
    installed: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    indent = "  " * above.count(".")
    for key, value in tree.items():
        part = _part(schema, key)
        yield from _comments(part, indent, installed.get(f"{above}{key}", ()), value)
        if isinstance(value, Mapping) and value:
            # The dump of an empty mapping shows how the key is written.
            head = _dump({key: {}}).removesuffix(" {}")
            yield textwrap.indent(head, indent)
            yield from _lines(value, part, f"{above}{key}.", installed)
        else:
            yield textwrap.indent(_dump({key: value}), indent)


def _comments(
    schema: Mapping[str, Any], indent: str, names: Sequence[str], value: Any
) -> Iterator[str]:
    description = schema.get("description", "")
    meaning = first_sentence(description)
    choices = _choices(schema)
    allowed = f"One of: {', '.join(choices)}." if _is_listed(schema) else ""
    installed = f"Installed here: {', '.join(names)}." if names else ""
    # The meaning of the other values is in docs/configuration.md; this one is what a reader has.
    chosen = _about_auto(description) if value == "auto" else ""
    # Where the first sentence is that of `auto`, it says so already.
    for text in filter(None, dict.fromkeys((meaning, allowed, installed, chosen))):
        mark = f"{indent}# "
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False
        )


def _is_listed(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema lists values that a key may have."""
    return "enum" in schema or any(_is_listed(part) for part in schema.get("anyOf", ()))


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """Return the values and types that a key may have as far as the schema lists them."""
    found = [*_TYPES.get(schema.get("$ref", ""), ()), *map(str, schema.get("enum", ()))]
    if schema.get("type") == "null":
        found.append("null")
    for part in schema.get("anyOf", ()):
        found += _choices(part)
    return found


def _part(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a key, or an empty one where the key is a plug-in's own."""
    for part in (schema, *schema.get("anyOf", ())):
        if key in part.get("properties", ()):
            return part["properties"][key]
        if isinstance(more := part.get("additionalProperties"), Mapping):
            return more
    return {}


def _dump(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).removesuffix("\n")
