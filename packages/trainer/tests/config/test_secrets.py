"""Secrets of who runs it: used, and written nowhere."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rl_runs import tree

from engine_api.errors import ConfigError
from engine_trainer.cli import main
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree, load_config, to_plain, to_yaml
from engine_trainer.config.secrets import MASK, ReferenceText, masked
from engine_trainer.run.checkpoints import compare, fingerprint

# Each goes another way into the configuration.
SECRETS = {
    "FROM_ENVIRONMENT": "hunter2-environment",
    "BY_REFERENCE": "hunter2-reference",
    "IN_A_SECTION": "hunter2-section",
    "IN_A_LIST": "hunter2-list",
    "ON_THE_COMMAND_LINE": "hunter2-override",
    "WITHIN_A_TEXT": "hunter2-within",
}
LITERAL = "hunter2-literal"
LOGIN = "hunter2-login"

REWARD = """
import os

EXPECTED = {expected!r}

def score(sample, **given):
    assert given == EXPECTED, "it is given the values themselves"
    return sample.completion.count("7") / 4
"""


@pytest.fixture
def environment(monkeypatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


KWARGS = {
    "header": "${oc.env:FROM_ENVIRONMENT}",
    "again": "${reward.kwargs.section.inner}",
    "section": {"inner": "${oc.env:BY_REFERENCE}", "more": {"deep": "${oc.env:IN_A_SECTION}"}},
    "copied": "${reward.kwargs.section}",
    "several": ["a", "${oc.env:IN_A_LIST}"],
    "url": f"https://me:{LOGIN}@judge.example/v1",
    "text": "Bearer ${oc.env:WITHIN_A_TEXT}",
    "api_key": LITERAL,
    "Password": LITERAL,
}
SECTION = {"inner": SECRETS["BY_REFERENCE"], "more": {"deep": SECRETS["IN_A_SECTION"]}}
GIVEN = {
    "header": SECRETS["FROM_ENVIRONMENT"],
    "again": SECRETS["BY_REFERENCE"],
    "section": SECTION,
    "copied": SECTION,
    "several": ["a", SECRETS["IN_A_LIST"]],
    "url": KWARGS["url"],
    "text": f"Bearer {SECRETS['WITHIN_A_TEXT']}",
    "api_key": LITERAL,
    "Password": LITERAL,
    "late": SECRETS["ON_THE_COMMAND_LINE"],
}
OVERRIDE = "reward.kwargs.late=${oc.env:ON_THE_COMMAND_LINE}"


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where one of them stands, in any file below ``folder`` or in the texts."""
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert contents
    contents |= {f"text {i}": text.encode() for i, text in enumerate(texts)}
    words = [word.encode() for word in (*SECRETS.values(), LITERAL, LOGIN)]
    return [
        f"{name}: {word}" for name, content in contents.items() for word in words if word in content
    ]


@pytest.fixture
def board(monkeypatch) -> list[dict]:
    """What wandb, which needs a service, is given."""
    given: list[dict] = []
    run = SimpleNamespace(id="abc", log=lambda *a, **k: None, finish=lambda: None)
    package = SimpleNamespace(init=lambda **kw: given.append(kw) or run, Table=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return given


@pytest.mark.parametrize("task", ["sft", "rl"])
def test_no_secret_is_in_what_a_run_writes_or_says(
    sums_model, tmp_path, environment, board, task, capfd, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "score.py").write_text(REWARD.format(expected=GIVEN))
    section = {
        "name": None,
        "function": f"{tmp_path}/score.py:score",
        "kwargs": KWARGS,
        "workers": 1,
        "timeout_s": 60.0,
    }
    run = {
        "tensorboard": True,
        "report": True,
        "wandb": "p",
        "save_every": 1,
        "steps": 2,
        "progress": True,
    }
    held_out = {"source": str(sums_model / "test.jsonl"), "every": 1, "max_problems": 4}
    config = tree(sums_model, tmp_path / "out", reward=section, run=run, eval=held_out)
    if task == "sft":
        del config["algorithm"]
        config |= {"batch_size": 8}
        config["data"]["columns"] = {"response": "answer"}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main([task, str(file), OVERRIDE]) == 0
    # The second run has nothing left to do, and only compares its configuration.
    assert main([task, str(file), OVERRIDE]) == 0
    said = capfd.readouterr()
    (tmp_path / "score.py").unlink()  # it holds them itself
    assert board
    assert leaks(tmp_path / "out", said.out, said.err, caplog.text, repr(board)) == []
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["reward"]["kwargs"]
    assert written == KWARGS | {
        "url": "https://***@judge.example/v1",
        "api_key": MASK,
        "Password": MASK,
        "late": "${oc.env:ON_THE_COMMAND_LINE}",
        "copied": {
            "inner": "${reward.kwargs.section.inner}",
            "more": {"deep": "${reward.kwargs.section.more.deep}"},
        },
    }


def test_no_secret_is_printed_with_the_configuration(
    sums_model, tmp_path, environment, capfd
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree(sums_model, tmp_path / "out", reward={"kwargs": KWARGS})))
    assert main(["rl", str(file), "--print-config", OVERRIDE]) == 0
    said = capfd.readouterr()
    assert leaks(tmp_path, said.out, said.err) == [
        f"{file}: {word.encode()}" for word in (LITERAL, LOGIN)
    ]
    assert "${oc.env:FROM_ENVIRONMENT}" in said.out


