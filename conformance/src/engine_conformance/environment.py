"""Facts about the machine, the versions and the suite for a report. Imports no torch."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import engine_conformance
from engine_api.devices import cuda_devices, cuda_is_simulated, npu_is_simulated
from engine_api.plugin import CONTRACT

__all__ = [
    "SHIMMED",
    "SIMULATED",
    "code_digests",
    "commits",
    "devices_of",
    "environment",
    "installed_code",
    "parts_of",
    "reported",
    "sources",
    "suite",
    "suite_digest",
]

# The name in a report of a CPU that answered in CUDA's place.
SHIMMED = "cpu (shimmed)"
# The name in a report of a device that is made of CPU tensors.
SIMULATED = "simulated"
# These parts of the suite read what is asked for, which the report states, name what was tested and
# what this machine has, and show results. They decide none: a row that they leave out is not run.
_DECIDES_NOTHING = ("report", "cli.py", "environment.py", "explain.py")
_CASES = "cases"
_ROOT = Path(engine_conformance.__file__).parent
_API = "engine-api"
# The name at the beginning of a requirement (PEP 508).
_NAME = re.compile(r"[A-Za-z0-9]+(?:[-_.]+[A-Za-z0-9]+)*")
_VERSIONS = ("torch", "transformers", "numpy", "safetensors", "engine-api", "engine-conformance")


@cache
def suite() -> dict[str, str]:
    """Return the suite's version, the contract that it tests, and the digest of its code.

    The digest is the SHA-256 of everything that decides a result. Docstrings, comments, layout and
    the rendering of reports are no part of it: a certificate stays valid when prose is corrected.
    """
    digest = _join_digests(_installed_files())
    return {"version": engine_conformance.__version__, "contract": CONTRACT, "digest": digest}


@cache
def installed_code() -> dict[str, str]:
    """Return the digests of the installed suite's code by module of cases (`code_digests`)."""
    return _code_digests(_ROOT, _installed_files())


@cache
def _installed_files() -> dict[str, str]:
    return _deciding_files(_ROOT)


def suite_digest(root: Path) -> str:
    """Return the SHA-256 of the files of a suite that decide its results."""
    return _join_digests(_deciding_files(root))


def code_digests(root: Path) -> dict[str, str]:
    """Return by module of cases the SHA-256 of the files that decide what its cases find.

    They are the module, the modules of cases that it imports, and all of the suite that is no
    module of cases. A change of one case thus leaves alone what those of other modules have found.
    """
    return _code_digests(root, _deciding_files(root))


def _code_digests(root: Path, files: Mapping[str, str]) -> dict[str, str]:
    modules = {
        name
        for name in files
        if Path(name).parent.as_posix() == _CASES and Path(name).suffix == ".py"
    } - {f"{_CASES}/__init__.py"}
    imports = {
        name: _imported_cases(root / name, name, modules) for name in files if name.endswith(".py")
    }
    outside = _with_imports(files.keys() - modules, imports)
    return {
        Path(name).stem: _join_digests({one: files[one] for one in wanted})
        for name in sorted(modules)
        if not Path(name).stem.startswith("_")
        for wanted in [_with_imports({*outside, name}, imports)]
    }


def _deciding_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a suite that decides a result, by its path below it."""
    found: dict[str, str] = {}
    for path in _files(root):
        name = path.relative_to(root)
        if name.parts[0] in _DECIDES_NOTHING:
            continue
        content = path.read_bytes()
        if path.suffix == ".py":
            content = json.dumps(_shape(ast.parse(content))).encode()
        found[name.as_posix()] = hashlib.sha256(content).hexdigest()
    return found


def _join_digests(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files, key=lambda name: Path(name).parts):
        digest.update(name.encode() + b"\0" + bytes.fromhex(files[name]))
    return digest.hexdigest()


def _imported_cases(path: Path, name: str, modules: Collection[str]) -> set[str]:
    """Return the modules of cases that the import statements of a file name.

    Args:
        path: the file.
        name: its path below the suite.
        modules: all modules of cases, by their paths below the suite.

    Raises:
        ValueError: a statement is relative, or imports all cases into a module of them: neither
            says which module is used.
    """
    package = f"{engine_conformance.__name__}.{_CASES}"
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{name}: expected absolute imports, got a relative one")
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    if package in named and name in modules:
        raise ValueError(f"{name}: expected imports of modules of {package}, got all of it")
    start = f"{package}."
    parts = {one[len(start) :].partition(".")[0] for one in named if one.startswith(start)}
    return {f"{_CASES}/{part}.py" for part in parts} & set(modules)


def _with_imports(names: Iterable[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Return files and all that they import, over any number of steps."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= imports.get(name, set()) - found
    return found


def _shape(node: Any) -> Any:
    """Return a syntax tree as lists without docstrings, positions and empty parts.

    Python 3.11, 3.12 and 3.13 differ in the empty parts alone: fields, and texts of an f-string.
    """
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", *(_shape(part) for part in node.values if not _is_text(part, ""))]
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *([name, _shape(value)] for name, value in fields)]
    if isinstance(node, list):
        docstrings = [part for part in node if isinstance(part, ast.Expr) and _is_text(part.value)]
        return [_shape(part) for part in node if part not in docstrings]
    return repr(node)


def _is_text(node: ast.AST, text: str | None = None) -> bool:
    """Return whether a node is a text, or the given one."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return text is None or node.value == text


