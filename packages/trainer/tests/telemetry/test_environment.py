"""The environment that a run keeps: what it says, and that it says no secret."""

from __future__ import annotations

import json
import subprocess

import pytest

from engine_trainer.config.secrets import ReferenceText
from engine_trainer.errors import DataError
from engine_trainer.telemetry.environment import (
    FILE,
    command_line,
    commit,
    describe_start,
    read_starts,
    record,
    versions,
)


def start(after: int = 0, model: str = "model"):
    return describe_start(
        task="rl",
        after=after,
        steps=40,
        ranks=2,
        launcher="none",
        backend="fsdp2",
        device="cpu",
        model=model,
        resolved={"model.attention": "sdpa"},
    )


def test_a_start_has_versions_hardware_and_command(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["/venv/bin/engine-train", "rl", "a b.yaml", "run.steps=40"])
    monkeypatch.chdir(tmp_path)
    found = start()
    assert found.command == "engine-train rl 'a b.yaml' run.steps=40"
    assert {"python", "torch", "engine-trainer", "engine-fsdp"} <= found.versions.keys()
    assert found.versions == versions()
    assert any("core" in part for part in found.hardware)
    assert found.date.endswith("+00:00")


def test_a_model_from_the_environment_is_written_as_its_reference(tmp_path):
    record(tmp_path, start(model=ReferenceText("/home/me/model", "${oc.env:MODEL}")))
    assert read_starts(tmp_path)[0].model == "${oc.env:MODEL}"
    assert "/home/me" not in (tmp_path / FILE).read_text()


def test_a_file_of_another_version_is_replaced_with_a_warning(tmp_path, caplog):
    (tmp_path / FILE).write_text("[{}]")
    record(tmp_path, start(after=3))
    assert [row.after for row in read_starts(tmp_path)] == [3]
    assert "earlier starts are not known" in caplog.text


def test_a_resumed_run_adds_a_start_and_a_new_run_begins_the_file(tmp_path):
    record(tmp_path, start())
    record(tmp_path, start(after=20))
    assert [row.after for row in read_starts(tmp_path)] == [0, 20]
    record(tmp_path, start())
    assert [row.after for row in read_starts(tmp_path)] == [0]


def test_a_file_that_is_none_of_starts_is_named(tmp_path):
    assert read_starts(tmp_path) == []
    (tmp_path / FILE).write_text('[{"task": "rl"}]')
    with pytest.raises(DataError, match="does not describe"):
        read_starts(tmp_path)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("reward.kwargs.api_key=s3cret", "reward.kwargs.api_key=***"),
        ("reward.kwargs={apiKey: s3cret, url: u}", "'reward.kwargs={apiKey: ***, url: u}'"),
        ("reward.kwargs=[{token: s3cret}]", "'reward.kwargs=[{token: ***}]'"),
        ("--password=s3cret", "'--password=***'"),
        ("rollout.options.url=http://me:s3cret@host/x", "'rollout.options.url=http://***@host/x'"),
        ("data.eos_token=<end>", "'data.eos_token=<end>'"),
        ("run.steps=40", "run.steps=40"),
        ("data.prompt_template={prompt}: x", "'data.prompt_template={prompt}: x'"),
    ],
)
def test_the_command_line_has_no_secret(argument, shown):
    words = command_line(["/x/engine_trainer/__main__.py", "rl", argument])
    # Quotes do not matter, and shells differ in the characters that need them.
    assert words.replace("'", "").replace('"', "") == f"engine-train rl {shown}".replace("'", "")


def test_an_option_of_a_script_and_its_secret(tmp_path):
    assert command_line(["run.py", "--api-key", "s3cret", "--seed", "1"]) == (
        "python run.py --api-key '***' --seed 1"
    )


def test_the_commit_and_whether_the_files_are_those_of_it(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "new").write_text("1")
    assert commit(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{clean} with changes"
    # Without git nothing is known, which is no error.
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None


def test_outside_of_a_repository_the_commit_is_that_of_the_installation(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    note = tmp_path / "engine_trainer-0.1.0.dist-info"
    note.mkdir()
    (note / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-trainer\nVersion: 0.1.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert commit(tmp_path) is None
    url = {"url": "file:///x", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}
    (note / "direct_url.json").write_text(json.dumps(url))
    assert commit(tmp_path) == "0123abc of engine-trainer"
    (note / "METADATA").unlink()
    note.joinpath("direct_url.json").unlink()
    note.rmdir()
    assert commit(tmp_path) is None
