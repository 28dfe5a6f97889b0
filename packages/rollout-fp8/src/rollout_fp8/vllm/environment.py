"""Environment variables that vLLM reads. All of them are set here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine_api.errors import RolloutError
from rollout_fp8.ranks import launcher_variables

E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"

# For the whole process, unless the user set them: vLLM reads them at its import, or at any later
# time.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    # With 1, vLLM rounds the scales of FP8 weights to powers of two after loading: the served
    # weights then differ from the sent ones, and are requantized (vLLM #58157).
    E8M0: "0",
    # FlashInfer compiles these at their first use. Its sampler cannot report log-probs either.
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # vLLM 0.32 would otherwise choose a model runner with another interface for processors of
    # logits, which refuses the rollout's own. 0.26 chooses the older one by itself.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # On a CPU vLLM would otherwise bind threads to cores, the trainer's own among them, and require
    # a NUMA node for each worker.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_WITH_TABLES = ("flashinfer", "compressed_tensors.compressors.nvfp4.helpers")


def prepare() -> None:
    """Set the variables.

    It is to be called before vLLM is imported.

    Raises:
        RolloutError: the user chose a value that the sync cannot serve.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ[E8M0] != "0":
        raise RolloutError(
            f"{E8M0}={os.environ[E8M0]}",
            where="rollout 'vllm'",
            why="vLLM would requantize FP8 weights after each sync, and serve weights other "
            "than the sent ones",
            remedy=f"unset {E8M0}; for scales that are powers of two: rollout.options.scales=pow2",
        )


def import_tables() -> None:
    """Import modules that make a table at their import, before vLLM imports them in a start.

    The table would be on the device, and in the memory that can sleep, which it would keep from the
    next engine of the process (flashinfer 0.6.14, ``fp4_quantization``; compressed-tensors 0.17.0,
    ``kE2M1ToFloat``, with vLLM 0.32.0).
    """
    for name in _WITH_TABLES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # It is not installed, or of another version. A package that it needs is another matter.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise


@contextmanager
def in_process(rank: int, local_rank: int) -> Iterator[None]:
    """Set the variables in the context, in which an engine is built in this process."""
    # external_launcher reads the ranks.
    changes = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
    }
    with _changed(changes):
        yield


@contextmanager
def workers(first_device: int | None, count: int) -> Iterator[None]:
    """Set the variables in the context, in which an engine is built in its own processes.

    It uses ``count`` devices from ``first_device`` on (None: the CPU).
    """
    changes: dict[str, str | None] = dict.fromkeys(launcher_variables())
    changes |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if first_device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(first_device + count)]
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(names[first_device : first_device + count])
    with _changed(changes):
        yield


@contextmanager
def _changed(changes: Mapping[str, str | None]) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in changes}
    try:
        _apply(changes)
        yield
    finally:
        _apply(kept)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
