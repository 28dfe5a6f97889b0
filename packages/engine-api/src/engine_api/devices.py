"""What devices this machine has, and what an engine asks of a kind of device; torch is imported when something is asked.

The only module of the contract that names a vendor's devices.
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

DEVICES = ("cuda", "npu", "cpu")  # in the order in which `auto` looks for them

# Set where the CPU answers in CUDA's place, so that an engine that knows only CUDA can be tested. The conformance suite's
# shim sets it for its ranks; nothing else should.
SIMULATED_CUDA = "ENGINE_SIMULATED_CUDA"

# The same for a device called npu, of which only arithmetic and copies are there.
SIMULATED_NPU = "ENGINE_SIMULATED_NPU"


def cuda_is_simulated() -> bool:
    """Whether ``torch.cuda`` is, or will be, answered by the CPU in this process."""
    return bool(os.environ.get(SIMULATED_CUDA))


def npu_is_simulated() -> bool:
    """Whether a device called npu is, or will be, a stand-in made of CPU tensors in this process."""
    return bool(os.environ.get(SIMULATED_NPU))


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
    if device not in ("cpu", "cuda"):
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    return probe_device(device)


def probe_device(name: str) -> ProbeResult:
    """Whether torch's operators run on a kind of device here, whichever plug-in brings it."""
    try:
        return device_of(name).probe()
    except ConfigError as error:
        return ProbeResult(ok=False, reason=error.what, remedy=error.remedy)


class Device:
    """What an engine asks of a kind of device, so that none of them is named in its code. These are the CPU's answers.

    An accelerator derives from ``Accelerator`` and is made known by ``register_device``.
    """

    name = "cpu"
    has_streams = (
        False  # work is queued on streams, and torch's module of the device has them and events
    )
    process_groups = (
        "gloo"  # what torch.distributed is told: the backend of host tensors, and of the device's
    )
    pins_memory = False  # host memory can be pinned, for copies that do not wait
    fused_optimizer = True  # torch's AdamW has one kernel for all of its arithmetic
    compiles_elementwise = (
        False  # torch.compile makes one kernel of many elementwise ones, and that is worth its time
    )
    float32_products = False  # matrices in half precision can be multiplied into float32
    transformer_engine = False  # NVIDIA's Transformer Engine has kernels for it

    @property
    def module(self) -> Any:
        """Torch's module of the device: streams, events, generators, memory."""
        import torch

        return torch.get_device_module(self.name)

    def probe(self) -> ProbeResult:
        """Whether it can be used here, asked without importing torch."""
        if torch_version() is None:
            return ProbeResult(
                ok=False, reason="torch is not installed", remedy="pip install torch"
            )
        return ProbeResult(ok=True)

    def attention(self, compute: str) -> tuple[str, ...]:
        """Kernels for packed documents in this dtype beyond sdpa, which is everywhere; the preferred first."""
        del compute
        return ()

    def adopt_local_rank(self) -> None:
        """Make the device that the launcher meant for this process the current one; without a launcher the caller's stays.

        Raises ``ConfigError`` where there are fewer devices than ranks.
        """

    def current(self) -> torch.device:
        """The device that this process computes on."""
        import torch

        return torch.device(self.name)

    def empty_cache(self) -> None:
        """Give memory that nobody uses back to the device."""

    def room(self) -> tuple[str, int]:
        """The current device's name among those of its host ("" for the host's memory), and its free bytes."""
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return "", next(
                int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            ) * 1024

    def rng_state(self) -> torch.Tensor | None:
        """The current device's generator, beside torch's own; None where it has none."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""

    def group_timeout(self, timeout: timedelta) -> timedelta:
        """Return the timeout of process groups in which a rank may be late by ``timeout``."""
        return timeout

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A process group of its own for tensors of this device, apart from torch.distributed's default one."""
        import torch.distributed as dist

        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


class Accelerator(Device):
    """A device with memory, streams and a generator of its own, behind ``torch.<name>``."""

    has_streams = True
    visible = ""  # the environment variable by which devices are hidden from a process
    pins_memory = True

    def adopt_local_rank(self) -> None:
        """See ``Device.adopt_local_rank``."""
        if "LOCAL_RANK" not in os.environ:
            return
        local, count = int(os.environ["LOCAL_RANK"]), int(self.module.device_count())
        if local >= count:
            raise ConfigError(
                "device",
                f"LOCAL_RANK is {local}, but {count} {self.name} devices are visible",
                remedy=f"give each process a device: torchrun --nproc-per-node, ray.gpus_per_worker, {self.visible}",
            )
        self.module.set_device(local)

    def current(self) -> torch.device:
        """See ``Device.current``."""
        import torch

        return torch.device(self.name, self.module.current_device())

    def empty_cache(self) -> None:
        """See ``Device.empty_cache``."""
        self.module.empty_cache()

    def rng_state(self) -> torch.Tensor | None:
        """See ``Device.rng_state``."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """See ``Device.set_rng_state``."""
        self.module.set_rng_state(state)


class Cuda(Accelerator):
    """NVIDIA's devices."""

    name = "cuda"
    process_groups = "cpu:gloo,cuda:nccl"
    visible = "CUDA_VISIBLE_DEVICES"
    compiles_elementwise = True
    float32_products = True
    transformer_engine = True

    def probe(self) -> ProbeResult:
        """Torch's build, and the driver."""
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
        """See ``Device.room``."""
        return str(
            self.module.get_device_properties(self.module.current_device()).uuid
        ), self.module.mem_get_info()[0]

    def attention(self, compute: str) -> tuple[str, ...]:
        """FlashAttention by document (varlen) in half precision, and cuDNN's from Hopper on."""
        if compute not in ("bfloat16", "float16"):
            return ()
        return ("cudnn", "varlen") if self.module.get_device_capability()[0] >= 9 else ("varlen",)

    def group_timeout(self, timeout: timedelta) -> timedelta:
        """See ``Device.group_timeout``. NCCL's own watchdog ends the process: ``engine_api.heartbeat`` must come before it."""
        return timeout + timedelta(seconds=60)

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """NCCL's."""
        import torch.distributed as dist

        make: Any = dist.ProcessGroupNCCL  # its annotations know one of its two constructors
        return make(store, rank, size, timeout=timeout)


_DEVICES: dict[str, Device] = {device.name: device for device in (Device(), Cuda())}


def register_device(device: Device) -> None:
    """Make a kind of device known; a second one of its name takes the place of the first.

    To be called where a plug-in's descriptor is imported, so that every process that looks for plug-ins knows the device.
    """
    _DEVICES[device.name] = device


def device_of(name: str) -> Device:
    """What is known of the devices called ``name`` (a ``torch.device``'s type); raises ``ConfigError`` where nothing is."""
    if name not in _DEVICES:
        discover(
            ENGINE_GROUP
        )  # in a process that made no engine: descriptors make their devices known
    if name not in _DEVICES:
        raise ConfigError(
            "device",
            f"no installed plug-in brings {name!r}; known: {', '.join(_DEVICES)}",
            remedy=f"pip install engine-{name}" if name in DEVICES else f"use {', '.join(DEVICES)}",
        )
    return _DEVICES[name]
