"""Write docs/configuration.md and the JSON schemas from the configuration's dataclasses.

Each field's meaning is the string beneath it in the source. The schemas lie in
packages/trainer/src/engine_trainer/config/schemas, ship in the wheel, and are printed by
`engine-train schema TASK`. With ``--check``, check that all files are current instead.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from matrix import ROOT, table, write_or_check

from engine_trainer.cli import CONFIGS
from engine_trainer.config.combined_reward import RewardPart

PAGE = ROOT / "docs" / "configuration.md"
SCHEMAS = ROOT / "packages/trainer/src/engine_trainer/config/schemas"
# RL comes first: it has most sections, and the page has their order.
TASKS = dict(sorted(CONFIGS.items(), key=lambda item: item[0] != "rl"))
# `eval` takes the files of `rl`, and leaves these sections unread.
UNREAD = {"eval": {"algorithm", "ray", "overlap"}}
# Descriptors of this repository whose plug-ins have options of their own, by the section above.
PLUGINS = {
    "engine": (
        "engine_automodel.plugin:PLUGIN",
        "engine_fsdp.plugin:PLUGIN",
        "engine_megatron.plugin:PLUGIN",
        "engine_npu.plugin:MINDSPEED",
        "engine_torchtitan.plugin:PLUGIN",
        "engine_veomni.plugin:PLUGIN",
    ),
    "rollout": ("rollout_fp8.plugin:VLLM", "rollout_fp8.plugin:SGLANG"),
}
SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
# Any value may be a reference, or OmegaConf's mark of a value that is still to be given.
REFERENCE = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
DEFINITIONS = {"reference": REFERENCE} | {
    name: {"anyOf": [{"type": name}, {"$ref": "#/$defs/reference"}]}
    for name in ("boolean", "integer", "number")
}
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
INTRODUCTION = """\
# Configuration

<!-- Generated from the configuration's dataclasses by tools/configuration.py: change the text \
beneath their fields. -->

These are all keys of the YAML files that `engine-train` reads. A command line overrides any of
them as `section.key=value`. An unknown key is an error that names the nearest known ones.

- `base: other.yaml` at the top of a file reads that file first. Its path is relative to the file.
- `${section.key}` takes the value of another key, and `${oc.env:NAME}` an environment variable.
- `engine-train TASK FILE --print-config` prints every value that a run would have, with meaning
  and allowed values. `engine-train recipes` lists files to begin with.
- An editor with a YAML language server completes and checks a file whose first line is
  `# yaml-language-server: $schema=rl.json`, after `engine-train schema rl > rl.json`.

**required** stands where a key has no default.
"""


@dataclass(frozen=True)
class Key:
    """A key of a section, as some tasks have it."""

    name: str
    kind: str
    default: str
    meaning: str


def main() -> int:
    """Write or check the page and the schemas, and return the exit status."""
    files = {PAGE: render()}
    for task, cls in TASKS.items():
        text = json.dumps(schema_of_task(task, cls), indent=2, ensure_ascii=False)
        files[SCHEMAS / f"{task}.json"] = f"{text}\n"
    return max(write_or_check(path, text, "configuration.py") for path, text in files.items())


def render() -> str:
    """Return the whole page."""
    classes: dict[str, dict[str, type]] = {}
    for task, cls in TASKS.items():
        for section, part in sections_of(cls):
            if section.split(".")[0] not in UNREAD.get(task, ()):
                classes.setdefault(section, {})[task] = part
    parts = [INTRODUCTION, render_tasks(classes)]
    for section, by_task in classes.items():
        parts.append(render_section(section, by_task))
        if section == "reward":
            about = f"{docstring_of(RewardPart)} It stands in the list of `reward.name: combine`."
            parts.append(render_keys("reward.kwargs.rewards[]", about, keys_of(RewardPart)))
        parts += [render_plugin(section, target) for target in PLUGINS.get(section, ())]
    return "\n".join(parts)


def render_tasks(classes: Mapping[str, Mapping[str, type]]) -> str:
    """Return the table of top-level sections and the tasks that read them."""
    head = ("section", *(f"`{task}`" for task in TASKS))
    top = [section for section in classes if section and not {".", "["} & set(section)]
    rows = [
        (
            f"[`{section}`](#{anchor_of(section)})",
            *("✓" if task in classes[section] else "" for task in TASKS),
        )
        for section in top
    ]
    return table(head, rows)


def render_section(section: str, by_task: Mapping[str, type]) -> str:
    """Return a section's heading and its table.

    A key that tasks have differently, or that only some of them have, has a row for each form that
    names these tasks.
    """
    forms: dict[Key, list[str]] = {}
    for task, cls in by_task.items():
        for key in keys_of(cls):
            forms.setdefault(key, []).append(task)
    order = list(dict.fromkeys(key.name for key in forms))
    keys = [
        key
        if len(tasks) == len(by_task)
        else replace(key, meaning=f"*({', '.join(sorted(tasks))})* {key.meaning}")
        for key, tasks in sorted(forms.items(), key=lambda item: order.index(item[0].name))
    ]
    classes = set(by_task.values())
    # A class that refines another one of the section has the same purpose.
    about = sorted(docstring_of(cls) for cls in classes if not classes & set(cls.__mro__[1:]))
    if not section:
        about = ["These keys stand in no section."]
    elif len(by_task) < len(TASKS):
        about.append(f"Read by {', '.join(f'`{task}`' for task in sorted(by_task))}.")
    return render_keys(section, " ".join(about), keys)


def render_plugin(section: str, target: str) -> str:
    """Return the table of the options that a plug-in of this repository declares."""
    plugin = load(target)
    backends = ", ".join(
        f"`{name}`" for name in dict.fromkeys(name for row in plugin.rows for name in row.backends)
    )
    cls = load(plugin.options)
    name = "backend" if section == "engine" else "name"
    about = f"Options of {plugin.name}, with `{section}.{name}` {backends}."
    return render_keys(f"{section}.options, {plugin.name}", about, keys_of(cls))


def render_keys(title: str, about: str, keys: Iterable[Key]) -> str:
    """Return a heading, a paragraph and a table of keys."""
    rows = [(f"`{key.name}`", key.kind, key.default, key.meaning) for key in keys]
    level = "##" if not {".", "["} & set(title) else "###"
    body = table(("key", "value", "default", "meaning"), rows) if rows else ""
    return f"{level} {title or 'Top level'}\n\n{about}\n\n{body}"


def anchor_of(title: str) -> str:
    """Return the anchor of a heading."""
    return title.replace(".", "").replace("[]", "")


def sections_of(cls: type, section: str = "") -> Iterator[tuple[str, type]]:
    """Yield each section of a configuration and its class, a section before those below it."""
    yield section, cls
    hints = get_type_hints(cls)
    for field in fields(cls):
        name = f"{section}.{field.name}" if section else field.name
        hint = hints[field.name]
        for part in dataclasses_in(hint):
            if part is not cls:
                yield from sections_of(part, f"{name}{suffix_of(hint)}")


def dataclasses_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a type is made of."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from dataclasses_in(part)


def suffix_of(hint: Any) -> str:
    """Return how a key continues to the sections in it: below a name, in a list, or directly."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(filter(None, map(suffix_of, get_args(hint))), "")
    return {Mapping: ".NAME", Sequence: "[]", list: "[]"}.get(get_origin(hint), "")