def sources(*modules: str) -> dict[str, str]:
    """Return the SHA-256 of the files of each module's top-level package, by package name.

    Two builds may have one version, which the hash tells apart. Nothing is imported.
    """
    return {name: _digest(path) for name, path in _packages(*modules)}


def commits(*modules: str, stated: str = "") -> dict[str, str]:
    """Return the commit that each module's top-level package was made from, by package name.

    A package in a git checkout has the checkout's commit, with ``-dirty`` if its files differ from
    it. A package that pip or uv installed from a repository has the commit that they recorded. A
    package from a wheel names none, and has the one that is stated, if any.
    """
    found: dict[str, str] = {}
    for name, path in _packages(*modules):
        folder = path if path.is_dir() else path.parent
        if commit := _commit_of_checkout(folder) or _commit_of_installation(name) or stated:
            found[name] = commit
    return found


def parts_of(*modules: str) -> tuple[str, ...]:
    """Return the top-level packages of the parts that each module's distribution is made of.

    A part is an installed distribution that the module's distribution requires, itself or through
    other parts, and that requires engine-api in turn: another engine that it derives from, or a
    library of engines. Requirements of extras do not count. Nothing is imported.
    """
    owners = importlib.metadata.packages_distributions()
    tops = {module.partition(".")[0] for module in modules}
    left = [name for top in sorted(tops) for name in owners.get(top, [top])]
    found = set[str]()
    while left:
        for name in _requirements(left.pop()):
            if name not in found and _API in _requirements(name):
                found.add(name)
                left.append(name)
    packages = {name.replace("-", "_") for name in found}
    packages |= {
        package
        for package, names in owners.items()
        if not found.isdisjoint(map(_normalized, names))
    }
    return tuple(sorted(packages - tops))


def _requirements(distribution: str) -> list[str]:
    """Return the names of the distributions that an installed one requires, without extras."""
    try:
        stated = importlib.metadata.requires(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    plain = (text for text in stated if not re.search(r"\bextra\s*==", text.partition(";")[2]))
    return [_normalized(found[0]) for text in plain if (found := _NAME.match(text.strip()))]


def _normalized(distribution: str) -> str:
    """Return a distribution's name as packages of Python compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _packages(*modules: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and the place of each module's top-level package, if it has files."""
    for name in sorted({module.partition(".")[0] for module in modules}):
        spec = importlib.util.find_spec(name)
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        if path := next((Path(place) for place in places if place and Path(place).exists()), None):
            yield name, path


def _commit_of_checkout(folder: Path) -> str:
    """Return the commit of a folder whose files git tracks, or "".

    An environment inside a checkout (``.venv``) is no part of it.
    """
    if not _git(folder, "ls-files", "--", "."):
        return ""
    changed = _git(folder, "status", "--porcelain", "--", ".")
    return _git(folder, "rev-parse", "HEAD") + ("-dirty" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git, or "" without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit_of_installation(module: str) -> str:
    """Return the commit in the record of a package's installation (PEP 610), or ""."""
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        record = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        if record:
            return json.loads(record).get("vcs_info", {}).get("commit_id", "")
    return ""


def _digest(root: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files of a folder."""
    if root.is_file():
        return hashlib.sha256(root.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for path in _files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def reported(device: str) -> str:
    """Return the name in a report of a device that was asked for."""
    return SIMULATED if device == "npu" and npu_is_simulated() else device


def environment(*distributions: str) -> dict[str, str]:
    """Return machine, Python and versions.

    ``distributions`` are added to the usual ones.
    """
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    facts["cpu"] = f"{_cpu()}, {os.cpu_count()} cores"
    if devices := cuda_devices():
        facts["accelerator"] = f"{devices} x {_cuda_name()}"
    if cuda_is_simulated():
        facts["accelerator"] = SHIMMED
    if npu_is_simulated():
        facts["accelerator"] = SIMULATED
    for name in dict.fromkeys((*_VERSIONS, *distributions)):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def devices_of(device: str) -> int | None:
    """Return the number of ranks that ``device`` can hold here, or None without a known limit."""
    return cuda_devices() if device == "cuda" else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "CPU"


def _cuda_name() -> str:
    # From the driver: torch would put a context on the first device.
    driver = ctypes.CDLL("libcuda.so.1")
    name = ctypes.create_string_buffer(100)
    driver.cuInit(0)
    driver.cuDeviceGetName(name, len(name), 0)
    return name.value.decode()
