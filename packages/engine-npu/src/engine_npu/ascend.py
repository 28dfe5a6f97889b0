"""The parts of Ascend's stack on this host, which are driver, CANN and Python packages.

The module imports neither torch nor torch_npu.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine_api.devices import cuda_devices

__all__ = ["NAME", "VISIBLE", "Host", "look", "visible_devices"]

# The device's name in torch and in the registry.
NAME = "npu"

# torch_npu reads this variable in torch_npu/npu/__init__.py, _parse_visible_devices.
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

# torch_npu calls drvGetDevNum of this library to count devices (_raw_device_count_ascend_hal).
_DRIVER = "libascend_hal.so"

# `import torch_npu` fails without these libraries.
_LIBRARIES = ("libhccl.so", "libascendcl.so")

_NODES = Path("/dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The parts of Ascend's stack that were found on a host.

    Attributes:
        npus: number of the driver's devices, or of device files where its library cannot be loaded.
        driver: true if the driver's library answers.
        visible: number of devices that ``ASCEND_RT_VISIBLE_DEVICES`` leaves to this process.
        cann: the toolkit's version, "" where its folder states none, None where it is absent.
        libraries: CANN's libraries that are not on ``LD_LIBRARY_PATH``.
        torch: installed version, or None.
        torch_npu: installed version, or None.
        mindspeed: installed version, or None.
        torch_cuda: the CUDA version that torch was built for, or None.
        cuda_devices: number of the CUDA driver's devices.
        megatron_first: true if this process imported Megatron-core before MindSpeed's adaptor.
    """

    npus: int = 0
    driver: bool = False
    visible: int = 0
    cann: str | None = None
    libraries: tuple[str, ...] = ()
    torch: str | None = None
    torch_npu: str | None = None
    mindspeed: str | None = None
    torch_cuda: str | None = None
    cuda_devices: int = 0
    megatron_first: bool = False


def look() -> Host:
    """Return the state of this host."""
    answered = _count_by_driver()
    count = len(list(_NODES.glob("davinci[0-9]*"))) if answered is None else answered
    return Host(
        npus=count,
        driver=answered is not None,
        visible=visible_devices(count),
        cann=_cann(),
        libraries=_absent_libraries(),
        torch=_version("torch"),
        torch_npu=_version("torch_npu"),
        mindspeed=_version("mindspeed"),
        torch_cuda=_torch_cuda(),
        cuda_devices=cuda_devices(),
        megatron_first=megatron_is_first(sys.modules),
    )


def megatron_is_first(modules: Iterable[str]) -> bool:
    """Return true if modules include Megatron-core but not MindSpeed's adaptor.

    The adaptor must be imported first.
    """
    return "megatron.core" in modules and "mindspeed.megatron_adaptor" not in modules


def visible_devices(count: int) -> int:
    """Return how many of ``count`` devices this process may use.

    The environment variable is parsed as torch_npu parses it.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        return count
    # The list ends at the first character that is no digit or comma. Ids must ascend, and ids of
    # absent devices do not count.
    text = re.match(r"[0-9,]*", given)
    ids = [int(word) for word in (text.group() if text else "").split(",") if word]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        return 0
    return sum(1 for device in ids if device < count)


def _count_by_driver() -> int | None:
    """Return the driver's number of devices, or None where its library is absent or refuses."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    count = ctypes.c_int(0)
    return count.value if driver.drvGetDevNum(ctypes.byref(count)) == 0 else None


def _version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, or None.

    torch's own version does not tell, because PyPI's CUDA build has no ``+cu…`` suffix.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return None
    found = re.search(r"^cuda[^=\n]*=\s*'([^']+)'", file.read_text(), re.MULTILINE)
    return found.group(1) if found else None


def _cann() -> str | None:
    """Return CANN's version, "" where it is not stated, or None where CANN is absent.

    The folder is the one that ``set_env.sh`` names, which torch_npu reads too.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    if home is None or not Path(home).is_dir():
        return None
    folder = Path(home)
    files = [*folder.glob("*/ascend_toolkit_install.info"), *folder.glob("version.cfg")]
    for file in sorted(files):
        text = file.read_text(errors="replace")
        if found := re.search(r"version=\[?(?:[^\]:\n]*:)?([0-9][^\]\s]*)", text):
            return found.group(1)
    return ""


def _absent_libraries() -> tuple[str, ...]:
    """Return CANN's libraries that are not on ``LD_LIBRARY_PATH``."""
    entries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [Path(entry) for entry in entries if entry]

    def is_absent(name: str) -> bool:
        return not any((folder / name).exists() for folder in folders)

    return tuple(name for name in _LIBRARIES if is_absent(name))
