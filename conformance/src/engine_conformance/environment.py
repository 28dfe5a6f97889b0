"""Facts about the machine, the versions and the suite for a report. Imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from functools import cache
from pathlib import Path

import engine_conformance
from engine_api.devices import cuda_devices, cuda_is_simulated, npu_is_simulated
from engine_api.plugin import CONTRACT

__all__ = ["SHIMMED", "SIMULATED", "devices_of", "environment", "reported", "sources", "suite"]

# The name in a report of a CPU that answered in CUDA's place.
SHIMMED = "cpu (shimmed)"
# The name in a report of a device that is made of CPU tensors.
SIMULATED = "simulated"
_VERSIONS = ("torch", "transformers", "numpy", "safetensors", "engine-api", "engine-conformance")


@cache
def suite() -> dict[str, str]:
    """Return the suite's version, the contract that it tests, and the SHA-256 of all its files."""
    digest = _digest(Path(engine_conformance.__file__).parent)
    return {"version": engine_conformance.__version__, "contract": CONTRACT, "digest": digest}


def sources(*modules: str) -> dict[str, str]:
    """Return the SHA-256 of the files of each module's top-level package, by package name.

    Two builds may have one version, which the hash tells apart. Nothing is imported.
    """
    found: dict[str, str] = {}
    for name in sorted({module.partition(".")[0] for module in modules}):
        spec = importlib.util.find_spec(name)
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        if path := next((Path(place) for place in places if place and Path(place).exists()), None):
            found[name] = _digest(path)
    return found


def _digest(root: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files of a folder."""
    if root.is_file():
        return hashlib.sha256(root.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


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
