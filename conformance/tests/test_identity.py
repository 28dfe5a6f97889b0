"""Tests of what a report says about its suite and its packages: digests, commits, contracts."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_api.plugin import CONTRACT
from engine_conformance import environment
from engine_conformance.cli import main
from engine_conformance.report import certificate, read_document, to_document, verify
from engine_conformance.report.document import digest
from report_samples import SUITE, made, stored

SOURCE = '''"""A module."""

def check(x):
    """MUST hold."""
    # why
    return f"{x:>3} is {x!r}" == "1", [x, ""]
'''
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def suite_of(folder: Path, **files: str) -> str:
    for name, text in ({"cases": SOURCE, "report/view": SOURCE} | files).items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return environment.suite_digest(folder)


@pytest.mark.parametrize(
    "prose",
    [
        SOURCE.replace("A module.", "One more module."),
        SOURCE.replace("MUST hold.", "MUST hold,\n    always."),
        SOURCE.replace("# why", "# for another reason"),
        SOURCE.replace("    return", "\n    return"),
        SOURCE.replace('[x, ""]', '[\n        x,\n        "",\n    ]'),
    ],
)
def test_prose_and_layout_do_not_end_a_certificate(tmp_path: Path, prose: str) -> None:
    assert prose != SOURCE
    assert suite_of(tmp_path / "a") == suite_of(tmp_path / "b", cases=prose)
    assert suite_of(tmp_path / "a") == suite_of(tmp_path / "c", **{"report/view": "x = 1"})


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace('"1"', '"2"'),
        SOURCE.replace("==", "!="),
        SOURCE.replace("x:>3", "x:>4"),
        SOURCE.replace("!r", "!s"),
        SOURCE.replace('[x, ""]', "[x]"),
        SOURCE.replace("check", "checked"),
    ],
)
def test_other_code_is_another_suite(tmp_path: Path, other: str) -> None:
    assert other != SOURCE
    assert suite_of(tmp_path / "a") != suite_of(tmp_path / "b", cases=other)


def test_a_file_more_and_its_place_are_another_suite(tmp_path: Path) -> None:
    found = {
        suite_of(tmp_path / "a"),
        suite_of(tmp_path / "b", more=SOURCE),
        suite_of(tmp_path / "c", moved=SOURCE),
    }
    assert len(found) == 3


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout with the package ``acme`` on the path."""
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "begin")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_package_in_a_checkout_has_its_commit(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "elsewhere.txt").write_text("a change outside the package")
    assert environment.commits("acme.plugin", stated=COMMIT) == {"acme": head}
    (checkout / "acme" / "more.py").write_text("")
    assert environment.commits("acme") == {"acme": f"{head}-dirty"}


def test_a_wheel_inside_a_checkout_has_the_commit_that_is_stated(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".gitignore").write_text(".venv/\n")
    installed = checkout / ".venv" / "anvil"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(installed.parent)
    assert environment.commits("anvil") == {}
    assert environment.commits("anvil", "nowhere", stated=COMMIT) == {"anvil": COMMIT}


