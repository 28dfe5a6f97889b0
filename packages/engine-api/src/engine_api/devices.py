"""The devices of this machine, and the properties of each kind of device that engines ask for.

torch is imported only when a property needs it. This is the only module of the contract that names
a vendor's devices.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api.discovery import discover
from engine_api.errors import ConfigError
from engine_api.plugin import ENGINE_GROUP, ProbeResult

if TYPE_CHECKING:
    import torch

# In the order in which `auto` looks for them.
DEVICES = ("cuda", "npu", "cpu")

# This environment variable is set where the CPU stands in for CUDA, so that an engine that knows
# only CUDA can be tested. Only the conformance suite's shim may set it, for its ranks.
SIMULATED_CUDA = "ENGINE_SIMULATED_CUDA"

# This one does the same for a device called npu, which has only arithmetic and copies.
SIMULATED_NPU = "ENGINE_SIMULATED_NPU"


def cuda_is_simulated() -> bool:
    """Return whether the CPU stands in, or will stand in, for ``torch.cuda`` in this process."""
    return bool(os.environ.get(SIMULATED_CUDA))


def npu_is_simulated() -> bool:
    """Return whether CPU tensors stand in, or will stand in, for a device npu in this process."""
    return bool(os.environ.get(SIMULATED_NPU))


@cache
def cuda_devices() -> int:
    """Return the number of CUDA devices that the driver shows to this process.

    It is 0 without a driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_version() -> str | None:
    """Return the installed torch's version, read from its metadata, or None without torch."""
    try:
        return _installed_torch()
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _installed_torch() -> str:
    # Reading takes 10 ms, and every engine that is made asks. An error is not kept: torch may be
    # installed while a notebook runs.
    return importlib.metadata.version("torch")


def probe_torch(device: str) -> ProbeResult:
    """Return whether torch is installed and ``device`` (cpu or cuda) can be used.

    It is the probe of a plain torch plug-in.
    """
    if device not in ("cpu", "cuda"):
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    return probe_device(device)


def probe_device(name: str) -> ProbeResult:
    """Return whether torch's operators run on a kind of device here, whichever plug-in adds it."""
    try:
        return device_of(name).probe()
    except ConfigError as error:
        return ProbeResult(ok=False, reason=error.what, remedy=error.remedy)


def find_version_problem(distribution: str, tested: str, remedy: str) -> ProbeResult | None:
    """Return the answer of a plug-in whose library is absent or of an untested version, or None.

    Args:
        distribution: name of the library on the package index.
        tested: the one version that the plug-in was tested with.
        remedy: the command that installs it.
    """
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ProbeResult(ok=False, reason=f"{distribution} is not installed", remedy=remedy)
    if version != tested:
        return ProbeResult(
            ok=False,
            reason=f"expected {distribution} {tested}, got {version}, which is not tested",
            remedy=remedy,
        )
    return None


