"""Transformer Engine: whether its layer spec is used, and what it asks of a configuration. Imports it for FP8 alone."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import Literal

from engine_api.config import EngineConfig
from engine_api.devices import cuda_is_simulated, device_of
from engine_api.errors import ConfigError

log = logging.getLogger("engine_megatron")

Spec = Literal["local", "te"]

# Seen to build, newest first.
TESTED_VERSIONS = ("2.20.2",)
INSTALL = f"pip install --no-build-isolation 'transformer-engine[pytorch,core-cu13]=={TESTED_VERSIONS[0]}' (it compiles)"
_DISTRIBUTIONS = (
    "transformer_engine",
    "transformer_engine_torch",
)  # Python, and the extension: PyPI has that as source
_FP8_UNIT = 16  # cuBLAS's alignment of FP8 matrices
# What Megatron writes for the fused backend, asserting that nothing else is there, whichever the spec.
_BACKEND = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
_CUDNN_FIRST = ("libcudnn_graph", "libcudnn_ops")  # what cuDNN's other parts are linked to
FP8_TOKENS = 128  # of a rank: one block of scales, so that activations can be gathered in FP8


def missing(device_type: str) -> str | None:
    """Why Transformer Engine cannot be used in this process, or None."""
    if not device_of(device_type).transformer_engine or cuda_is_simulated():
        return "it needs a CUDA device"
    return _absent()


def is_installed() -> bool:
    """Whether a tested version is here, whatever the device."""
    return _absent() is None


def _absent() -> str | None:
    for name in _DISTRIBUTIONS:
        version = _version(name)
        if version is None:
            return f"{name} is not installed"
        if version not in TESTED_VERSIONS:
            return f"{name} {version} is not tested; tested: {', '.join(TESTED_VERSIONS)}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_spec(wanted: str, config: EngineConfig, device_type: str) -> Spec:
    """The layer spec that ``options.spec`` means here; raises ``ConfigError`` for what only the other can do."""
    absent, compute = missing(device_type), config.precision.compute
    problem = absent or _unfit(config)
    fits = device_of(device_type).transformer_engine
    if wanted == "te" and problem:
        install = (
            f"{INSTALL}, precision.compute: bfloat16, model.attention: auto; or " if fits else ""
        )
        raise ConfigError(
            "options.spec",
            f"te, but {problem}",
            why="this spec is Transformer Engine's",
            remedy=f"{install}spec: local",
        )
    if compute == "float8" and (wanted == "local" or problem):
        raise ConfigError(
            "precision.compute",
            "float8 without Transformer Engine",
            why=problem or "options.spec is local",
            remedy="leave options.spec and model.attention out and install it, or compute in bfloat16",
        )
    spec: Spec = "local" if problem or wanted == "local" else "te"
    # Who installed it expects it to be used.
    refused = (
        wanted == "auto" and absent is not None and fits and _version(_DISTRIBUTIONS[0]) is not None
    )
    log.log(
        logging.WARNING if refused else logging.INFO,
        "layer spec %s (options.spec: %s)%s",
        spec,
        wanted,
        f": {problem}" if wanted == "auto" and problem else "",
    )
    return spec


def _unfit(config: EngineConfig) -> str | None:
    """What the configuration asks for that these layers do not have."""
    if config.precision.compute == "float32":
        # Its matrix products in float32 are TF32, and its fused attention has no float32 kernel.
        return "it has no float32: its matrix products would be TF32"
    return (
        "its attention is not model.attention: sdpa" if config.model.attention == "sdpa" else None
    )


def share_cudnn() -> None:
    """Let Transformer Engine use the cuDNN that torch brings, unless the environment names one; before it is imported.

    It looks for the system's first (2.20.2, ``common``), and its own library is linked to cuDNN's parts. torch loads a part when it
    first needs it; where it has loaded some by then, the loader would take the others from the system, and the import ends with
    an undefined symbol. So every part is loaded here, from one place.
    """
    chosen = any(name in os.environ for name in ("CUDNN_HOME", "CUDNN_PATH"))
    if chosen or not is_installed() or importlib.util.find_spec("nvidia") is None:
        return
    spec = importlib.util.find_spec("nvidia.cudnn")
    if spec is None or not spec.submodule_search_locations:
        return
    home = Path(next(iter(spec.submodule_search_locations)))
    os.environ["CUDNN_HOME"] = str(home)
    parts = {
        part.name.partition(".")[0]: part for part in sorted((home / "lib").glob("libcudnn*.so.*"))
    }
    for name in sorted(parts, key=lambda name: (name not in _CUDNN_FIRST, name)):
        ctypes.CDLL(str(parts[name]), mode=ctypes.RTLD_GLOBAL)


def check_environment() -> None:
    """Raise ``ConfigError`` for a choice of attention kernels in the environment that Megatron would assert against."""
    for name, value in _BACKEND.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(
                f"environment {name}",
                f"{os.environ[name]}, but this engine asks for {value}",
                why="Megatron sets it, and accepts no other value",
                remedy="unset it",
            )


def check_fp8(config: EngineConfig, widths: dict[str, int]) -> None:
    """Raise ``ConfigError`` where FP8 cannot be: ``widths`` are the sides of this rank's matrices."""
    if config.precision.master == "float8":
        raise ConfigError(
            "precision.master",
            "float8 is a precision of matrix products only",
            remedy="float32; for FP8 training set precision.compute",
        )
    if config.precision.compute != "float8":
        return
    if odd := {name: width for name, width in widths.items() if width % _FP8_UNIT}:
        name, width = next(iter(odd.items()))
        raise ConfigError(
            "precision.compute",
            f"float8, but a rank's {name} is {width}",
            why=f"FP8 matrices have sides that {_FP8_UNIT} divides",
            remedy="choose another parallelism.tp, or compute in bfloat16",
        )
    supported, why = _block_scaling()
    if not supported:
        raise ConfigError(
            "precision.compute",
            "float8, which this device or CUDA cannot",
            why=why,
            remedy="use Hopper or newer with CUDA 12.9 or newer, or compute in bfloat16",
        )


def _block_scaling() -> tuple[bool, str]:
    """Whether this process's device has FP8 in blocks, and why not."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    supported, why = quantization.check_fp8_block_scaling_support()
    return bool(supported), str(why)
