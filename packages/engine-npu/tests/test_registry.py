"""Missing parts of a host, which the trace names with a remedy and without importing torch_npu."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_api import EngineConfig, EngineRegistry, ModelSource
from engine_api.devices import SIMULATED_NPU
from engine_api.errors import PluginUnavailable
from engine_megatron.plugin import TESTED_VERSIONS as MEGATRON_VERSIONS
from engine_npu import ascend, probe
from engine_npu.ascend import VISIBLE, Host, look, megatron_is_first, visible_devices
from engine_npu.plugin import FSDP, MEGATRON, MINDSPEED
from engine_npu.versions import MINDSPEED as MINDSPEED_LINE
from engine_npu.versions import TORCH_NPU

WHOLE = Host(
    npus=8,
    driver=True,
    visible=8,
    cann="9.1.0",
    torch="2.12.0+cpu",
    torch_npu="2.12.0",
    mindspeed="0.16.0",
)

# Each entry holds the fields that differ from a whole host, and words of the reason and the remedy.
LACKS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"npus": 0, "visible": 0},
        "shows no Ascend NPU; torch_npu is installed all the same",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ),
    ({"npus": 0, "visible": 0, "torch_npu": None}, "shows no Ascend NPU", "npu-smi info"),
    (
        {"npus": 0, "visible": 0, "torch_npu": None, "cuda_devices": 2},
        "it has 2 CUDA devices",
        "use another device",
    ),
    (
        {"driver": False},
        "8 NPU device files, but the driver's libascend_hal.so",
        "/usr/local/Ascend/driver",
    ),
    ({"visible": 0}, f"{VISIBLE} hides all 8", "unset it"),
    (
        {"torch": None},
        "torch is not installed",
        "pip install torch==2.12.0 --index-url https://download.pytorch.org/whl/cpu && ",
    ),
    (
        {"torch_npu": None},
        "8 NPUs, but torch_npu is not installed",
        "pip install torch_npu==2.12.0.post2 pyyaml setuptools",
    ),
    (
        {"torch_cuda": "13.0"},
        "built for CUDA 13.0: torch_npu refuses two vendors'",
        "one environment per vendor",
    ),
    (
        {"torch_cuda": "13.0", "cuda_devices": 4},
        "and the host has 4 CUDA devices",
        "CPU build of torch",
    ),
    (
        {"torch_npu": "2.7.1"},
        "torch_npu 2.7.1 is not in the table; it has: torch_npu 2.13.0 with torch 2.13.0",
        "pip install",
    ),
    (
        {"torch": "2.13.0+cpu"},
        "torch_npu 2.12.0 is for torch 2.12.0, installed is 2.13.0+cpu",
        "pip install torch==2.12.0 --index-url",
    ),
    ({"cann": None}, "CANN is not set up", "source .../set_env.sh"),
    ({"libraries": ("libhccl.so",)}, "CANN's libhccl.so are not on LD_LIBRARY_PATH", "set_env.sh"),
    ({"cann": "8.5.0"}, "torch_npu 2.12.0 is for CANN 9.1, installed is 8.5.0", "install CANN 9.1"),
]
MINDSPEED_LACKS: list[tuple[dict[str, Any], str, str]] = [
    ({"mindspeed": None}, "MindSpeed is not installed", "git clone -b core_r0.16.0"),
    (
        {"mindspeed": "0.12.1"},
        "MindSpeed 0.12.1 is not in the table; it has: MindSpeed 0.16.0",
        "git clone",
    ),
    (
        {"megatron_first": True},
        "Megatron-core was imported before MindSpeed's adaptor",
        "before anything imports megatron.core",
    ),
]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the probes look at a given host."""
    monkeypatch.delenv(SIMULATED_NPU, raising=False)
    monkeypatch.setattr(probe, "missing", lambda: None)
    return lambda host: monkeypatch.setattr(probe, "look", lambda: host)


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    LACKS,
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_fsdp_lacks_is_named(
    on: Any, changes: dict[str, Any], reason: str, remedy: str
) -> None:
    on(replace(WHOLE, **changes))
    with pytest.raises(PluginUnavailable) as caught:
        EngineRegistry.resolve(backend="fsdp2", device="npu")
    assert len(caught.value.trace) == 1
    assert "npu by engine-npu==0.1.0 (engine_npu.plugin:FSDP): rejected: " in caught.value.trace[0]
    assert reason in caught.value.trace[0]
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [*LACKS, *MINDSPEED_LACKS],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("backend", ["megatron", "mindspeed_megatron"])
def test_what_megatron_lacks_is_named(
    on: Any, backend: str, changes: dict[str, Any], reason: str, remedy: str
) -> None:
    on(replace(WHOLE, **changes))
    with pytest.raises(PluginUnavailable) as caught:
        EngineRegistry.resolve(backend=backend, device="npu")
    assert reason in caught.value.trace[0]
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("backend", "model_type", "target"),
    [
        ("fsdp", "language_model", "engine_npu.engine:NPUFSDPEngineWithLMHead"),
        ("fsdp2", "language_model", "engine_npu.engine:NPUFSDPEngineWithLMHead"),
        ("fsdp2", "value_model", "engine_npu.engine:NPUFSDPEngineWithValueHead"),
        ("megatron", "language_model", "engine_npu.megatron:MindSpeedEngineWithLMHead"),
        ("megatron", "value_model", "engine_npu.megatron:MindSpeedEngineWithValueHead"),
        (
            "mindspeed_megatron",
            "language_model",
            "engine_npu.megatron:MindSpeedMegatronEngineWithLMHead",
        ),
    ],
)
def test_a_whole_host_is_accepted(on: Any, backend: str, model_type: str, target: str) -> None:
    on(WHOLE)
    found = EngineRegistry.resolve(backend=backend, model_type=model_type, device="npu")
    assert (found.row.target, found.device) == (target, "npu")
    assert [c.accepted for c in found.trace] == [True]


