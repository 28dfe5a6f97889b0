"""What devices this machine has, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from functools import cache

from engine_api.plugin import ProbeResult

# Set where the CPU answers in CUDA's place, so that an engine that knows only CUDA can be tested. The conformance suite's
# shim sets it for its ranks; nothing else should.
SIMULATED_CUDA = "ENGINE_SIMULATED_CUDA"


def cuda_is_simulated() -> bool:
    """Whether ``torch.cuda`` is, or will be, answered by the CPU in this process."""
    return bool(os.environ.get(SIMULATED_CUDA))


@cache
def cuda_devices() -> int:
    """Number of CUDA devices that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_version() -> str | None:
    """The installed torch's version, read from its metadata; None when it is absent."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def probe_torch(device: str) -> ProbeResult:
    """Whether torch is installed and ``device`` (cpu or cuda) can be used; the probe of a plain torch plug-in."""
    version = torch_version()
    if version is None:
        return ProbeResult(ok=False, reason="torch is not installed", remedy="pip install torch")
    if device == "cpu":
        return ProbeResult(ok=True)
    if device != "cuda":
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    if version.endswith("+cpu"):
        return ProbeResult(ok=False, reason=f"torch {version} is built without CUDA",
                           remedy="install a CUDA build of torch, or use device=cpu")  # fmt: skip
    if cuda_devices() == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        return ProbeResult(ok=False, reason=f"the CUDA driver shows no device{why}",
                           remedy="check nvidia-smi, or use device=cpu")  # fmt: skip
    return ProbeResult(ok=True)
