"""Every package has the same parts, every option is read, and light modules stay light."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from layout import PACKAGES, ROOT, is_engine, module_folder, project

from engine_api import config

ENGINE_FILES = (
    "plugin",
    "options",
    "engine",
    "model",
    "parallel",
    "optimizer",
    "checkpoint",
    "export",
)
API = ROOT / "packages/engine-api"
ENGINES = [p for p in PACKAGES if is_engine(p)]
# The library of what engines over DTensor share.
LIBRARY = ROOT / "packages/engine-torch"
# An engine over the library, or over another package's engine, has only the files that differ.
DERIVED = [
    p
    for p in ENGINES
    if any(d.startswith(("engine-torch", "engine-megatron")) for d in project(p)["dependencies"])
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_has_the_parts_of_a_package(package: Path) -> None:
    module = module_folder(package)
    parts = [
        package / "README.md",
        package / "CHANGELOG.md",
        package / "tests",
        module / "py.typed",
    ]
    assert not [str(part) for part in parts if not part.exists()]
    assert project(package)["license"] == "Apache-2.0"
    assert project(package)["requires-python"] == ">=3.11"
    assert project(package)["readme"] == "README.md"


@pytest.mark.parametrize("package", ENGINES, ids=lambda p: p.name)
def test_engines_have_the_same_file_names(package: Path) -> None:
    module = module_folder(package)
    wanted = ENGINE_FILES[:3] if package in DERIVED else ENGINE_FILES
    assert not [
        name
        for name in wanted
        if not ((module / f"{name}.py").exists() or (module / name).is_dir())
    ]


def config_fields() -> list[tuple[str, str]]:
    sections = [
        c for _, c in inspect.getmembers(config, inspect.isclass) if dataclasses.is_dataclass(c)
    ]
    return [
        (section.__name__, field.name)
        for section in sections
        for field in dataclasses.fields(section)
    ]


def test_every_option_has_a_reader() -> None:
    read: set[str] = set()
    for path in (
        p
        for package in (API, LIBRARY, *ENGINES)
        for p in package.glob("src/**/*.py")
        if p.name != "config.py"
    ):
        read |= {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
    assert not [f"{section}.{name}" for section, name in config_fields() if name not in read]


def test_the_contract_and_the_descriptors_import_no_torch() -> None:
    api = module_folder(API)
    names = [
        f"engine_api.{p.stem}" for p in api.glob("*.py") if p.stem not in ("__init__", "__main__")
    ]
    names += ["engine_api.__main__", *(f"{module_folder(p).name}.plugin" for p in ENGINES)]
    code = (
        f"import sys, importlib\nfor n in {names!r}:\n    importlib.import_module(n)\n"
        "    assert 'torch' not in sys.modules, n"
    )
    path = [str(package / "src") for package in PACKAGES]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


ENGINE = (
    '[[engines]]\nbackend = "a"\n{partner}'
    '[[engines.runs]]\nenvironment = "plain"\nstatus = "seen"\n{more}'
)
SHIMMED = '[[engines.runs]]\nenvironment = "shimmed"\nstatus = "seen"\n'
ENVIRONMENTS = (
    'rollouts = []\n[environments.plain]\ndevice = "cpu"\n'
    '[environments.shimmed]\ndevice = "cpu"\nshim = true\n'
)


@pytest.mark.parametrize(
    ("partner", "more", "said"),
    [
        ("", SHIMMED, "a: on cpu it runs both plainly and shimmed"),
        ('partner = "b"\n', "", "a: partner 'b' is no other engine"),
        ('partner = "a"\n', "", "a: partner 'a' is no other engine"),
    ],
)
def test_a_matrix_with_two_answers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partner: str, more: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    matrix = importlib.import_module("matrix")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    (tmp_path / "matrix.toml").write_text(ENVIRONMENTS + ENGINE.format(partner=partner, more=more))
    with pytest.raises(ValueError, match=said):
        matrix.load()