def keys_of(cls: type) -> list[Key]:
    """Return the keys of a section."""
    hints = get_type_hints(cls)
    meanings = meanings_of(cls)
    return [
        Key(field.name, kind_of(hints[field.name]), default_of(field), meanings[field.name])
        for field in fields(cls)
        if field.init
    ]


def kind_of(hint: Any) -> str:
    """Return the values of a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(kind_of, arguments))
    if is_dataclass(hint):
        return "section"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(map(kind_of, arguments))}"
    if origin in (list, Sequence):
        return f"list of {kind_of(arguments[0])}s" if is_dataclass(arguments[0]) else "list"
    if origin is Mapping:
        return "mapping"
    return "any" if hint is Any else WORDS[hint]


def default_of(field: Field[Any]) -> str:
    """Return a field's default in YAML, empty for a section with defaults of its own."""
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "**required**"
    return "" if is_dataclass(value) else f"`{json.dumps(plain(value), ensure_ascii=False)}`"


def plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


@cache
def meanings_of(cls: type) -> dict[str, str]:
    """Return the meaning of each field on one line, inherited fields included.

    Raises ``SystemExit`` for a field without one.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in pairwise(body.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = to_markdown(text)
    for field in fields(cls):
        if field.name not in found:
            sys.exit(f"{cls.__module__}.{cls.__qualname__}.{field.name}: no text beneath the field")
    return found


def docstring_of(cls: type) -> str:
    """Return a class's docstring on one line."""
    return to_markdown(inspect.getdoc(cls) or "")


def to_markdown(text: str) -> str:
    """Return a docstring as one line of Markdown that a cell of a table can hold."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def load(target: str) -> Any:
    """Return what ``module:name`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def schema_of_task(task: str, cls: type) -> dict[str, Any]:
    """Return the JSON schema of a task's files.

    No key is required, since a file may leave keys to its base and to the command line.
    """
    schema = schema_of(cls)
    base = {"type": "string", "description": "File that is read first, relative to this file."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"engine-train {task}",
        **schema,
        "properties": {"base": base, **schema["properties"]},
        "$defs": DEFINITIONS,
    }


def schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    reference = {"$ref": "#/$defs/reference"}
    if hint is Any:
        return {}
    if is_dataclass(hint) and isinstance(hint, type):
        return {
            "type": "object",
            "additionalProperties": False,
            "description": docstring_of(hint),
            "properties": properties_of(hint),
        }
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(part) for part in arguments]}
    if origin is Literal:
        return {"anyOf": [{"enum": list(arguments)}, reference]}
    if origin is tuple:
        items = {"prefixItems": [schema_of(part) for part in arguments]}
        sizes = {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"anyOf": [{"type": "array", **items, **sizes}, reference]}
    if origin in (list, Sequence):
        return {"anyOf": [{"type": "array", "items": schema_of(arguments[0])}, reference]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    name = SCALARS[hint]
    return {"$ref": f"#/$defs/{name}"} if name in DEFINITIONS else {"type": name}


def properties_of(cls: type) -> dict[str, Any]:
    """Return the JSON schemas of a section's keys, with meanings and defaults."""
    hints = get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in fields(cls):
        schema = schema_of(hints[field.name]) | {"description": meanings_of(cls)[field.name]}
        if field.default is not MISSING:
            schema["default"] = plain(field.default)
        found[field.name] = schema
    return found


if __name__ == "__main__":
    sys.exit(main())
