"""The doctor's findings about dependencies: untested versions, and what is absent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from engine_api.__main__ import main
from engine_api.dependencies import check_dependencies
from engine_api.registry import EngineRegistry, RolloutRegistry


class Installed:
    """An environment that holds the given distributions and nothing else."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, version, *requires, extras=()):
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    distributions = importlib.metadata.distributions
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda: distributions(path=[str(tmp_path)])
    )
    EngineRegistry.refresh()
    RolloutRegistry.refresh()
    made = Installed(tmp_path)
    made.add("engine-api", "0.1.0", 'torch<2.15,>=2.11; extra == "torch"', extras=["torch"])
    yield made
    EngineRegistry.refresh()
    RolloutRegistry.refresh()


@pytest.mark.slow
def test_versions_outside_the_bounds_are_named_once_with_the_command(installed, capsys):
    installed.add("torch", "2.15.0+cpu")
    installed.add("engine-fsdp", "0.1.0", "engine-api<0.2,>=0.1", "torch<2.15,>=2.11")
    installed.add("Acme_Engine", "3.0", "engine-api<0.2,>=0.1", "torch>=2.11")

    assert main(["doctor"]) == 0

    (line,) = [one for one in capsys.readouterr().out.splitlines() if "2.15.0" in one]
    assert line == (
        "torch 2.15.0+cpu was not tested: engine-api[torch] and engine-fsdp accept >=2.11,<2.15; "
        'to do: pip install "torch>=2.11,<2.15"'
    )


@pytest.mark.slow
def test_absent_extras_are_listed_with_the_command_and_what_it_adds(installed, capsys):
    installed.add("torch", "2.13.0")
    installed.add(
        "engine-fsdp", "0.1.0", "engine-api>=0.1", 'peft>=0.21; extra == "lora"', extras=["lora"]
    )
    installed.add(
        "engine-npu",
        "0.1.0",
        "engine-fsdp>=0.1",
        'engine-fsdp[lora]>=0.1; extra == "lora"',
        'absent; extra == "old" and python_version < "3"',
        extras=["lora", "old"],
    )

    assert main(["doctor"]) == 0

    out = capsys.readouterr().out
    assert out.endswith(
        "extras that are not installed:\n"
        '  pip install "engine-fsdp[lora]"  adds peft\n'
        '  pip install "engine-npu[lora]"   adds peft\n'
    )
    installed.add("peft", "0.21.2")
    main(["doctor"])
    assert "extras" not in capsys.readouterr().out


def test_an_absent_dependency_makes_the_doctor_fail(installed, capsys):
    installed.add("engine-fsdp", "0.1.0", "engine-api>=0.1", "safetensors<0.9,>=0.4.5")

    assert main(["doctor"]) == 1

    assert (
        "engine-fsdp needs safetensors, which is not installed; "
        'to do: pip install "safetensors>=0.4.5,<0.9"\n'
    ) in capsys.readouterr().out


def test_packages_that_do_not_use_the_contract_are_left_alone(installed):
    installed.add("torch", "2.13.0")
    installed.add("other", "1.0", "torch<2", "nothing")
    found = check_dependencies()
    assert not (found.untested or found.absent or found.extras)


@pytest.mark.parametrize("text", ["torch>=", "-", "a @ ???", "x; extra == ", "café>=1"])
def test_metadata_that_cannot_be_read_break_nothing(installed, text):
    installed.add("odd", "what", "engine-api>=0.1", text, "absent>=1")
    installed.add("absent", "no version")
    check_dependencies()


def test_without_packaging_the_doctor_says_what_it_did_not_check(installed, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    assert "pip install packaging" in capsys.readouterr().out


def test_the_check_imports_no_torch():
    code = (
        "import sys; from engine_api.dependencies import check_dependencies; check_dependencies()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
