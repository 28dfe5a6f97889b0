"""Transformer Engine: the choice of its layer spec, and its demands on a configuration."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from engine_api.config import EngineConfig
from engine_api.devices import cuda_is_simulated, device_of
from engine_api.errors import ConfigError

log = logging.getLogger("engine_megatron")

Spec = Literal["local", "te"]

# The versions that were seen to build, newest first.
TESTED_VERSIONS = ("2.20.2",)
INSTALL = (
    "pip install --no-build-isolation "
    f"'transformer-engine[pytorch,core-cu13]=={TESTED_VERSIONS[0]}' (it compiles)"
)
# The Python package, and the extension, which PyPI has as source.
_DISTRIBUTIONS = ("transformer_engine", "transformer_engine_torch")
# cuBLAS's alignment of FP8 matrices.
_FP8_UNIT = 16
# Megatron writes these values for the fused backend, for both specs, and asserts that the
# environment holds no different ones.
_BACKEND = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
# cuDNN's other parts are linked to these.
_CUDNN_FIRST = ("libcudnn_graph", "libcudnn_ops")
# A rank's tokens come in blocks of scales, so that activations can be gathered in FP8.
FP8_TOKENS = 128


def missing(device_type: str) -> str | None:
    """Return the reason why Transformer Engine cannot be used in this process, or None."""
    if not device_of(device_type).transformer_engine or cuda_is_simulated():
        return "it needs a CUDA device"
    return _absent()


def is_installed() -> bool:
    """Return True if a tested version is installed, independently of the device."""
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


def choose_spec(wanted: str, config: EngineConfig, device_type: str, untried: str = "") -> Spec:
    """Return the layer spec that ``options.spec`` stands for on this device.

    ``untried`` names a mechanism of the model that these layers were not compared with, if any.
    Raises ``ConfigError`` where the configuration needs the other spec.
    """
    absent = missing(device_type)
    compute = config.precision.compute
    problem = absent or _unfit(config)
    if untried and not problem:
        problem = f"its layers were not compared with a reference for {untried}"
    fits = device_of(device_type).transformer_engine
    if wanted == "te" and problem:
        install = ""
        if fits:
            install = f"{INSTALL}, precision.compute: bfloat16, model.attention: auto; or "
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
            remedy="leave options.spec and model.attention out and install it, "
            "or compute in bfloat16",
        )
    spec: Spec = "local" if problem or wanted == "local" else "te"
    # An installed but unusable Transformer Engine is a surprise to the user, hence a warning.
    installed = _version(_DISTRIBUTIONS[0]) is not None
    refused = wanted == "auto" and absent is not None and fits and installed
    log.log(
        logging.WARNING if refused else logging.INFO,
        "layer spec %s (options.spec: %s)%s",
        spec,
        wanted,
        f": {problem}" if wanted == "auto" and problem else "",
    )
    return spec


def _unfit(config: EngineConfig) -> str | None:
    """Return the reason why these layers do not fit the configuration, or None."""
    if config.precision.compute == "float32":
        # Its matrix products in float32 are TF32, and its fused attention has no float32 kernel.
        return "it has no float32: its matrix products would be TF32"
    if config.lora is not None:
        return "its linear layers have norms inside, whose outputs an adapter would need"
    if config.model.attention == "sdpa":
        return "its attention is not model.attention: sdpa"
    return None


def share_cudnn() -> None:
    """Import Transformer Engine with the cuDNN that torch brings, unless the environment names one.

    This must be called before Megatron imports it. Transformer Engine looks for the
    system's cuDNN first (2.20.2, ``common``), and its own library is linked to cuDNN's parts. torch
    loads a part when it first needs it. Where torch has loaded some parts by then, the loader would
    take the remaining ones from the system, and the import ends with an undefined symbol. So every
    part is loaded here, from one folder. The environment is as before afterwards.
    """
    chosen = any(name in os.environ for name in ("CUDNN_HOME", "CUDNN_PATH"))
    if chosen or not is_installed() or importlib.util.find_spec("nvidia") is None:
        return
    spec = importlib.util.find_spec("nvidia.cudnn")
    if spec is None or not spec.submodule_search_locations:
        return
    home = Path(next(iter(spec.submodule_search_locations)))
    parts = {
        part.name.partition(".")[0]: part for part in sorted((home / "lib").glob("libcudnn*.so.*"))
    }
    for name in sorted(parts, key=lambda name: (name not in _CUDNN_FIRST, name)):
        ctypes.CDLL(str(parts[name]), mode=ctypes.RTLD_GLOBAL)
    # It is read at the import alone.
    os.environ["CUDNN_HOME"] = str(home)
    try:
        importlib.import_module(_DISTRIBUTIONS[0])
    finally:
        del os.environ["CUDNN_HOME"]


def check_environment() -> None:
    """Raise ``ConfigError`` for attention kernels in the environment that Megatron would refuse."""
    for name, value in _BACKEND.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(
                f"environment {name}",
                f"{os.environ[name]}, but this engine asks for {value}",
                why="Megatron sets it, and accepts no other value",
                remedy="unset it",
            )


def attention_variables() -> dict[str, str | None]:
    """Return the environment's choice of attention kernels, None where a variable is not set."""
    return {name: os.environ.get(name) for name in _BACKEND}


def restore_attention_variables(before: Mapping[str, str | None]) -> None:
    """Undo what Megatron wrote since ``before`` was read by `attention_variables`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_fp8(config: EngineConfig, widths: dict[str, int]) -> None:
    """Raise ``ConfigError`` where FP8 is asked for but not possible.

    ``widths`` are the side lengths of this rank's matrices, by name.
    """
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
            "float8, which this device or CUDA does not support",
            why=why,
            remedy="use Hopper or newer with CUDA 12.9 or newer, or compute in bfloat16",
        )


def _block_scaling() -> tuple[bool, str]:
    """Return whether this process's device supports FP8 in blocks, and the reason if not."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    supported, why = quantization.check_fp8_block_scaling_support()
    return bool(supported), str(why)
