"""The certificates in conformance/reports are about the commits that they name."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from layout import PACKAGES, ROOT, module_folder

from engine_conformance import environment
from engine_conformance.report import verify

FILES = sorted(ROOT.glob("conformance/reports/**/report.json"))
MODULES = {module_folder(package).name: module_folder(package) for package in PACKAGES}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


NAMED = [path for path in FILES if load(path).get("commits")]


def files_at(commit: str, folder: Path, place: Path) -> Path:
    """Return a copy of a folder of the repository as it was at a commit."""
    part = folder.relative_to(ROOT).as_posix()
    command = ["git", "-C", str(ROOT), "archive", commit, part]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"commit {commit} is not in this clone: {done.stderr.decode()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place / part


@pytest.mark.slow
@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.parent.name)
def test_a_certificate_is_about_the_commit_that_it_names(path: Path, tmp_path: Path) -> None:
    report = load(path)
    for name, commit in report["commits"].items():
        assert not commit.endswith("-dirty")
        copy = files_at(commit, MODULES[name], tmp_path)
        if name == "engine_conformance":
            assert environment.suite_digest(copy) == report["suite"]["digest"]
            assert environment.code_digests(copy) == report["code"]
        else:
            assert digest_of(copy) == report["sources"][name], name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_certificate_names_no_place_of_the_machine_that_made_it(path: Path) -> None:
    report = load(path)
    for one in (report, *report.get("parts", [])):
        words = [word.rpartition("=")[2] for word in one["command"]]
        assert not [word for word in words if Path(word).is_absolute()]


def digest_of(root: Path) -> str:
    """Return the digest of a package's files as a report states it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_readme_says_of_each_certificate_whether_it_verifies(path: Path) -> None:
    link = path.with_name("certificate.md").relative_to(ROOT).as_posix()
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if link in line]
    contract = load(path)["suite"]["contract"]
    ours = environment.suite()
    expected = f"no: of an older contract ({contract})"
    if contract == ours["contract"]:
        good = not verify(path, suite=ours)
        expected = f"yes, contract {contract}" if good else "no: of an older suite"
    assert rows
    assert all(f"| {expected} |" in row for row in rows)
