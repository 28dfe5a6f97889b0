"""Whether an NPU can be used here, and if not, the first thing that is missing and what to install. Imports no torch."""

from __future__ import annotations

from engine_api.devices import npu_is_simulated, torch_version
from engine_api.plugin import ProbeResult
from engine_megatron.plugin import missing
from engine_npu.ascend import NAME, VISIBLE, Host, look
from engine_npu.versions import (
    MINDSPEED,
    TORCH_NPU,
    mindspeed_table,
    torch_npu_line,
    torch_npu_table,
)

__all__ = ["probe_fsdp", "probe_megatron", "probe_stack"]

_MINDSPEED = f"git clone -b {MINDSPEED.branch} https://gitcode.com/Ascend/MindSpeed.git && pip install --no-deps -e MindSpeed"


def probe_fsdp(device: str) -> ProbeResult:
    """The probe of the FSDP rows."""
    if device != NAME:
        return _no(f"no support for {device}", "use npu; engine-fsdp serves cuda and cpu")
    return probe_stack()


def probe_stack() -> ProbeResult:
    """Whether torch runs on an NPU here."""
    return _simulated() if npu_is_simulated() else check_stack(look())


def probe_megatron(device: str) -> ProbeResult:
    """The probe of the Megatron and MindSpeed rows."""
    if device != NAME:
        return _no(f"no support for {device}", "use npu; engine-megatron serves cuda")
    if npu_is_simulated():
        return _no("the simulated npu has no MindSpeed", "use backend fsdp2, or an Ascend host")
    host = look()
    stack, mindspeed = check_stack(host), check_mindspeed(host)
    return (
        stack
        if not stack.ok
        else mindspeed
        if not mindspeed.ok
        else missing() or ProbeResult(ok=True)
    )


def check_stack(host: Host) -> ProbeResult:
    """Driver, devices, torch, torch_npu and CANN of a host, in the order in which they are installed."""
    for problem in (_device(host), _packages(host), _cann(host)):
        if problem is not None:
            return problem
    return ProbeResult(ok=True)


def check_mindspeed(host: Host) -> ProbeResult:
    """MindSpeed, and whether it can still be applied in this process."""
    if host.mindspeed is None:
        return _no("MindSpeed is not installed, which Megatron-core needs on an NPU", _MINDSPEED)
    if host.mindspeed != MINDSPEED.version:
        return _no(
            f"MindSpeed {host.mindspeed} is not in the table; it has: {mindspeed_table()}",
            _MINDSPEED,
        )
    if host.megatron_first:
        return _no(
            "Megatron-core was imported before MindSpeed's adaptor, which replaces parts of it",
            "create the NPU engine before anything imports megatron.core, or import mindspeed.megatron_adaptor first",
        )
    return ProbeResult(ok=True)


def _device(host: Host) -> ProbeResult | None:
    if host.npus == 0:
        also = f"; it has {host.cuda_devices} CUDA devices" if host.cuda_devices else ""
        broken = (
            "; torch_npu is installed all the same, and without a driver breaks `import torch`"
            if host.torch_npu
            else ""
        )
        cure = (
            "; pip uninstall torch_npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            if host.torch_npu
            else ""
        )
        return _no(
            f"this host shows no Ascend NPU{also}{broken}",
            f"check npu-smi info and the driver, or use another device{cure}",
        )
    if not host.driver:
        return _no(
            f"{host.npus} NPU device files, but the driver's libascend_hal.so cannot be loaded or refuses",
            "install the driver and firmware, or in a container mount /usr/local/Ascend/driver and put its lib64/driver on LD_LIBRARY_PATH",
        )
    if host.visible == 0:
        return _no(
            f"{VISIBLE} hides all {host.npus} NPUs from this process",
            f"unset it, or list devices in ascending order: {VISIBLE}=0,1",
        )
    return None


def _packages(host: Host) -> ProbeResult | None:
    wanted = f"{_torch(TORCH_NPU[1].torch)} && pip install torch_npu=={TORCH_NPU[1].version} pyyaml setuptools"
    if host.torch is None:
        return _no("torch is not installed", wanted)
    if host.torch_npu is None:
        return _no(f"the driver shows {host.npus} NPUs, but torch_npu is not installed", wanted)
    if host.torch_cuda is not None:
        both = f" (and the host has {host.cuda_devices} CUDA devices)" if host.cuda_devices else ""
        return _no(
            f"torch {host.torch} is built for CUDA {host.torch_cuda}{both}: torch_npu refuses two vendors' accelerators in one process",
            "one environment a vendor: install a CPU build of torch beside torch_npu",
        )
    line = torch_npu_line(host.torch_npu)
    if line is None:
        return _no(
            f"torch_npu {host.torch_npu} is not in the table; it has: {torch_npu_table()}", wanted
        )
    if host.torch.partition("+")[0] != line.torch:
        return _no(
            f"torch_npu {line.version} is for torch {line.torch}, installed is {host.torch}",
            _torch(line.torch),
        )
    return None


def _torch(version: str) -> str:
    """PyPI's build is CUDA's."""
    return f"pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu"


def _cann(host: Host) -> ProbeResult | None:
    line = torch_npu_line(host.torch_npu or "")
    wanted = f"install CANN {(line and line.cann) or '9.1'} (toolkit and the kernels of this NPU), then: source .../set_env.sh"
    broken = "torch_npu is installed without it, which breaks `import torch`"
    if host.cann is None:
        return _no(f"CANN is not set up (ASCEND_HOME_PATH names no folder); {broken}", wanted)
    if host.libraries:
        return _no(
            f"CANN's {' and '.join(host.libraries)} are not on LD_LIBRARY_PATH; {broken}", wanted
        )
    if line and line.cann and host.cann and not f"{host.cann}.".startswith(f"{line.cann}."):
        return _no(
            f"torch_npu {line.version} is for CANN {line.cann}, installed is {host.cann}", wanted
        )
    return None


def _simulated() -> ProbeResult:
    if torch_version() is None:
        return _no("torch is not installed", "pip install torch")
    return ProbeResult(ok=True, reason="simulated")


def _no(reason: str, remedy: str) -> ProbeResult:
    return ProbeResult(ok=False, reason=reason, remedy=remedy)
