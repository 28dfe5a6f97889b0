"""References of a configuration (``${…}``) that would grow without end, and their refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_api.errors import ConfigError
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import from_tree, load_config
from engine_trainer.config.references import LIMIT

HEAD = {
    "engine": {"model": {"path": "m"}},
    "data": {"source": "a.jsonl"},
    "run": {"output_dir": "o", "steps": 3},
}
DEEP = 40  # 2**40 of anything is more than a machine has, in time or memory


def chain(first, following, length: int = DEEP) -> dict:
    """Build a chain of values from ``first``, the value of ``a0``.

    ``following`` maps the name of a value to the next value.
    """
    return {"a0": first} | {f"a{i}": following(f"x.a{i - 1}") for i in range(1, length)}


BOMBS = {
    "text": chain("y", lambda name: f"${{{name}}}${{{name}}}"),
    "lists": chain([1], lambda name: [f"${{{name}}}"] * 2),
    "sections": chain({"q": 1}, lambda name: {"l": f"${{{name}}}", "r": f"${{{name}}}"}),
    "spaces": chain("y", lambda name: f"${{ {name} }}${{ {name} }}"),
    "brackets": chain("y", lambda name: "".join([f"${{x[{name[2:]}]}}"] * 2)),
    "relative": chain("y", lambda name: "".join([f"${{.{name[2:]}}}"] * 2)),
    "selected": chain("y", lambda name: f"${{oc.select:{name}}}${{oc.select:{name}}}"),
    "quoted": chain("y", lambda name: f"${{oc.select:'{name}'}}${{oc.select:\"{name}\"}}"),
    "decoded": chain("y", lambda name: f"${{oc.decode:'${{{name}}}'}}${{oc.decode:'${{{name}}}'}}"),
    "named by another": {
        "n": "x",
        **chain("y", lambda name: f"${{${{x.n}}.{name[2:]}}}${{${{x.n}}.{name[2:]}}}"),
    },
    "through a section": chain("y", lambda name: f"${{s.{name[2:]}}}${{s.{name[2:]}}}"),
    "through a computed section": chain("y", lambda name: f"${{d.{name[2:]}}}${{d.{name[2:]}}}"),
    "one long text": {
        "a0": "y" * (LIMIT // 100),
        **{f"a{i}": "${x.a0}" * 10 for i in range(1, 20)},
    },
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_references_that_multiply_are_refused_wherever_they_would_be_resolved(
    tmp_path, bomb
) -> None:
    tree = HEAD | {"x": bomb, "s": "${x}", "d": "${oc.decode:'${x}'}"}
    tree = json.loads(json.dumps(tree))
    with pytest.raises(ConfigError, match="references") as caught:
        from_tree(SFTConfig, tree)
    assert caught.value.field.startswith("x")
    files = {
        "alone.yaml": tree,
        "head.yaml": HEAD,
        "above.yaml": {"base": "alone.yaml", "x": {f"a{DEEP - 1}": "z"}},
        "named.yaml": {**tree, "base": f"${{x.a{len(bomb) - 2}}}"},
    }
    for name, content in files.items():
        Path(tmp_path, name).write_text(json.dumps(content))
    for name in ("alone.yaml", "above.yaml", "named.yaml"):
        with pytest.raises(ConfigError, match="references"):
            load_config(SFTConfig, tmp_path / name)
    with pytest.raises(ConfigError, match="references"):
        load_config(
            SFTConfig, tmp_path / "head.yaml", [f"{key}={json.dumps(tree[key])}" for key in "sdx"]
        )


@pytest.mark.parametrize(
    "tree",
    [
        {"x": "${y}", "y": "${x}"},
        {"x": {"a": "${x}"}},
        {"x": "${oc.decode:'${x}'}"},
        {"x": {"l": "${y}", "r": "${y}"}, "y": {"l": "${x}", "r": "${x}"}},
        {"x": "${y}${y}", "y": "${x}${x}"},
        {"x": "${oc.dict.values:x}"},
        {"x": ["${x}"]},
    ],
    ids=str,
)
def test_references_in_a_circle_are_refused(tree) -> None:
    with pytest.raises(ConfigError, match="resolved"):
        from_tree(SFTConfig, HEAD | tree)


def test_references_that_people_write_are_resolved(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DATA", "b.jsonl")
    tree = {
        "engine": {"model": {"path": "models/${data.tokenizer}"}},
        "data": {"source": ["${oc.env:DATA}"] * 500, "tokenizer": "t"},
        "eval": {
            "source": "${data.source[0]}",
            "max_problems": "${run.steps}",
            "every": "${.max_problems}",
        },
        "run": {
            "output_dir": "${engine.model.path}/${oc.env:NOT_THERE,${data.tokenizer}}",
            "steps": 3,
            "seed": "${oc.select:run.steps}",
        },
    }
    config = from_tree(SFTConfig, tree)
    assert config.run.output_dir == "models/t/t"
    assert (config.run.seed, config.eval.every, config.eval.source) == (3, 3, "b.jsonl")
    assert config.data.source == ["b.jsonl"] * 500
