"""The devices that have kernels of FP8."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from engine_api.errors import RolloutError

__all__ = ["require_fp8"]

_LEAST = (8, 9)
_CPU_INFO = Path("/proc/cpuinfo")


def require_fp8(
    device: torch.device,
    what: str,
    *,
    kernels: str,
    where: str,
    remedy: str,
    flags: Collection[str] = (),
    cpu: str = "",
) -> None:
    """Raise ``RolloutError`` for a device without kernels of FP8.

    Args:
        device: the device that serves.
        what: text of the error, such as ``this device has no FP8 cache``.
        kernels: subject of the reason on a GPU, such as ``block FP8 kernels``.
        where: place of the error.
        remedy: the error's remedy.
        flags: flags of CPUs in ``/proc/cpuinfo``, of which one suffices. Without any, no CPU fits.
        cpu: reason of the error on a CPU. An empty text is the reason on a GPU.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _LEAST:
            return
        found = ".".join(map(str, capability))
    else:
        if not _cpu_flags().isdisjoint(flags):
            return
        found = "none"
    needs = f"{kernels} need compute capability 8.9, {device} has {found}"
    why = cpu if device.type == "cpu" and cpu else needs
    raise RolloutError(what, where=where, why=why, remedy=remedy)


def _cpu_flags() -> frozenset[str]:
    """Return the flags of this machine's CPUs, of which other systems than Linux name none."""
    if not _CPU_INFO.exists():
        return frozenset()
    return frozenset(_CPU_INFO.read_text(encoding="utf-8").split())
