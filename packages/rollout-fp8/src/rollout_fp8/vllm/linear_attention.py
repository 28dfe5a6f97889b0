"""Linear attention of Qwen3-Next and Qwen3.5 in vLLM (Gated DeltaNet), and refusals of its kernels.

vLLM looks for these kernels in the first forward pass alone, so that a run would end in its first
generation. Here they are looked for when the engine starts.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from engine_api.errors import ConfigError, RolloutError
from rollout_fp8.options import VllmOptions
from rollout_fp8.vllm import private

WHERE = "rollout 'vllm'"
# Types of the language models that have this attention.
_FAMILIES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_KEY = "rollout.options.gdn_prefill_backend"


def arguments(options: VllmOptions) -> dict[str, Any]:
    """Return vLLM's arguments for the kernel of prompts."""
    if options.gdn_prefill_backend == "auto":
        return {}
    return {"gdn_prefill_backend": options.gdn_prefill_backend}


def check(config: Any, device: torch.device, asked: str) -> None:
    """Raise an error where a device cannot compute a model's linear attention with these options.

    Args:
        config: vLLM's configuration of the model, which may have no linear attention.
        device: the rollout's.
        asked: ``rollout.options.gdn_prefill_backend``.

    Raises:
        ConfigError: a dtype or kernel that this device does not have.
        RolloutError: FlashInfer lacks the kernel that vLLM would choose.
    """
    family = str(config.hf_text_config.model_type)
    if family not in _FAMILIES:
        return
    _check_dtype(family, device, config.dtype)
    if device.type == "cpu":
        _check_cpu(asked)
        return
    kernel = private.find_prefill_kernel(config, asked)
    if kernel is None:
        return
    if asked not in ("auto", kernel):
        raise ConfigError(
            _KEY,
            f"expected a kernel for this device, got {asked}",
            why=f"vLLM would compute with {kernel} instead",
            remedy=f"{kernel}, or leave it out",
        )
    why = _find_flashinfer_fault(device) if kernel == "flashinfer" else ""
    if why:
        raise RolloutError(
            "vLLM did not start: FlashInfer has no kernel for the model's linear attention",
            where=WHERE,
            why=why,
            remedy=f"{_KEY}: triton",
        )


def _check_dtype(family: str, device: torch.device, dtype: torch.dtype) -> None:
    served = {torch.bfloat16: "bfloat16"}
    why = "vLLM's linear attention for CPUs computes in bfloat16 alone (0.32.0)"
    where = "on a CPU"
    if device.type != "cpu":
        served[torch.float16] = "float16"
        why = "vLLM's kernels of linear attention have no float32 (0.26.0 and 0.32.0)"
        where = "on CUDA"
    if dtype not in served:
        given = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "rollout.options.dtype",
            f"expected {' or '.join(served.values())} for a {family} {where}, got {given}",
            why=why,
            remedy="dtype: bfloat16, or rollout.name=local",
        )


def _check_cpu(asked: str) -> None:
    if asked != "auto":
        raise ConfigError(
            _KEY,
            f"expected auto on a CPU, got {asked}",
            why="vLLM's build for CPUs has one kernel of its own",
            remedy="leave it out",
        )


def _find_flashinfer_fault(device: torch.device) -> str:
    """Return the reason why FlashInfer cannot compute prompts on this device, or an empty text.

    FlashInfer imports its kernels when it is imported, and holds None for those that it cannot.
    """
    # An unknown GPU has a name that is not found below, as in releases without one.
    name = f"chunk_gated_delta_rule_sm{private.find_generation(device)}0"
    try:
        found: Any = importlib.import_module("flashinfer.gdn_prefill")
    # A build for another torch or CUDA lacks symbols.
    except (ImportError, OSError, RuntimeError) as error:
        return f"vLLM chooses it, and its import fails with {type(error).__name__}: {error}"
    # Releases that have the kernel in another form do not name it.
    if getattr(found, name, found) is not None:
        return ""
    return f"vLLM chooses it for this GPU, and flashinfer.gdn_prefill.{name} is unavailable"