@pytest.mark.parametrize(
    ("reward", "overrides"),
    [
        ({"name": "exact", "kwargs": KWARGS}, []),
        ({"name": "combine", "kwargs": {"rewards": [{"kwargs": KWARGS}]}}, []),
        ({"name": "exact", "kwargs": {}}, ["reward.timeout_s=${oc.env:FROM_ENVIRONMENT}"]),
        (
            {"name": "exact", "kwargs": {}},
            ["run.resume=never", "rollout.quantization=${oc.env:FROM_ENVIRONMENT}"],
        ),
        (
            {"name": "exact", "kwargs": {}},
            ["rollout.options.api_key=hunter2-literal", "rollout.options.no_such=1"],
        ),
        ({"name": "exact", "kwargs": {}}, ["data.columns.token=hunter2-literal"]),
    ],
)
def test_no_secret_is_in_an_error(
    sums_model, tmp_path, environment, reward, overrides, capfd
) -> None:
    reward = {"name": None, "workers": 1, "timeout_s": 60.0} | reward
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree(sums_model, tmp_path / "out", reward=reward)))
    assert main(["rl", str(file), *overrides]) != 0
    said = capfd.readouterr()
    file.unlink()
    (tmp_path / "nothing").touch()
    assert "to do:" in said.err
    assert leaks(tmp_path, said.out, said.err) == []


def test_what_is_written_is_read_back(sums_model, tmp_path, environment) -> None:
    kwargs = {
        name: value for name, value in KWARGS.items() if name not in ("api_key", "Password", "url")
    }
    config = from_tree(RLConfig, tree(sums_model, tmp_path / "out", reward={"kwargs": kwargs}))
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(RLConfig, tmp_path / "again.yaml") == config


def test_a_referred_text_is_its_value_and_stays_referred(sums_model, tmp_path, environment) -> None:
    value = ReferenceText("hunter2", "${oc.env:X}")
    assert (value, f"{value}", f"{value}-a", {value: 1}["hunter2"]) == (
        "hunter2",
        "hunter2",
        "hunter2-a",
        1,
    )
    for other in (copy.deepcopy(value), copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert (other, repr(other), other.reference) == ("hunter2", "'${oc.env:X}'", "${oc.env:X}")
    config = from_tree(RLConfig, tree(sums_model, tmp_path / "out", reward={"kwargs": KWARGS}))
    assert (
        leaks(
            sums_model,
            repr(config.reward.kwargs["header"]),
            str(to_plain(pickle.loads(pickle.dumps(config)))),
        )
        == []
    )


def test_a_change_of_what_a_reference_names_is_seen_where_nothing_may_change(
    sums_model, tmp_path, monkeypatch
) -> None:
    def print_of(data: str) -> dict:
        monkeypatch.setenv("DATA", data)
        given = tree(
            sums_model,
            tmp_path / "out",
            data={"source": ["${oc.env:DATA}"], "system_prompt": "${oc.env:DATA}"},
        )
        return fingerprint(from_tree(RLConfig, given))

    then = print_of("a.jsonl")
    assert compare(then, print_of("a.jsonl"), "here") == []
    with pytest.raises(ConfigError, match=r"data\.source: .*oc\.env:DATA.*SHA-256"):
        compare(then, print_of("b.jsonl"), "here")
    assert "a.jsonl" not in str(then)


def test_a_secret_is_known_by_a_whole_word_of_its_name() -> None:
    kept = {
        "eos_token": "<eos>",
        "tokenizer": "x",
        "maxTokenizer": "x",
        "author": "x",
        "monkey": "x",
        "max_new_tokens": 3,
        "max_tokens": "auto",
        "num_speculative_tokens": "4",
        "key": "",
    }
    assert masked(kept) == kept
    names = [
        "key",
        "api_key",
        "API-KEY",
        "apikey",
        "hf_token",
        "tokens",
        "client_secret",
        "Password",
        "credentials",
    ]
    names += [
        "Authorization",
        "Proxy-Authorization",
        "bearer",
        "Cookie",
        "apiKey",
        "accessToken",
        "HFToken",
    ]
    assert masked(dict.fromkeys(names, "x")) == dict.fromkeys(names, MASK)
    assert masked({"keys": ["x", {"a": "x"}]}) == {"keys": [MASK, {"a": "x"}]}
