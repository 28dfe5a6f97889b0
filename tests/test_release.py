"""The release: what is checked before, what is written into the packages, and its workflow."""

from __future__ import annotations

import importlib
import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from layout import PUBLISHED, ROOT, project

WORKFLOW = ROOT / ".github/workflows/release.yml"
URL = "https://forge.example/owner/name"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the tool."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("release")


@pytest.fixture
def checkout(tmp_path: Path, release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of what the tool changes, and let it change that."""
    for package in PUBLISHED:
        folder = tmp_path / package.relative_to(ROOT)
        folder.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(package / name, folder)
    for name in ("docs", "recipes", "constraints", "README.md", "ARCHITECTURE.md", "matrix.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for package in PUBLISHED:
        if (package / "src").is_dir():
            (tmp_path / package.relative_to(ROOT) / "src").symlink_to(package / "src")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def test_a_commit_is_released_only_under_its_version_and_with_its_changes(
    release: ModuleType, checkout: Path
) -> None:
    version = project(PUBLISHED[0])["version"]
    for package in PUBLISHED:
        path = checkout / package.relative_to(ROOT) / "CHANGELOG.md"
        path.write_text(path.read_text().replace(f"## {version} (unreleased)", f"## {version}"))

    assert release.release_problems(f"v{version}") == []
    assert release.release_problems(version) == [
        f"expected a tag such as v{version}, got {version!r}"
    ]
    other = release.release_problems("v9.9.9")
    assert f"packages/trainer/pyproject.toml: expected version 9.9.9, got {version}" in other
    assert len(other) == 2 * len(PUBLISHED)
    found = release.notes(version)
    assert all(f"## {project(package)['name']}\n\n" in found for package in PUBLISHED)


def test_unreleased_changes_are_no_release(release: ModuleType, checkout: Path) -> None:
    path = checkout / "packages/trainer/CHANGELOG.md"
    path.write_text("# Changelog\n\n## 0.3.0 (unreleased)\n\n- New.\n\n## 0.2.0\n\n- Old.\n")

    assert release.section("packages/trainer", "0.3.0") is None
    assert release.section("packages/trainer", "0.2.0") == "- Old."
    (said,) = [one for one in release.release_problems("v0.3.0") if "trainer/CHANGELOG" in one]
    assert said.endswith("got `## 0.3.0 (unreleased)`, `## 0.2.0`")


def test_released_packages_have_addresses_and_no_relative_link(
    release: ModuleType, checkout: Path
) -> None:
    release.write_addresses(checkout, URL, "v0.1.0")
    release.write_addresses(checkout, URL, "v0.1.0")  # a second time changes nothing

    for package in PUBLISHED:
        folder = package.relative_to(ROOT)
        table: dict[str, Any] = tomllib.loads((checkout / folder / "pyproject.toml").read_text())
        assert table["project"]["urls"]["Repository"] == URL
        readme = (checkout / folder / "README.md").read_text()
        links = re.findall(r"\]\(([^)#]+)", readme)
        assert all(link.startswith("https://") for link in links), folder
    trainer = (checkout / "packages/trainer/README.md").read_text()
    assert f"({URL}/tree/v0.1.0/packages/engine-api)" in trainer
    assert f"({URL}/blob/v0.1.0/docs/first-hour.md)" in trainer


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://forge.example/owner/name", URL),
        ("https://user:secret@forge.example/owner/name.git", URL),
        ("git@forge.example:owner/name.git", URL),
        ("ssh://git@forge.example:2222/owner/name.git/", URL),
        ("/srv/git/name.git", None),
        ("../name", None),
        ("file:///srv/git/name.git", None),
        ("", None),
    ],
)
def test_the_address_is_that_of_origin_without_credentials(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, remote: str, url: str | None
) -> None:
    monkeypatch.setattr(release, "ask_git", lambda *_: remote)
    assert release.origin() == url


def test_packages_are_built_from_a_copy_with_the_address_of_the_tag(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"remote": URL, "describe": "v0.1.0", "rev-parse": "0" * 40}
    monkeypatch.setattr(release, "ask_git", lambda command, *_: said[command])
    release.write_sources(tmp_path / "sources")
    for package in PUBLISHED:
        copy = tmp_path / "sources" / package.relative_to(ROOT)
        assert f'Repository = "{URL}"' in (copy / "pyproject.toml").read_text()
        assert f'Repository = "{URL}"' not in (package / "pyproject.toml").read_text()
        assert not release.LINK.findall((copy / "README.md").read_text())
    recipes = tmp_path / "sources/packages/trainer/src/engine_trainer/recipes"
    assert (recipes / "rl/dapo.yaml").is_file()

    said["describe"] = ""  # no tag
    release.write_sources(tmp_path / "sources")
    readme = (tmp_path / "sources/packages/trainer/README.md").read_text()
    assert f"({URL}/blob/{'0' * 40}/docs/first-hour.md)" in readme

    said["remote"] = "/srv/git/name.git"
    release.write_sources(tmp_path / "sources")
    for package in PUBLISHED:
        copy = tmp_path / "sources" / package.relative_to(ROOT)
        assert (copy / "README.md").read_text() == (package / "README.md").read_text()


def test_a_dead_link_stops_the_release(release: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"the link \.\./none\.md leads to no file"):
        release.with_absolute_links("[a](../none.md)", "packages/trainer", URL, "v1")


NAMES = ("Repository", "Documentation", "Changelog", "Issues")
METADATA = (
    "".join(f"Project-URL: {name}, {URL}\n" for name in NAMES) + "\nSee [here](https://a/b).\n"
)


def build(
    folder: Path,
    release: ModuleType,
    *,
    without: str = "",
    more: str = "",
    metadata: str = METADATA,
) -> None:
    """Write archives with the files that the tool looks for."""
    for package in PUBLISHED:
        table = project(package)
        name = table["name"].replace("-", "_")
        stem = f"{name}-{table['version']}"
        info = f"{stem}.dist-info"
        files = [f"{info}/licenses/LICENSE", f"{name}/py.typed"]
        if name == "engine_trainer":
            files += [f"{release.RECIPES}{p.parent.name}/{p.name}" for p in release.recipes()]
            files += [more] if more else []
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", metadata)
            for file in files:
                if file != without:
                    wheel.writestr(file, "")
        with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as source:
            source.add(ROOT / "LICENSE", f"{stem}/LICENSE")


def test_a_wheel_without_addresses_or_with_a_relative_link_is_found(
    release: ModuleType, tmp_path: Path
) -> None:
    build(tmp_path, release)
    assert list(release.content_problems(tmp_path, addressed=True)) == []

    build(tmp_path, release, metadata=f"Project-URL: Issues, {URL}\n\nSee [it](../docs/it.md#a).\n")
    assert list(release.content_problems(tmp_path, addressed=False)) == []
    found = [one for one in release.content_problems(tmp_path, addressed=True) if "trainer" in one]
    assert [one.split("METADATA: ")[1] for one in found] == [
        *(f"expected a Project-URL {name}, got Issues" for name in NAMES[:3]),
        "expected absolute links in the README, got ../docs/it.md",
    ]


def test_a_wheel_without_a_recipe_or_with_leftovers_is_found(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "origin", lambda: URL)
    build(tmp_path, release)
    assert release.main(["contents", str(tmp_path)]) == 0

    lost, left = "engine_trainer/recipes/rl/dapo.yaml", "engine_trainer/__pycache__/a.pyc"
    build(tmp_path, release, without=lost, more=left)
    problems = release.content_problems(tmp_path, addressed=True)
    found = [problem.split(": ")[1] for problem in problems]
    assert found == [f"{lost} is absent", f"{left} is left over"]


def test_packages_are_placed_instead_of_older_ones(release: ModuleType, checkout: Path) -> None:
    built, placed = checkout / "built", checkout / "dist"
    for path in (built / "a-2.whl", built / "a-2.tar.gz", placed / "a-1.whl"):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    assert release.main(["place", str(built)]) == 0

    assert {path.name for path in placed.iterdir()} == {"a-2.whl", "a-2.tar.gz"}


def test_the_workflow_runs_sessions_and_steps_that_exist(release: ModuleType) -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    scripts = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    sessions = set(re.findall(r"nox -s (\w+)", scripts))
    defined = set(
        re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    )
    assert sessions
    assert sessions <= defined
    steps = re.findall(r"tools/release\.py (\w+) (.*)", scripts)
    assert {name for name, _ in steps} == {"check", "notes"}
    # Only the job that publishes may ask for an identity, and only after the checks.
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == [
        "publish"
    ]
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert "secrets." not in WORKFLOW.read_text()


def test_the_workflow_tests_every_python_that_the_packages_name_with_torch_for_a_cpu() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    named = [
        text.rpartition(" ")[2]
        for text in project(PUBLISHED[0])["classifiers"]
        if re.search(r"Python :: 3\.\d+$", text)
    ]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    assert workflow["env"]["UV_TORCH_BACKEND"] == "cpu"
