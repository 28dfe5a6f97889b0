"""The NPU as engines ask for it: HCCL, generators, kernels. ``plugin`` makes it known; torch_npu is imported by ``load``."""

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

FUSED = "npu_fusion"  # model.attention


class Npu(Accelerator):
    """Ascend's devices, behind ``torch.npu``."""

    name = NAME
    visible = VISIBLE
    process_groups = "cpu:gloo,npu:hccl"

    def __init__(self) -> None:
        if npu_is_simulated():  # its tensors lie on the host
            self.process_groups, self.pins_memory, self.has_streams = (
                "cpu:gloo,npu:gloo",
                False,
                False,
            )

    @property
    def module(self) -> Any:
        """``torch.npu``, for which torch_npu is imported: torch does not where ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``."""
        if not npu_is_simulated():
            load()
        return super().module

    def probe(self) -> ProbeResult:
        """See ``probe_stack``."""
        return probe_stack()

    def adopt_local_rank(self) -> None:
        """See ``Device.adopt_local_rank``. Whoever makes process groups asks this first: before, torch knows no HCCL."""
        if not npu_is_simulated():
            load()
        super().adopt_local_rank()

    def room(self) -> tuple[str, int]:
        """By the name that the process was given; the host's where it is simulated."""
        if npu_is_simulated():
            return Device.room(self)
        return (
            f"{os.environ.get(VISIBLE, '')}:{self.module.current_device()}",
            self.module.mem_get_info()[0],
        )

    def attention(self, compute: str) -> tuple[str, ...]:
        """CANN's fused attention over packed documents, in half precision as on other accelerators; not where it is simulated."""
        return (FUSED,) if compute in ("bfloat16", "float16") and not npu_is_simulated() else ()

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """HCCL's, made directly on a store; gloo's where the device is simulated."""
        if npu_is_simulated():
            return _simulated_group(
                super().process_group(store, rank, size, timeout), store, rank, size
            )
        torch_npu = load()
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()  # noqa: SLF001 - the public alias takes no options
        options._timeout = timeout  # noqa: SLF001 - as torch_npu's own helper sets it
        return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)  # noqa: SLF001


def _simulated_group(gloo: Any, store: Any, rank: int, size: int) -> Any:
    """Gloo behind torch's dispatcher, which the stand-in's tensors need: gloo itself takes only the host's."""
    import torch
    import torch.distributed as dist

    group = dist.ProcessGroup(store, rank, size)
    for name in ("cpu", NAME):
        group._register_backend(torch.device(name), dist.ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001 - as torch does
    return group


def load() -> Any:
    """torch_npu, imported; raises ``PluginLoadError`` with what its import says."""
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        raise PluginLoadError(
            "torch_npu could not be imported",
            where="engine-npu",
            why=str(error).splitlines()[0],
            remedy="`python -m engine_api doctor` names what is missing",
        ) from error
