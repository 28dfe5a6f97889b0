"""Transformer Engine: whether its layer spec is used, and what it asks of a configuration. Imports neither."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Literal

from engine_api.config import EngineConfig
from engine_api.devices import cuda_is_simulated
from engine_api.errors import ConfigError

log = logging.getLogger("engine_megatron")

Spec = Literal["local", "te"]

# Seen to build, newest first.
TESTED_VERSIONS = ("2.20.2",)
INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch,core-cu13]==2.20.2' (it compiles)"
_DISTRIBUTIONS = (
    "transformer_engine",
    "transformer_engine_torch",
)  # Python, and the extension: PyPI has that as source
_FP8_UNIT = 16  # cuBLAS's alignment of FP8 matrices
FP8_TOKENS = 128  # of a rank: one block of scales, so that activations can be gathered in FP8


def missing(device_type: str) -> str | None:
    """Why Transformer Engine cannot be used in this process, or None."""
    if device_type != "cuda" or cuda_is_simulated():
        return "it needs a CUDA device"
    return _absent()


def is_installed() -> bool:
    """Whether a tested version is here, whatever the device."""
    return _absent() is None


def _absent() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed"
        if version not in TESTED_VERSIONS:
            return f"{name} {version} is not tested; tested: {', '.join(TESTED_VERSIONS)}"
    return None


def choose_spec(wanted: str, config: EngineConfig, device_type: str) -> Spec:
    """The layer spec that ``options.spec`` means here; raises ``ConfigError`` for what only the other can do."""
    problem, compute = missing(device_type), config.precision.compute
    if compute == "float32":
        # Its matrix products in float32 are TF32, and its fused attention has no float32 kernel.
        problem = problem or "it has no float32: its matrix products would be TF32"
    if wanted == "te" and problem:
        raise ConfigError("options.spec", f"te, but {problem}", why="this spec is Transformer Engine's",
                          remedy=f"{INSTALL}, precision.compute: bfloat16; or spec: local")  # fmt: skip
    if compute == "float8" and (wanted == "local" or problem):
        raise ConfigError("precision.compute", "float8 without Transformer Engine", why=problem or "options.spec is local",
                          remedy="leave options.spec out and install it, or compute in bfloat16")  # fmt: skip
    spec: Spec = "local" if problem or wanted == "local" else "te"
    log.info("layer spec %s (options.spec: %s)%s", spec, wanted, f": {problem}" if wanted == "auto" and problem else "")
    return spec


def check_fp8(config: EngineConfig, widths: dict[str, int]) -> None:
    """Raise ``ConfigError`` where FP8 cannot be: ``widths`` are the sides of this rank's matrices."""
    for name in ("master", "reduce"):
        if getattr(config.precision, name) == "float8":
            raise ConfigError(f"precision.{name}", "float8 is a precision of matrix products only",
                              remedy="float32; for FP8 training set precision.compute")  # fmt: skip
    if config.precision.compute != "float8":
        return
    if odd := {name: width for name, width in widths.items() if width % _FP8_UNIT}:
        name, width = next(iter(odd.items()))
        raise ConfigError("precision.compute", f"float8, but a rank's {name} is {width}",
                          why=f"FP8 matrices have sides that {_FP8_UNIT} divides",
                          remedy="choose another parallelism.tp, or compute in bfloat16")  # fmt: skip
