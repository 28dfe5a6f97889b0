"""Fuzz tests of configurations: one reads back equal, or a ``ConfigError`` names the key."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_api.errors import ConfigError
from engine_trainer.config import DPOConfig, KTOConfig, RewardModelConfig, RLConfig, SFTConfig
from engine_trainer.config.explain import explain
from engine_trainer.config.loading import MAX_BASES, from_tree, load_config, to_plain, to_yaml
from engine_trainer.extensions.functions import require_arguments

CLASSES = (SFTConfig, RLConfig, DPOConfig, KTOConfig, RewardModelConfig)
HEAD = {
    "engine": {"model": {"path": "m"}},
    "data": {"source": "a.jsonl"},
    "run": {"output_dir": "o", "steps": 3},
}
GOOD = {
    SFTConfig: HEAD,
    RLConfig: HEAD | {"reward": {"name": "math"}},
    DPOConfig: HEAD,
    KTOConfig: HEAD,
    RewardModelConfig: HEAD | {"engine": {"model": {"path": "m"}, "model_type": "value_model"}},
}


def keys_of(hint: Any, above: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, sections that may be null included."""
    for part in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(part) and isinstance(part, type):
            for name, inner in get_type_hints(part).items():
                key = f"{above}.{name}" if above else name
                yield key
                yield from keys_of(inner, key)