def test_a_package_that_was_installed_from_a_repository_has_the_recorded_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "anvil").mkdir()
    (tmp_path / "anvil" / "__init__.py").write_text("")
    info = tmp_path / "anvil_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anvil-engine\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("anvil\n")
    record = {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
    (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.commits("anvil", stated="f" * 40) == {"anvil": COMMIT}


def _install(folder: Path, package: str, *requires: str, recorded: bool) -> None:
    """Install a package as a wheel does, or as the metadata of a source checkout do."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {package.replace('_', '-')}", "Version: 1.0"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if recorded:
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n")


@pytest.mark.parametrize("recorded", [True, False], ids=["wheel", "checkout"])
def test_the_parts_of_an_engine_are_what_it_requires_and_requires_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    api = "engine-api>=0.1,<0.2"
    _install(tmp_path, "acme_engine", api, "Acme_Base[fast]>=1", "anvil", recorded=recorded)
    extra = 'acme-tool>=1; extra == "tool"'
    _install(tmp_path, "acme_base", api, "acme-parts", extra, recorded=recorded)
    _install(tmp_path, "acme_parts", api, recorded=recorded)
    _install(tmp_path, "acme_tool", api, recorded=recorded)
    _install(tmp_path, "anvil", "numpy", recorded=recorded)
    monkeypatch.syspath_prepend(tmp_path)

    parts = environment.parts_of("acme_engine.engine")

    assert parts == ("acme_base", "acme_parts")
    assert environment.sources(*parts).keys() == {"acme_base", "acme_parts"}
    assert environment.parts_of("nowhere.engine") == ()


def test_the_parts_of_engines_of_this_tree_are_found() -> None:
    assert environment.parts_of("engine_fsdp.engine") == ("engine_torch",)


def test_a_certificate_names_the_commits(tmp_path: Path) -> None:
    commits = {"acme": COMMIT, "engine_api": COMMIT}
    document = to_document(*made(commits=commits))
    assert verify(stored(tmp_path / "report.json", document), suite=SUITE) == []
    assert read_document(document)[0].commits == commits
    assert f"| Commit | {COMMIT} (acme, engine\\_api) |" in certificate(document)
    apart = to_document(*made(commits=commits | {"acme": "f" * 40}))
    assert f"acme {'f' * 40}, engine\\_api {COMMIT}" in certificate(apart)
    assert "| Commit |" not in certificate(to_document(*made()))


def test_a_report_from_before_commits_were_named_verifies(tmp_path: Path) -> None:
    document = to_document(*made())
    del document["commits"]
    document["digest"] = digest(document)
    assert verify(stored(tmp_path / "report.json", document), suite=SUITE) == []


@pytest.mark.parametrize("commit", ["main", "0123456789abcdef-changed", "12345"])
def test_a_commit_that_is_none_is_refused(commit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "anything", "--commit", commit]) == 2
    assert f"expected 7 to 64 hexadecimal digits, and -dirty for changed files, got {commit!r}" in (
        capsys.readouterr().err
    )


def other_suite(tmp_path: Path, ours: dict[str, str], **changes: Any) -> str:
    document = copy.deepcopy(to_document(*made(**changes)))
    [problem] = verify(stored(tmp_path / "report.json", document), suite=ours)
    return problem


def test_an_older_contract_is_named_with_the_cases_that_came_later(tmp_path: Path) -> None:
    problem = other_suite(tmp_path, SUITE | {"contract": CONTRACT})
    assert "of an older contract (1.0), without the cases lora.base (1.1), " in problem
    assert "steps.loss_raises_on_one_rank (1.3)" in problem
    # The report declares no export of shards, and no rollout ran.
    assert "lora.shards" not in problem
    assert "rollout.stale_sync" not in problem


def test_a_newer_contract_and_another_suite_of_the_same_contract_are_named(tmp_path: Path) -> None:
    newer = other_suite(tmp_path, SUITE, suite=SUITE | {"contract": "1.9"})
    assert "of a newer contract (1.9)" in newer
    other = other_suite(tmp_path, SUITE | {"digest": "b" * 64})
    assert "of this contract, and of a suite whose code decides differently" in other


def test_a_report_about_other_files_than_the_installed_ones_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = environment.sources("engine_api") | {"engine_conformance": "a" * 64, "gone": "b" * 64}
    document = to_document(
        *made(suite=environment.suite(), sources=sources, commits={"engine_conformance": COMMIT})
    )
    assert main(["verify", str(stored(tmp_path / "report.json", document))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    tested = f"tested were the files of SHA-256 aaaaaaaaaaaa… (commit {COMMIT})"
    assert shown[1].startswith(f"note: engine_conformance: {tested}, installed are those of ")