class Device:
    """The properties of a kind of device, so that an engine's code names none.

    The values of this class are the CPU's. An accelerator derives from ``Accelerator`` and is
    registered with ``register_device``.
    """

    name = "cpu"
    """Name of the device type in torch."""

    has_streams = False
    """True if work is queued on streams, and torch's module of the device has streams and
    events."""

    process_groups = "gloo"
    """Argument of torch.distributed: the backend of host tensors, and of the device's tensors."""

    pins_memory = False
    """True if host memory can be pinned, for copies that do not wait."""

    fused_optimizer = True
    """True if torch's AdamW has one kernel for all of its arithmetic."""

    compiles_elementwise = False
    """True if torch.compile makes one kernel of many elementwise ones, and is worth its time."""

    float32_products = False
    """True if matrices in half precision can be multiplied into float32."""

    transformer_engine = False
    """True if NVIDIA's Transformer Engine has kernels for the device."""

    mixer_kernels = False
    """True if layers of linear attention have kernels for the device in packages of their own."""

    @property
    def module(self) -> Any:
        """Torch's module of the device, with streams, events, generators and memory."""
        import torch

        return torch.get_device_module(self.name)

    def probe(self) -> ProbeResult:
        """Return whether the device can be used here, without importing torch."""
        if torch_version() is None:
            return ProbeResult(
                ok=False, reason="torch is not installed", remedy="pip install torch"
            )
        return ProbeResult(ok=True)

    def attention(self, compute: str) -> tuple[str, ...]:
        """Return the kernels for packed documents in this dtype, the preferred one first.

        sdpa, which every device has, is not among them.
        """
        del compute
        return ()

    def adopt_local_rank(self) -> None:
        """Make the device that the launcher assigned to this process the current one.

        Without a launcher the caller's current device stays. Raises ``ConfigError`` if there are
        fewer devices than ranks.
        """

    def current(self) -> torch.device:
        """Return the device that this process computes on."""
        import torch

        return torch.device(self.name)

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""

    def room(self) -> tuple[str, int]:
        """Return the current device's name on its host and its free memory in bytes.

        The name is "" for the host's memory.
        """
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            kilobytes = next(
                int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
        return "", kilobytes * 1024

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of the device's own generator, or None if it has none.

        torch's own generator is not included.
        """
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that ``rng_state`` returned."""

    def group_timeout(self, timeout: timedelta) -> timedelta:
        """Return the timeout of process groups in which a rank may be late by ``timeout``."""
        return timeout

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a process group for this device's tensors, separate from torch's default one."""
        import torch.distributed as dist

        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


class Accelerator(Device):
    """A device with memory, streams and a generator of its own, behind ``torch.<name>``."""

    has_streams = True
    visible = ""
    """Name of the environment variable that hides devices from a process."""
    pins_memory = True

    def adopt_local_rank(self) -> None:
        """Make the device of number ``LOCAL_RANK`` current.

        See ``Device.adopt_local_rank``.
        """
        if "LOCAL_RANK" not in os.environ:
            return
        local = int(os.environ["LOCAL_RANK"])
        count = int(self.module.device_count())
        if local >= count:
            raise ConfigError(
                "device",
                f"LOCAL_RANK is {local}, but {count} {self.name} devices are visible",
                remedy="give each process a device: torchrun --nproc-per-node, "
                f"ray.gpus_per_worker, {self.visible}",
            )
        self.module.set_device(local)

    def current(self) -> torch.device:
        """Return the current device with its index.

        See ``Device.current``.
        """
        import torch

        return torch.device(self.name, self.module.current_device())

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""
        self.module.empty_cache()

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of the current device's generator."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that ``rng_state`` returned."""
        self.module.set_rng_state(state)


class Cuda(Accelerator):
    """NVIDIA's devices."""

    name = "cuda"
    process_groups = "cpu:gloo,cuda:nccl"
    visible = "CUDA_VISIBLE_DEVICES"
    compiles_elementwise = True
    float32_products = True
    transformer_engine = True
    mixer_kernels = True

    @property
    def pins_memory(self) -> bool:
        """False where the host's memory stands in for CUDA's."""
        return not cuda_is_simulated()

    def probe(self) -> ProbeResult:
        """Return whether torch is built with CUDA and the driver shows a device."""
        version = torch_version()
        if version is None:
            return super().probe()
        if version.endswith("+cpu"):
            return ProbeResult(
                ok=False,
                reason=f"torch {version} is built without CUDA",
                remedy="install a CUDA build of torch, or use device=cpu",
            )
        if cuda_devices() == 0:
            hidden = os.environ.get(self.visible)
            why = f" ({self.visible}={hidden!r})" if hidden is not None else ""
            return ProbeResult(
                ok=False,
                reason=f"the CUDA driver shows no device{why}",
                remedy="check nvidia-smi, or use device=cpu",
            )
        return ProbeResult(ok=True)

    def room(self) -> tuple[str, int]:
        """Return the current device's UUID and its free memory in bytes."""
        properties = self.module.get_device_properties(self.module.current_device())
        return str(properties.uuid), self.module.mem_get_info()[0]

    def attention(self, compute: str) -> tuple[str, ...]:
        """Return varlen (FlashAttention) in half precision, preceded by cuDNN's since Hopper."""
        if compute not in ("bfloat16", "float16"):
            return ()
        return ("cudnn", "varlen") if self.module.get_device_capability()[0] >= 9 else ("varlen",)

    def group_timeout(self, timeout: timedelta) -> timedelta:
        """Return a timeout that is 60 seconds longer than ``timeout``.

        NCCL's own watchdog ends the process, so ``engine_api.heartbeat`` must act before it.
        """
        return timeout + timedelta(seconds=60)

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a new NCCL process group."""
        import torch.distributed as dist

        # The annotations know only one of its two constructors.
        make: Any = dist.ProcessGroupNCCL
        return make(store, rank, size, timeout=timeout)


_DEVICES: dict[str, Device] = {device.name: device for device in (Device(), Cuda())}


def register_device(device: Device) -> None:
    """Register a kind of device.

    A second one of the same name replaces the first. A plug-in calls it when its descriptor is
    imported, so that every process that looks for plug-ins knows the device.
    """
    _DEVICES[device.name] = device


def move_tensor(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on ``device``, where copies from the host do not wait for queued work.

    CUDA lets the host wait in each copy from memory that is not pinned, but for the smallest ones,
    so that it would never be ahead of the device. A copy to the host waits, because its reader does
    not. A caller that has pinned the tensor must not write to it before the device is there.
    """
    import torch

    target = torch.device(device)
    # Of a device that is not registered nothing is known.
    known = _DEVICES.get(target.type)
    if tensor.device.type != "cpu" or known is None or not known.pins_memory:
        return tensor.to(target)
    # The allocator keeps pinned memory until the copy is done. Memory with gaps, or that is
    # expanded, cannot be pinned as it is.
    return tensor.contiguous().pin_memory().to(target, non_blocking=True)


def device_of(name: str) -> Device:
    """Return the ``Device`` of the name ``name`` (a ``torch.device``'s type).

    Raises ``ConfigError`` if no installed plug-in brings it.
    """
    # A process that made no engine has imported no descriptors, which register their devices.
    if name not in _DEVICES:
        discover(ENGINE_GROUP)
    if name not in _DEVICES:
        raise ConfigError(
            "device",
            f"no installed plug-in brings {name!r}; known: {', '.join(_DEVICES)}",
            remedy=f"pip install engine-{name}" if name in DEVICES else f"use {', '.join(DEVICES)}",
        )
    return _DEVICES[name]
