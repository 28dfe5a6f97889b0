"""The NPU as a device of ``engine_api.devices``, with HCCL, generators and kernels.

Module ``plugin`` registers it. torch_npu is imported by ``load`` only.
"""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from typing import Any

from engine_api.devices import Accelerator, Device, npu_is_simulated
from engine_api.errors import PluginLoadError
from engine_api.plugin import ProbeResult
from engine_npu.ascend import NAME, VISIBLE
from engine_npu.probe import probe_stack

__all__ = ["FUSED", "Npu", "load"]

# The fused attention's name in ``model.attention``.
FUSED = "npu_fusion"


class Npu(Accelerator):
    """The device type of Ascend NPUs, which torch calls ``torch.npu``."""

    name = NAME
    visible = VISIBLE
    process_groups = "cpu:gloo,npu:hccl"

    def __init__(self) -> None:
        # Tensors of the simulated device are on the host.
        if npu_is_simulated():
            self.process_groups = "cpu:gloo,npu:gloo"
            self.pins_memory = False
            self.has_streams = False

    @property
    def module(self) -> Any:
        """The module ``torch.npu``, which exists once torch_npu is imported.

        With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch does not import it by itself.
        """
        if not npu_is_simulated():
            load()
        return super().module

    def probe(self) -> ProbeResult:
        """Probe driver, torch_npu and CANN (see ``probe_stack``)."""
        return probe_stack()

    def adopt_local_rank(self) -> None:
        """Select this rank's device (see ``Device.adopt_local_rank``).

        It must be called before process groups are created, because torch knows no HCCL before
        torch_npu is imported.
        """
        if not npu_is_simulated():
            load()
        super().adopt_local_rank()

    def room(self) -> tuple[str, int]:
        """Return the current device's name and its free memory in bytes.

        The name contains the environment variable that selects this process's devices. For the
        simulated device, name and memory are the host's.
        """
        if npu_is_simulated():
            return Device.room(self)
        name = f"{os.environ.get(VISIBLE, '')}:{self.module.current_device()}"
        return name, self.module.mem_get_info()[0]

    def attention(self, compute: str) -> tuple[str, ...]:
        """Return the names of the device's attention kernels for a compute dtype.

        CANN's fused attention computes in half precision, as kernels of other accelerators do. The
        simulated device has none.
        """
        in_half_precision = compute in ("bfloat16", "float16")
        return (FUSED,) if in_half_precision and not npu_is_simulated() else ()

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Create a process group on a store, by HCCL or, for the simulated device, by gloo."""
        if npu_is_simulated():
            gloo = super().process_group(store, rank, size, timeout)
            return _simulated_group(gloo, store, rank, size)
        torch_npu = load()
        # The public alias of this class takes no options. torch_npu's own helper sets them like
        # this.
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)  # noqa: SLF001


def _simulated_group(gloo: Any, store: Any, rank: int, size: int) -> Any:
    """Wrap gloo in a group of torch's dispatcher.

    The stand-in's tensors need it, because gloo itself takes only tensors of the host.
    """
    import torch
    import torch.distributed as dist

    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    for name in ("cpu", NAME):
        group._register_backend(torch.device(name), kind, gloo)  # noqa: SLF001 - as torch does
    return group


def load() -> Any:
    """Import torch_npu and return it.

    Raises:
        PluginLoadError: the import failed; the error holds its message.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        raise PluginLoadError(
            "torch_npu could not be imported",
            where="engine-npu",
            why=str(error).splitlines()[0],
            remedy="`python -m engine_api doctor` names what is missing",
        ) from error
