"""The dependencies of installed packages: versions that were not tested, and absent ones.

A package says in its metadata which versions it was tested with. An installer keeps to them, but a
later installation of another package may change them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_api.discovery import printable

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Packages that depend on this one, directly or through another, are looked at.
ROOT = "engine-api"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Lines about dependencies, each with the command that changes what it says."""

    untested: tuple[str, ...] = ()
    """Installed dependencies outside the versions that a package accepts."""

    absent: tuple[str, ...] = ()
    """Dependencies that a package cannot do without."""

    extras: tuple[str, ...] = ()
    """Extras of packages that are not installed."""

    unchecked: str = ""
    """Reason why nothing was checked, or "" if all was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Package:
    """An installed distribution with parsed requirements."""

    name: str
    version: str
    requirements: tuple[Requirement, ...]
    extras: tuple[str, ...]

    def needs(self, extra: str = "") -> Iterator[Requirement]:
        """Yield the requirements of the package itself, or those that an extra adds."""
        for needed in self.requirements:
            if _applies(needed, extra) and not (extra and _applies(needed, "")):
                yield needed


def check_dependencies() -> Findings:
    """Return what is untested or absent among the dependencies of engine-api and its users."""
    # This package has no dependencies, and may be alone.
    if importlib.util.find_spec("packaging") is None:
        return Findings(
            unchecked="versions of dependencies were not checked: packaging is not installed; "
            "to do: pip install packaging"
        )
    return _Check(_installed()).run()


class _Check:
    def __init__(self, packages: dict[str, _Package]) -> None:
        self._packages = packages

    def run(self) -> Findings:
        absent: list[str] = []
        extras: dict[str, str] = {}
        outside: dict[tuple[str, str, str], list[str]] = {}
        for package in self._users():
            for needed in package.needs():
                if missing := self._missing(needed):
                    names = " and ".join(missing)
                    absent.append(
                        f"{package.name} needs {names}, which is not installed; "
                        f"to do: {_command(_plain(needed))}"
                    )
                self._compare(needed, package.name, outside)
            for extra in package.extras:
                full = f"{package.name}[{extra}]"
                parts = list(package.needs(extra))
                if missing := sorted({name for part in parts for name in self._missing(part)}):
                    extras[_command(full)] = f"adds {', '.join(missing)}"
                    continue
                for part in parts:
                    self._compare(part, full, outside)
        width = max(map(len, extras), default=0)
        return Findings(
            untested=tuple(_untested(*key, by) for key, by in outside.items()),
            absent=tuple(absent),
            extras=tuple(f"{command:<{width}}  {adds}" for command, adds in extras.items()),
        )

    def _users(self) -> list[_Package]:
        """Return the installed packages that depend on engine-api, and engine-api itself."""
        found: dict[str, _Package] = {}
        before = -1
        while len(found) != before:
            before = len(found)
            for key, package in self._packages.items():
                names = {_canonical(needed.name) for needed in package.needs()}
                if key == ROOT or names & set(found):
                    found[key] = package
        return [found[key] for key in sorted(found)]

    def _missing(self, needed: Requirement, above: frozenset[str] = frozenset()) -> list[str]:
        """Return the names of distributions that are absent for a requirement and its extras."""
        package = self._packages.get(_canonical(needed.name))
        if package is None:
            return [needed.name]
        key = _plain(needed)
        if key in above:
            return []
        parts = [part for extra in sorted(needed.extras) for part in package.needs(extra)]
        return [name for part in parts for name in self._missing(part, above | {key})]

    def _compare(
        self, needed: Requirement, by: str, outside: dict[tuple[str, str, str], list[str]]
    ) -> None:
        package = self._packages.get(_canonical(needed.name))
        if package is not None and not _accepts(needed, package.version):
            key = (needed.name, package.version, _bounds(needed))
            outside.setdefault(key, []).append(by)


def _installed() -> dict[str, _Package]:
    """Return the installed packages by canonical name, as an import would find them."""
    found: dict[str, _Package] = {}
    for distribution in importlib.metadata.distributions():
        try:
            metadata = distribution.metadata
            name = printable(str(metadata["Name"]))
            package = _Package(
                name=name,
                version=printable(distribution.version),
                requirements=tuple(_parse(distribution.requires or ())),
                extras=tuple(metadata.get_all("Provides-Extra") or ()),
            )
        # Damaged metadata of any distribution must not hide those of all others. Plug-ins with
        # such metadata are reported as broken.
        except Exception:  # noqa: BLE001, S112
            continue
        found.setdefault(_canonical(name), package)
    return found


def _parse(texts: Iterable[str]) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in texts:
        try:
            yield Requirement(text)
        except InvalidRequirement:
            # An installer refuses it, too, so that it says nothing about this environment.
            continue


def _applies(needed: Requirement, extra: str) -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": extra})


def _accepts(needed: Requirement, version: str) -> bool:
    from packaging.version import InvalidVersion

    try:
        return needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True


def _plain(needed: Requirement) -> str:
    """Return a requirement without its marker."""
    extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
    return f"{needed.name}{extras}{_bounds(needed)}"


def _bounds(needed: Requirement) -> str:
    """Return the versions that are accepted, the lower bound first."""
    return ",".join(sorted(map(str, needed.specifier), reverse=True))


def _untested(name: str, version: str, accepted: str, by: list[str]) -> str:
    verb = "accepts" if len(by) == 1 else "accept"
    return (
        f"{name} {version} was not tested: {' and '.join(by)} {verb} {accepted}; "
        f"to do: {_command(f'{name}{accepted}')}"
    )


def _command(what: str) -> str:
    return f'pip install "{what}"'


def _canonical(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)
