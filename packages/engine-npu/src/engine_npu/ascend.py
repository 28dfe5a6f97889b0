"""What of Ascend's stack this host has: driver, CANN, Python packages. Imports neither torch nor torch_npu."""

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

NAME = "npu"  # torch's, and the registry's
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # read by torch_npu (torch_npu/npu/__init__.py, _parse_visible_devices)
_DRIVER = (
    "libascend_hal.so"  # and drvGetDevNum of it, as torch_npu asks (_raw_device_count_ascend_hal)
)
_LIBRARIES = ("libhccl.so", "libascendcl.so")  # what `import torch_npu` fails without
_NODES = Path("/dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What was found.

    Attributes:
        npus: devices of the driver, or device files where its library cannot be loaded; 0: no NPU.
        driver: whether the driver's library answers.
        visible: of those, how many ``ASCEND_RT_VISIBLE_DEVICES`` leaves to this process.
        cann: the toolkit's version; "" where its folder says none, None where it is absent.
        libraries: those of CANN that are nowhere on ``LD_LIBRARY_PATH``.
        torch, torch_npu, mindspeed: installed versions, or None.
        torch_cuda: the CUDA version that torch was built for, or None.
        cuda_devices: of the CUDA driver.
        megatron_first: Megatron-core was imported in this process before MindSpeed's adaptor.
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
    """This host, now."""
    answered = _of_driver()
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
    """Whether Megatron-core is among imported modules, and MindSpeed's adaptor, which must come before it, is not."""
    return "megatron.core" in modules and "mindspeed.megatron_adaptor" not in modules


def visible_devices(count: int) -> int:
    """How many of ``count`` devices this process may use; the variable is read as torch_npu reads it."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return count
    # Up to the first odd character; ascending; those that are not there end the list.
    text = re.match(r"[0-9,]*", given)
    ids = [int(word) for word in (text.group() if text else "").split(",") if word]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        return 0
    return sum(1 for one in ids if one < count)


def _of_driver() -> int | None:
    """Devices by the driver; None where its library is absent or refuses."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    count = ctypes.c_int(0)
    return count.value if driver.drvGetDevNum(ctypes.byref(count)) == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA of torch's build. Its version alone does not tell: PyPI's CUDA build has no ``+cu…``."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = (
        re.search(r"^cuda[^=\n]*=\s*'([^']+)'", file.read_text(), re.MULTILINE)
        if file.is_file()
        else None
    )
    return found.group(1) if found else None


def _cann() -> str | None:
    """CANN's version: of the folder that ``set_env.sh`` names, and that torch_npu itself looks at."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if home is None or not Path(home).is_dir():
        return None
    for file in sorted(
        [*Path(home).glob("*/ascend_toolkit_install.info"), *Path(home).glob("version.cfg")]
    ):
        if found := re.search(
            r"version=\[?(?:[^\]:\n]*:)?([0-9][^\]\s]*)", file.read_text(errors="replace")
        ):
            return found.group(1)
    return ""


def _absent_libraries() -> tuple[str, ...]:
    folders = [
        Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder
    ]
    return tuple(
        name for name in _LIBRARIES if not any((folder / name).exists() for folder in folders)
    )
