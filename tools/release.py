"""Prepare a release: check versions, write addresses into the packages, check what was built.

``python tools/release.py check TAG`` compares the tag with versions and changelogs, ``notes TAG``
prints the changes of the tag. ``sources FOLDER`` copies the packages and writes the address of the
remote ``origin`` into the copy, ``contents FOLDER`` checks built packages, and ``place FOLDER``
copies them to dist/ in place of older ones. The first two are steps of
.github/workflows/release.yml, the other three of `nox -s dist` and `nox -s wheels`.
"""

from __future__ import annotations

import argparse
import email
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from environments import packages, project
from matrix import ROOT

# The target of a relative link, without its anchor.
LINK = re.compile(r"(?<=\]\()[^\s()#:]+(?=[)#])")
HEADING = re.compile(r"^## (?P<version>[^\s,]+)(?P<rest>.*)$", re.MULTILINE)
RECIPES = "engine_trainer/recipes/"
# A forge's address of a repository, without the user and the password that it may have.
REMOTE = re.compile(
    r"(?:(?:https?|ssh)://(?:[^@/]+@)?(?P<host>[\w.-]+)(?::\d+)?/|(?:[^@/:]+@)?(?P<scp>[\w.-]+):(?!//))"
    r"(?P<path>[^:]+?)(?:\.git)?/?"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step and return its exit status: 0, or 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("check", "notes"):
        steps.add_parser(name).add_argument("tag")
    for name in ("sources", "contents", "place"):
        steps.add_parser(name).add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.step == "sources":
        write_sources(options.folder)
        return 0
    if options.step == "place":
        place(options.folder)
        return 0
    if options.step == "notes":
        print(notes(version_of(options.tag)), end="")
        return 0
    found = (
        release_problems(options.tag)
        if options.step == "check"
        else list(content_problems(options.folder, addressed=origin() is not None))
    )
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


def version_of(tag: str) -> str:
    """Return the version that a tag ``v1.2.3`` names."""
    return tag.removeprefix("v")


def release_problems(tag: str) -> list[str]:
    """Return what must be changed before the commit can be released under the tag."""
    version = version_of(tag)
    found = [] if tag == f"v{version}" else [f"expected a tag such as v{version}, got {tag!r}"]
    for folder in packages():
        stated = project(folder)["version"]
        if stated != version:
            found.append(f"{folder}/pyproject.toml: expected version {version}, got {stated}")
        if section(folder, version) is None:
            found.append(
                f"{folder}/CHANGELOG.md: expected the heading `## {version}` without "
                f"`(unreleased)`, got {', '.join(headings(folder))}"
            )
    return found


def headings(folder: str) -> list[str]:
    """Return the headings of a package's changelog."""
    return [f"`{found[0]}`" for found in HEADING.finditer(changelog(folder))]


def changelog(folder: str) -> str:
    """Return the text of a package's changelog."""
    return (ROOT / folder / "CHANGELOG.md").read_text(encoding="utf-8")


def section(folder: str, version: str) -> str | None:
    """Return the changes of a version, or None if the changelog has no release of it."""
    text = changelog(folder)
    found = list(HEADING.finditer(text))
    for at, heading in enumerate(found):
        if heading["version"] == version and "unreleased" not in heading["rest"]:
            end = found[at + 1].start() if at + 1 < len(found) else len(text)
            return text[heading.end() : end].strip()
    return None


def notes(version: str) -> str:
    """Return the changes of a version in all packages, as Markdown."""
    parts = ((project(folder)["name"], section(folder, version)) for folder in packages())
    return "".join(f"## {name}\n\n{text}\n\n" for name, text in parts if text)


def write_sources(target: Path) -> None:
    """Copy what packages are built from, and write the address of ``origin`` into the copy.

    Without a remote ``origin`` on a forge the copy has no address, and the reason is printed.
    """
    shutil.rmtree(target, ignore_errors=True)
    waste = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("packages", "conformance", "recipes"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=waste)
    url = origin()
    if url is None:
        print(
            "no remote `origin` on a forge: the packages have no project URLs, and relative links"
        )
        return
    commit = ask_git("rev-parse", "HEAD")
    write_addresses(target, url, ask_git("describe", "--exact-match", "--tags") or commit)


def origin() -> str | None:
    """Return the address of the remote ``origin`` on a forge, for a browser, or None."""
    found = REMOTE.fullmatch(ask_git("remote", "get-url", "origin"))
    return found and f"https://{found['host'] or found['scp']}/{found['path'].lstrip('/')}"


def ask_git(*arguments: str) -> str:
    """Return what a command of git prints; empty if it fails, as in a folder without git."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def write_addresses(root: Path, url: str, tag: str) -> None:
    """Write the repository's address into metadata and READMEs of the packages below ``root``.

    Relative links of a README lead nowhere where the long description of a package is shown.

    Raises ``SystemExit`` for a link to a file that does not exist.
    """
    for folder in packages():
        path = root / folder / "pyproject.toml"
        text = path.read_text(encoding="utf-8")
        if "[project.urls]" not in text:
            path.write_text(f"{text}\n{addresses(folder, url, tag)}", encoding="utf-8")
        readme = root / folder / "README.md"
        linked = with_absolute_links(readme.read_text(encoding="utf-8"), folder, url, tag)
        readme.write_text(linked, encoding="utf-8")


def addresses(folder: str, url: str, tag: str) -> str:
    """Return the table of a package's addresses in TOML."""
    return (
        "[project.urls]\n"
        f'Repository = "{url}"\n'
        f'Documentation = "{url}/blob/{tag}/docs/README.md"\n'
        f'Changelog = "{url}/blob/{tag}/{folder}/CHANGELOG.md"\n'
        f'Issues = "{url}/issues"\n'
    )


def with_absolute_links(text: str, folder: str, url: str, tag: str) -> str:
    """Return a package's README with absolute links in place of relative ones."""

    def absolute(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        path = ROOT / target
        if target.startswith("..") or not path.exists():
            sys.exit(f"{folder}/README.md: the link {link[0]} leads to no file")
        return f"{url}/{'tree' if path.is_dir() else 'blob'}/{tag}/{target}"

    return LINK.sub(absolute, text)


def content_problems(folder: Path, *, addressed: bool) -> Iterator[str]:
    """Yield what is wrong with the wheels and source distributions in a folder.

    ``addressed`` packages have the repository's address, and no relative link.
    """
    for package in packages():
        name = project(package)["name"].replace("-", "_")
        stem = f"{name}-{project(package)['version']}"
        wheel, source = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
        for path in (wheel, source):
            if not path.is_file():
                yield f"{path}: expected a file, got none"
                return
        with zipfile.ZipFile(wheel) as archive:
            files = set(archive.namelist())
            metadata = archive.read(f"{stem}.dist-info/METADATA").decode()
        if addressed:
            yield from (f"{wheel}: METADATA: {problem}" for problem in address_problems(metadata))
        with tarfile.open(source) as archive:
            sources = {member.name: member for member in archive.getmembers()}
        wanted = {f"{stem}.dist-info/licenses/LICENSE"}
        if (ROOT / package / "src").is_dir():
            wanted.add(f"{name}/py.typed")
        if name == "engine_trainer":
            wanted |= {f"{RECIPES}{path.relative_to(ROOT / 'recipes')}" for path in recipes()}
        yield from (f"{wheel}: {file} is absent" for file in sorted(wanted - files))
        yield from (f"{wheel}: {file} is left over" for file in sorted(files) if is_waste(file))
        if f"{stem}/LICENSE" not in sources:
            yield f"{source}: LICENSE is absent"
        yield from (
            f"{source}: {name} is a link" for name, member in sources.items() if member.issym()
        )


def address_problems(metadata: str) -> Iterator[str]:
    """Yield the addresses that a wheel's METADATA lacks, and the relative links of its README."""
    message = email.message_from_string(metadata)
    found = {text.split(",")[0] for text in message.get_all("Project-URL", [])}
    for name in ("Repository", "Documentation", "Changelog", "Issues"):
        if name not in found:
            yield f"expected a Project-URL {name}, got {', '.join(sorted(found)) or 'none'}"
    for link in LINK.findall(str(message.get_payload())):
        yield f"expected absolute links in the README, got {link}"


def place(folder: Path) -> None:
    """Copy the built packages of a folder to dist/, and remove those that were there."""
    target = ROOT / "dist"
    target.mkdir(exist_ok=True)
    for pattern in ("*.whl", "*.tar.gz"):
        for old in target.glob(pattern):
            old.unlink()
        for new in folder.glob(pattern):
            shutil.copy2(new, target)


def recipes() -> list[Path]:
    """Return the files of the recipes."""
    return [path for path in (ROOT / "recipes").glob("*/*") if path.suffix in {".py", ".yaml"}]


def is_waste(file: str) -> bool:
    """Return whether a file of a wheel was made by running or testing the code."""
    return "__pycache__" in file or file.endswith(".pyc") or "/tests/" in file


if __name__ == "__main__":
    sys.exit(main())