@pytest.mark.parametrize("line", TORCH_NPU, ids=lambda line: line.version)
def test_every_line_of_the_table_is_accepted(on: Any, line: Any) -> None:
    for cann in (line.cann or "9.1", f"{line.cann or '9.1'}.0"):
        on(replace(WHOLE, torch=f"{line.torch}+cpu", torch_npu=line.version, cann=cann))
        assert FSDP.probe("npu").ok


def test_an_npu_that_was_asked_for_is_never_a_cpu(on: Any) -> None:
    on(replace(WHOLE, npus=0))
    with pytest.raises(PluginUnavailable, match="cannot run on device 'npu' here"):
        EngineRegistry.create(
            backend="fsdp2", device="npu", config=EngineConfig(model=ModelSource(path="nowhere"))
        )


def test_auto_says_why_it_left_the_npu_out(on: Any) -> None:
    on(replace(WHOLE, torch_npu=None))
    found = EngineRegistry.resolve(backend="fsdp2")
    assert [(c.device, c.accepted) for c in found.trace] == [
        ("cuda", False),
        ("npu", False),
        ("cpu", True),
    ]
    assert "torch_npu is not installed" in str(found.trace[1])


def test_auto_takes_the_npu(on: Any) -> None:
    on(WHOLE)
    assert EngineRegistry.resolve(backend="fsdp2").device == "npu"


@pytest.mark.parametrize("plugin", [FSDP, MEGATRON, MINDSPEED], ids=lambda plugin: plugin.name)
def test_other_devices_are_refused(plugin: Any) -> None:
    assert not plugin.probe("cuda").ok


def test_the_stand_in_is_no_mindspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMULATED_NPU, "1")
    assert FSDP.probe("npu").ok
    assert "no MindSpeed" in MEGATRON.probe("npu").reason


def test_mindspeed_and_engine_megatron_speak_of_one_megatron() -> None:
    assert all(
        version.startswith(f"{MINDSPEED_LINE.megatron_core}.") for version in MEGATRON_VERSIONS
    )


def test_the_order_of_imports_is_seen() -> None:
    assert megatron_is_first({"megatron.core", "torch"})
    assert not megatron_is_first({"megatron.core", "mindspeed.megatron_adaptor"})
    assert not megatron_is_first({"mindspeed.megatron_adaptor"})


@pytest.mark.parametrize(
    ("given", "count"),
    [(None, 4), ("0,1", 2), ("2", 1), ("", 0), ("0,7", 1), ("1,0", 0), ("0,1x,2", 2), ("none", 0)],
)
def test_visible_devices_are_read_as_torch_npu_reads_them(
    monkeypatch: pytest.MonkeyPatch, given: str | None, count: int
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VISIBLE, given)
    assert visible_devices(4) == count


def test_a_host_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Driver:
        @staticmethod
        def drvGetDevNum(count: Any) -> int:  # noqa: N802 - its name in the library
            count._obj.value = 2
            return 0

    toolkit = tmp_path / "toolkit"
    libraries = tmp_path / "lib64"
    info = toolkit / "x86_64-linux" / "ascend_toolkit_install.info"
    metadata = tmp_path / "torch_npu-2.12.0.dist-info" / "METADATA"
    for folder in (info.parent, libraries, metadata.parent):
        folder.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    metadata.write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.12.0\n")
    (libraries / "libhccl.so").touch()
    real = ctypes.CDLL
    monkeypatch.setattr(
        ascend.ctypes, "CDLL", lambda name: Driver if name == "libascend_hal.so" else real(name)
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(toolkit))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{libraries}:")
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    host = look()
    assert (host.npus, host.driver, host.visible) == (2, True, 2)
    assert (host.cann, host.libraries, host.torch_npu) == ("9.1.0", ("libascendcl.so",), "2.12.0")


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_torch_s_build_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, cuda: str | None
) -> None:
    (tmp_path / "version.py").write_text(
        f"__version__ = '2.12.0'\n{line}\nhip: Optional[str] = None\n"
    )
    monkeypatch.setattr(
        ascend.importlib.util,
        "find_spec",
        lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")),
    )
    assert look().torch_cuda == cuda


def test_device_files_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(ascend, "_NODES", tmp_path)
    host = look()
    assert (host.npus, host.driver) == (2, False)


IMPORTS = """
import sys
from engine_npu.plugin import FSDP, MEGATRON
for plugin in (FSDP, MEGATRON):
    plugin.probe("npu")
assert not {"torch", "torch_npu", "mindspeed", "megatron"} & set(sys.modules)
"""


def test_probing_imports_neither_torch_nor_torch_npu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