# A schema with a comment for the keys of the top.
COMMENTED = {"additionalProperties": {"description": "Some text.\nMore: text # of it."}}
KEYS = {cls: sorted(set(keys_of(cls))) for cls in CLASSES}
texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["", "math", "cosine", "fp8", "\ud800", "\0", "${a}", "${run.steps}", "???", "a" * 3000]
    ),
)
scalars = st.one_of(
    texts,
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from([10**400, 2**63, -(2**63) - 1, 10**4000, 1e308]),
)
names = st.one_of(
    texts,
    st.integers(-1, 2),
    st.booleans(),
    st.none(),
    st.sampled_from(["name", "key", "path", "lr", "rewards", "a", "weight"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


def outcome(call):
    """Return the result of a call, or the ``ConfigError`` that it raises.

    Any other exception fails the test.
    """
    try:
        return call()
    except ConfigError as error:
        return error


def assert_good_or_named(cls, found) -> None:
    if isinstance(found, ConfigError):
        assert found.field
        assert found.field in str(found)
        return
    assert isinstance(found, cls)
    text = to_yaml(found)
    text.encode("utf-8")
    again = from_tree(cls, yaml.safe_load(text)) if "${" not in text else found
    assert to_yaml(again) == text, "what is printed reads back equal"
    explained = yaml.safe_load(explain(to_plain(found), COMMENTED))
    assert repr(explained) == repr(yaml.safe_load(text)), "comments change nothing"
    built = outcome(lambda: found.engine.build(seed=0, total_steps=3))
    assert not isinstance(built, ConfigError) or built.field.startswith("engine.")


def put(tree: Any, key: str, value: Any) -> Any:
    """A copy of a tree with a value at a dotted key."""
    name, _, rest = key.partition(".")
    inner = tree.get(name) if isinstance(tree, Mapping) else None
    return {
        **(tree if isinstance(tree, Mapping) else {}),
        name: put(inner, rest, value) if rest else value,
    }


@pytest.mark.slow
@fuzz()
@given(st.sampled_from(CLASSES), st.data())
def test_a_value_of_any_kind_at_any_key_is_taken_or_named(cls, data):
    tree = GOOD[cls]
    for key in data.draw(
        st.lists(st.sampled_from(KEYS[cls]), min_size=1, max_size=3), label="keys"
    ):
        tree = put(tree, key, data.draw(values, label=key))
    assert_good_or_named(cls, outcome(lambda: from_tree(cls, tree)))


ODD_TEXTS = [
    "1",
    "-1",
    "0x_",
    "1e400",
    "9" * 400,
    "9" * 5000,
    ".nan",
    ".inf",
    "true",
    "null",
    "~",
    "on",
    "2024-01-01",
    "1:2:3",
    "[",
    "[1, 2]",
    "{a: 1}",
    "{1: 2}",
    "{true: 1}",
    "{a: 1, a: 2}",
    "{<<: {a: 1}}",
    "&a [*a]",
    "*a",
    "[" * 60 + "]" * 60,
    "[" * 5000,
    "{a: " * 100,
    "!!int abc",
    "!!timestamp x",
    "!!python/object:os.system x",
    "!!binary x",
    "!x y",
    "? a",
    "- 1",
    "a: b",
    "'",
    '"\\ud800"',
    '"\\0"',
    "\udc80",
    "\0",
    "${run.steps}",
    "${nothing}",
    "${",
    "${run}",
    "${oc.env:NOTHING_OF_THIS_NAME}",
    "${" * 300 + "a" + "}" * 300,
    "${oc.decode:'[1'}",
    "???",
    "%",
    "@",
    "`",
    "\t",
]
ODD_KEYS = [
    "",
    ".",
    "..",
    "a..b",
    "[0]",
    "run[0]",
    "run[",
    "run]",
    "run.steps.x",
    "data.source[5]",
    "base",
    "a" * 300,
    "\ud800",
    "\0",
    "a" + ".a" * 5000,
    " ",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A good file of each configuration."""
    folder = tmp_path_factory.mktemp("configs")
    for cls, tree in GOOD.items():
        (folder / f"{cls.__name__}.yaml").write_text(yaml.safe_dump(tree))
    return {cls: folder / f"{cls.__name__}.yaml" for cls in GOOD}


@pytest.mark.slow
@fuzz()
@given(st.sampled_from(CLASSES), st.data())
@example(RLConfig, "run.steps=" + "[" * 100_000)
@example(RLConfig, "run.output_dir=\udc80")
@example(RLConfig, "run.epochs=" + "9" * 400)
@example(RLConfig, "a" + ".a" * 100_000 + "=1")
def test_an_override_of_any_text_is_applied_or_named(files, cls, data):
    if isinstance(data, str):
        overrides = [data]
    else:
        keys = st.one_of(
            st.sampled_from(KEYS[cls]),
            st.sampled_from(KEYS[cls]),
            st.integers(0, len(ODD_KEYS) - 1).map(ODD_KEYS.__getitem__),
        )
        said = st.one_of(
            st.integers(0, len(ODD_TEXTS) - 1).map(ODD_TEXTS.__getitem__), st.text(max_size=5)
        )
        drawn = data.draw(
            st.lists(st.tuples(keys, said, st.sampled_from(["=", "=", "=", ""])), max_size=3),
            label="overrides",
        )
        overrides = [f"{key}{sign}{text}" for key, text, sign in drawn]
    assert_good_or_named(cls, outcome(lambda: load_config(cls, files[cls], overrides)))


@pytest.mark.slow
@fuzz()
@given(
    st.sampled_from(CLASSES),
    st.lists(
        st.tuples(
            st.integers(0, 200),
            st.one_of(st.sampled_from(range(len(ODD_TEXTS))), st.binary(max_size=3)),
        ),
        max_size=4,
    ),
    st.booleans(),
)
@example(SFTConfig, [(0, b"[" * 100_000)], True)
@example(SFTConfig, [(0, b"\n".join(b" " * i + b"a:" for i in range(2000)))], True)
def test_a_file_of_any_text_is_read_or_named(cls, changes, line):
    content = yaml.safe_dump(GOOD[cls]).encode()
    for place, piece in changes:
        text = (
            piece if isinstance(piece, bytes) else ODD_TEXTS[piece].encode("utf-8", "surrogatepass")
        )
        if line:
            content += b"batch_size: " * isinstance(piece, int) + text + b"\n"
        else:
            content = content[:place] + text + content[place:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_bytes(content)
        assert_good_or_named(cls, outcome(lambda: load_config(cls, path)))


def test_aliases_that_multiply_are_refused(tmp_path):
    lines = [
        "x0: &x0 [a, a, a, a, a, a, a, a]",
        *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 8)}]" for i in range(1, 20)),
    ]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    assert isinstance(outcome(lambda: load_config(SFTConfig, tmp_path / "c.yaml")), ConfigError)


BASES = [
    "0.yaml",
    "1.yaml",
    "2.yaml",
    "no.yaml",
    ".",
    "",
    "\0",
    "a" * 5000,
    "???",
    "${run.steps}",
    "${nothing}",
    "\ud800",
    ["0.yaml"],
    {"a": 1},
    3,
    True,
    "loop",
]


@pytest.mark.slow
@fuzz()
@given(
    st.lists(st.integers(0, len(BASES) - 1), min_size=3, max_size=3),
    st.lists(values, min_size=3, max_size=3),
)
@example([6, 3, 3], [None] * 3)
@example([7, 3, 3], [None] * 3)
@example([1, 2, 0], [None] * 3)
def test_files_that_include_others_are_merged_or_named(bases, given_values):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "loop").symlink_to("loop")
        for number, (base, value) in enumerate(zip(bases, given_values, strict=True)):
            tree = {
                "base": BASES[base],
                "batch_size": 8,
                **(HEAD if value is None else put(HEAD, ("data", "run", "eval")[number], value)),
            }
            tree = {name: part for name, part in tree.items() if name != "base" or part != ""}
            Path(folder, f"{number}.yaml").write_text(_written(tree))
        assert_good_or_named(
            SFTConfig, outcome(lambda: load_config(SFTConfig, Path(folder, "0.yaml")))
        )


def _written(tree) -> str:
    try:
        return json.dumps(tree, default=str)  # is YAML, too
    except (TypeError, ValueError):  # an integer of 5000 digits
        return "batch_size: 8"


def test_a_chain_of_files_has_an_end(tmp_path):
    for number in range(MAX_BASES + 5):
        (tmp_path / f"{number}.yaml").write_text(json.dumps({"base": f"{number + 1}.yaml"}))
    (tmp_path / f"{MAX_BASES + 5}.yaml").write_text(json.dumps(HEAD))
    assert load_config(SFTConfig, tmp_path / "10.yaml").run.steps == 3
    with pytest.raises(ConfigError, match=f"more than {MAX_BASES} files"):
        load_config(SFTConfig, tmp_path / "0.yaml")


@fuzz()
@given(
    st.dictionaries(
        st.sampled_from(
            ["key", "function", "sample", "self", "args", "keywords", "positional", "a"]
        ),
        values,
        max_size=3,
    )
)
def test_arguments_of_any_name_reach_a_function_or_are_refused(kwargs):
    def any_of(sample, **given):
        return given

    def none_of(sample):
        return sample

    taken = outcome(lambda: require_arguments(any_of, "reward.function", ["sample"], kwargs))
    assert isinstance(taken, ConfigError) == ("sample" in kwargs)
    refused = outcome(lambda: require_arguments(none_of, "reward.function", ["sample"], kwargs))
    assert isinstance(refused, ConfigError) == bool(kwargs)
