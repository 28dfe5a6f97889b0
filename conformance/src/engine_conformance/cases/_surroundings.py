"""The state of a rank's process apart from the engine, as `contract.leaves_nothing` compares it."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
import torch._dynamo
import torch.distributed as dist

__all__ = ["ImportedVariables", "Surroundings", "read_surroundings"]

# Torch itself sets variables with these prefixes when it first compiles.
_CACHES = (
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
)
# More numbers than a norm or the bounds of documents have.
_LONG = 4096
# In the command line of the process that starts the workers of torch's compiler.
_COMPILER = b"torch/_inductor/compile_worker"


class ImportedVariables:
    """The environment variables that modules set while they are imported.

    A library may set some at its first import (scikit-learn sets OpenMP's), whoever imports it:
    they tell nothing about the engine, unless the module is one of its own. Python's audit hooks
    cannot be removed, so that this is for a process that ends with its case.
    """

    def __init__(self) -> None:
        self._modules: dict[str, str] = {}
        sys.addaudithook(self._listen)

    def _listen(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.putenv", "os.unsetenv"):
            # The last one counts: the engine may change what a library has set.
            self._modules[os.fsdecode(arguments[0])] = _imported_module(sys._getframe(1))  # noqa: SLF001

    def set_by_others(self, engine: type) -> frozenset[str]:
        """Return the variables that were last set by a module outside the engine's packages."""
        own = {cls.__module__.partition(".")[0] for cls in engine.__mro__} | {"", "__main__"}
        return frozenset(
            name for name, module in self._modules.items() if module.partition(".")[0] not in own
        )


def _imported_module(frame: FrameType | None) -> str:
    """Return the name of the module whose import runs in this frame, or "" if none does."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """State of a rank's process apart from the engine."""

    threads: tuple[str, ...]
    """Threads that keep the process from ending."""
    children: tuple[int, ...]
    """Processes that this one has started, without torch's compiler."""
    files: tuple[str, ...]
    """Files in the working folder."""
    group: int
    """Identity of the default process group."""
    groups: int
    """Number of process groups."""
    environment: tuple[tuple[str, str], ...]
    switches: tuple[tuple[str, str], ...]
    """Settings of torch and Python, by name."""
    imported: frozenset[str]
    """Variables that libraries have set while they were imported."""
    memory: int
    """Bytes allocated on the device."""
    daemons: tuple[str, ...]
    """Threads that end with the process, without those of torch's compiler."""
    descriptors: tuple[str, ...]
    """The path of each open file, or the kind of what is open, as a socket."""
    temporary: int
    """Number of entries in the folder for temporary files."""
    tensors: int
    """Number of tensors of more than one dimension, and of long ones."""


def _umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


# Switches of the process by name, each with its reader.
_SWITCHES: Mapping[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic warnings": torch.is_deterministic_algorithms_warn_only_enabled,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "threads": torch.get_num_threads,
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    "attention kernels": lambda: [
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ],
    "cuDNN": lambda: [
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    ],
    "TF32": lambda: [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    "reduced precision": lambda: [
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ],
    "signal handlers": lambda: [signal.getsignal(number) for number in signal.valid_signals()],
    "hooks of errors": lambda: [sys.excepthook, threading.excepthook, sys.unraisablehook],
    "level of the root logger": lambda: logging.getLogger().level,
    "garbage collector": gc.isenabled,
    "timeout of sockets": socket.getdefaulttimeout,
    # torch's compiler raises it to 2,000.
    "limit of recursion": lambda: max(sys.getrecursionlimit(), 2000),
    "NumPy's errors": numpy.geterr,
    "the compiler's errors": lambda: torch._dynamo.config.suppress_errors,  # noqa: SLF001
    "working folder": Path.cwd,
    "file mode": _umask,
}


def read_surroundings(device: str, imported: frozenset[str]) -> Surroundings:
    """Return the state of this process, in which libraries have set the variables ``imported``."""
    gc.collect()
    group = dist.group.WORLD
    return Surroundings(
        threads=tuple(sorted(t.name for t in threading.enumerate() if not t.daemon)),
        children=tuple(_children()),
        files=tuple(sorted(str(path) for path in Path().rglob("*"))),
        group=id(group) if dist.is_initialized() else 0,
        # torch offers no public list of the groups.
        groups=len(dist.distributed_c10d._world.pg_map),  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        environment=tuple(
            sorted(item for item in os.environ.items() if not item[0].startswith(_CACHES))
        ),
        switches=tuple((name, repr(read())) for name, read in _SWITCHES.items()),
        imported=imported,
        memory=torch.get_device_module(device).memory_allocated() if device != "cpu" else 0,
        daemons=tuple(sorted(_daemons())),
        descriptors=tuple(sorted(_descriptors())),
        temporary=_count(tempfile.gettempdir()),
        tensors=_tensors(),
    )


def _tensors() -> int:
    # The ranks freeze the objects of earlier jobs, which gc.get_objects would then leave out. By
    # the exact type: isinstance would ask objects of others for their class.
    gc.unfreeze()
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    # A flat buffer may hold all weights of a model.
    return sum(
        type(one) in kinds and (one.dim() > 1 or one.numel() >= _LONG) for one in gc.get_objects()
    )


def _count(folder: str) -> int:
    return sum(1 for _ in Path(folder).glob("*"))


def _descriptors() -> Iterator[str]:
    """Yield what each open descriptor is of, without the number of a socket or a pipe."""
    for entry in Path("/proc/self/fd").iterdir():
        # The one through which the folder is read is closed by now.
        with suppress(FileNotFoundError):
            yield re.sub(r"\[\d+\]$", "", str(entry.readlink()))


def _daemons() -> Iterator[str]:
    """Yield the name of each thread that ends with the process.

    torch keeps those that serve the workers of its compiler: they are not counted.
    """
    for thread in threading.enumerate():
        # Python offers no public way to what a thread runs.
        runs: Any = getattr(thread, "_target", None)
        if thread.daemon and not getattr(runs, "__module__", "").startswith("torch._inductor"):
            yield thread.name


def _children() -> list[int]:
    """Return the ids of this process's children, where there is a /proc.

    torch keeps the workers of its compiler until the process ends, for all that compile in it: they
    are not counted.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and _COMPILER not in (entry.parent / "cmdline").read_bytes():
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return sorted(found)
