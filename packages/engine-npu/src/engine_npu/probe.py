"""The probes, which name the first part that is missing for an NPU and the remedy.

The module imports no torch.
"""

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

_MINDSPEED = (
    f"git clone -b {MINDSPEED.branch} https://gitcode.com/Ascend/MindSpeed.git "
    "&& pip install --no-deps -e MindSpeed"
)


def probe_fsdp(device: str) -> ProbeResult:
    """Return the probe's result for the FSDP rows."""
    if device != NAME:
        return _failed_probe(f"no support for {device}", "use npu; engine-fsdp serves cuda and cpu")
    return probe_stack()


def probe_stack() -> ProbeResult:
    """Return the probe's result for torch on an NPU of this host."""
    if npu_is_simulated():
        return _probe_simulated()
    return check_stack(look())


def probe_megatron(device: str) -> ProbeResult:
    """Return the probe's result for the Megatron and MindSpeed rows."""
    if device != NAME:
        return _failed_probe(f"no support for {device}", "use npu; engine-megatron serves cuda")
    if npu_is_simulated():
        return _failed_probe(
            "the simulated npu has no MindSpeed", "use backend fsdp2, or an Ascend host"
        )
    host = look()
    for result in (check_stack(host), check_mindspeed(host)):
        if not result.ok:
            return result
    return missing() or ProbeResult(ok=True)


def check_stack(host: Host) -> ProbeResult:
    """Check a host's driver, devices, torch, torch_npu and CANN, in the order of installation."""
    for problem in (_check_device(host), _check_packages(host), _check_cann(host)):
        if problem is not None:
            return problem
    return ProbeResult(ok=True)


def check_mindspeed(host: Host) -> ProbeResult:
    """Check that MindSpeed is installed and can still be applied in this process."""
    if host.mindspeed is None:
        return _failed_probe(
            "MindSpeed is not installed, which Megatron-core needs on an NPU", _MINDSPEED
        )
    if host.mindspeed != MINDSPEED.version:
        return _failed_probe(
            f"MindSpeed {host.mindspeed} is not in the table; it has: {mindspeed_table()}",
            _MINDSPEED,
        )
    if host.megatron_first:
        return _failed_probe(
            "Megatron-core was imported before MindSpeed's adaptor, which replaces parts of it",
            "create the NPU engine before anything imports megatron.core, "
            "or import mindspeed.megatron_adaptor first",
        )
    return ProbeResult(ok=True)


def _check_device(host: Host) -> ProbeResult | None:
    """Return the problem of the driver or its devices, or None."""
    if host.npus == 0:
        reason = "this host shows no Ascend NPU"
        remedy = "check npu-smi info and the driver, or use another device"
        if host.cuda_devices:
            reason += f"; it has {host.cuda_devices} CUDA devices"
        if host.torch_npu:
            reason += (
                "; torch_npu is installed all the same, and without a driver breaks `import torch`"
            )
            remedy += "; pip uninstall torch_npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return _failed_probe(reason, remedy)
    if not host.driver:
        return _failed_probe(
            f"{host.npus} NPU device files, "
            "but the driver's libascend_hal.so cannot be loaded or refuses",
            "install the driver and firmware, or in a container mount /usr/local/Ascend/driver "
            "and put its lib64/driver on LD_LIBRARY_PATH",
        )
    if host.visible == 0:
        return _failed_probe(
            f"{VISIBLE} hides all {host.npus} NPUs from this process",
            f"unset it, or list devices in ascending order: {VISIBLE}=0,1",
        )
    return None


def _check_packages(host: Host) -> ProbeResult | None:
    """Return the problem of torch or torch_npu, or None."""
    recommended = TORCH_NPU[1]
    torch_npu = f"pip install torch_npu=={recommended.version} pyyaml setuptools"
    wanted = f"{_install_torch(recommended.torch)} && {torch_npu}"
    if host.torch is None:
        return _failed_probe("torch is not installed", wanted)
    if host.torch_npu is None:
        return _failed_probe(
            f"the driver shows {host.npus} NPUs, but torch_npu is not installed", wanted
        )
    if host.torch_cuda is not None:
        both = f" (and the host has {host.cuda_devices} CUDA devices)" if host.cuda_devices else ""
        return _failed_probe(
            f"torch {host.torch} is built for CUDA {host.torch_cuda}{both}: "
            "torch_npu refuses two vendors' accelerators in one process",
            "one environment per vendor: install a CPU build of torch together with torch_npu",
        )
    line = torch_npu_line(host.torch_npu)
    if line is None:
        return _failed_probe(
            f"torch_npu {host.torch_npu} is not in the table; it has: {torch_npu_table()}", wanted
        )
    if host.torch.partition("+")[0] != line.torch:
        return _failed_probe(
            f"torch_npu {line.version} is for torch {line.torch}, installed is {host.torch}",
            _install_torch(line.torch),
        )
    return None


def _install_torch(version: str) -> str:
    """Return the command that installs torch's CPU build, since PyPI's build is that for CUDA."""
    return f"pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu"


def _check_cann(host: Host) -> ProbeResult | None:
    """Return the problem of CANN, or None."""
    line = torch_npu_line(host.torch_npu or "")
    version = (line and line.cann) or "9.1"
    wanted = (
        f"install CANN {version} (toolkit and the kernels of this NPU), then: source .../set_env.sh"
    )
    broken = "torch_npu is installed without it, which breaks `import torch`"
    if host.cann is None:
        return _failed_probe(
            f"CANN is not set up (ASCEND_HOME_PATH names no folder); {broken}", wanted
        )
    if host.libraries:
        return _failed_probe(
            f"CANN's {' and '.join(host.libraries)} are not on LD_LIBRARY_PATH; {broken}", wanted
        )
    if line and line.cann and host.cann and not f"{host.cann}.".startswith(f"{line.cann}."):
        return _failed_probe(
            f"torch_npu {line.version} is for CANN {line.cann}, installed is {host.cann}", wanted
        )
    return None


def _probe_simulated() -> ProbeResult:
    """Return the probe's result for the simulated device, which needs torch only."""
    if torch_version() is None:
        return _failed_probe("torch is not installed", "pip install torch")
    return ProbeResult(ok=True, reason="simulated")


def _failed_probe(reason: str, remedy: str) -> ProbeResult:
    """Return the result of a probe that found a problem."""
    return ProbeResult(ok=False, reason=reason, remedy=remedy)
