"""Options of the ``sglang`` rollout, and SGLang's own arguments that follow from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine_api.config import ModelSource, check_choice
from engine_api.errors import ConfigError
from engine_api.hf_layers import carries_state, count_experts
from rollout_fp8.fp8.layers import server_config
from rollout_fp8.kernels.capability import require_fp8
from rollout_fp8.model import config_of
from rollout_fp8.options import QUANTIZATIONS, Options

WHERE = "rollout 'sglang'"
# Imported by SGLang in its schedulers.
LOADER = "rollout_fp8.sglang.loader.load"
DTYPES = ("bfloat16", "float16", "float32")
# SGLang generates up to context_length - 2 tokens and takes prompts of up to context_length - 7
# (managers/scheduler.py, managers/tp_worker.py); with these more, every position of the model can
# be used.
SPARE = 8
# Largest page of its cache, in tokens (0.5.16, ``arg_groups/overrides.py``). A sequence has whole
# pages.
PAGE = 256
# Share of the GPU's memory: SGLang's own share counts weights and caches, but not activations and
# CUDA graphs.
ACTIVATIONS = 0.08


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangOptions(Options):
    """Options that ``SglangRollout`` takes in addition to those of every server."""

    attention_backend: Literal["auto", "fa3", "flashinfer", "triton", "torch_native"] = "auto"
    """Kernels of attention.

    ``auto`` is SGLang's choice (FlashAttention 3 on an H200), and ``triton`` for float32, which
    FlashAttention 3 does not support.
    """

    sampling_backend: Literal["auto", "flashinfer", "pytorch"] = "auto"
    """Kernels of sampling. ``auto`` is SGLang's choice."""

    cuda_graph: bool = True
    """True captures decoding in CUDA graphs, for up to ``batch_size`` completions.

    A model with experts in float32 is served without graphs.
    """

    deterministic: bool = True
    """True lets every draw follow its seed, in SGLang's deterministic mode.

    The kernels of that mode do not depend on the batch and are slower (34 % on average,
    https://lmsys.org/blog/2025-09-22-sglang-deterministic). With false every draw differs.
    """

    memory_saver: bool = True
    """True loads torch_memory_saver into SGLang's processes, which ``sleep`` needs."""


def check_arguments(
    options: SglangOptions, *, dtype: str, quantization: str, batch_size: int, device: torch.device
) -> None:
    """Check the arguments of every rollout, and options that exclude each other.

    Raises:
        ConfigError: an argument is wrong, or options exclude each other.
        RolloutError: SGLang would serve FP8 weights through 16-bit kernels (Marlin).
    """
    check_choice("rollout.options.dtype", dtype, DTYPES)
    check_choice("rollout.quantization", quantization, QUANTIZATIONS)
    if batch_size < 1:
        raise ConfigError(
            "rollout.batch_size", f"expected at least 1, got {batch_size}", remedy="give at least 1"
        )
    if options.deterministic:
        _check_deterministic(options)
    if options.kv_cache_dtype == "fp8":
        require_fp8(
            device,
            "this device has no FP8 cache",
            kernels="kernels of e4m3",
            where=WHERE,
            remedy="rollout.options.kv_cache_dtype=auto",
        )
    if quantization == "none":
        return
    if dtype == "float32":
        raise ConfigError(
            "rollout.options.dtype",
            "float32 with quantization fp8",
            why="SGLang's FP8 kernels compute 16-bit activations",
            remedy="bfloat16",
        )
    require_fp8(
        device,
        "this device has no FP8 kernels",
        kernels="block FP8 kernels",
        where=WHERE,
        remedy="rollout.quantization=none",
    )


def check_cache(options: SglangOptions, config: Any) -> None:
    """Raise ``ConfigError`` for a cache that SGLang cannot have for a model.

    That is an FP8 cache of a model that has none, or one for the batch where layers with windows
    and states have caches of their own: SGLang makes these a share of the other one, or of the
    memory that is left (0.5.16, ``pool_configurator.py`` and ``kv_cache_configurator.py``).

    Args:
        options: the rollout's options.
        config: the model's configuration of transformers.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if options.kv_cache_for_batch and (kinds or carries_state(text)):
        raise ConfigError(
            "rollout.options.kv_cache_for_batch",
            f"expected false for a {config.model_type}, got true",
            why="SGLang has caches of another size for its layers with windows or states",
            remedy="rollout.options.kv_cache_for_batch=false",
        )
    latent = getattr(text, "kv_lora_rank", None)
    if options.kv_cache_dtype == "fp8" and latent:
        raise ConfigError(
            "rollout.options.kv_cache_dtype",
            f"expected auto for a {config.model_type}, got fp8",
            why="latent attention caches no keys and values",
            remedy="rollout.options.kv_cache_dtype=auto",
        )


def _check_deterministic(options: SglangOptions) -> None:
    """Raise ``ConfigError`` for backends that SGLang has in no deterministic form.

    It refuses the first, and would silently use another sampler than the second.
    """
    for name, unfit in (("attention_backend", "torch_native"), ("sampling_backend", "flashinfer")):
        if getattr(options, name) == unfit:
            raise ConfigError(
                f"rollout.options.{name}",
                f"expected auto with deterministic=true, got {unfit}",
                why="SGLang has it in no deterministic form",
                remedy=f"rollout.options.{name}=auto, or rollout.options.deterministic=false",
            )


def write_config(folder: Path, source: ModelSource, quantized: str | None) -> dict[str, Any]:
    """Write ``config.json`` for SGLang into a folder without weights and sampling defaults.

    The model's end-of-sequence ids are left out: SGLang would add them to those that a request
    names, and its ``ignore_eos`` turns off both. ``quantized`` is the architecture whose layers are
    served in FP8. Raises ``ConfigError``.
    """
    from transformers import PretrainedConfig

    # This refuses a folder without a model, and overrides that would reach SGLang unchecked.
    config_of(source)
    config, _ = PretrainedConfig.get_config_dict(source.path, revision=source.revision)
    config = {**config, **source.config_overrides, "eos_token_id": None}
    for name in ("quantization_config", "_commit_hash"):
        config.pop(name, None)
    if quantized is not None:
        config["quantization_config"] = server_config(quantized, config["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config))
    if source.trust_remote_code and Path(source.path).is_dir():
        for code in Path(source.path).glob("*.py"):
            shutil.copy(code, folder)
    return config


def context_of(config: Mapping[str, Any], options: SglangOptions) -> int:
    """Return the tokens of a prompt with its completion.

    Raises:
        ConfigError: the options ask for more than the model was made for, or no limit is known.
    """
    own = config.get("max_position_embeddings")
    wanted = options.max_model_len
    if own is None and wanted is None:
        raise ConfigError(
            "rollout.options.max_model_len",
            "missing",
            why="the model's config.json names no limit",
            remedy="set it",
        )
    if own is not None and wanted is not None and wanted > own:
        raise ConfigError(
            "rollout.options.max_model_len",
            f"expected at most {own}, got {wanted}",
            why=f"the model has {own} positions",
            remedy=f"give at most {own}",
        )
    return int(wanted or own or 0)


def engine_arguments(
    options: SglangOptions,
    *,
    folder: Path,
    source: ModelSource,
    dtype: str,
    batch_size: int,
    gpu: int,
    context: int,
) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``."""
    # The graphs would hold SGLang's own kernel of experts (``private.keep_float32_of_experts``).
    captured = options.cuda_graph and not (
        dtype == "float32" and count_experts(config_of(source).get_text_config())
    )
    attention = options.attention_backend
    if attention == "auto" and dtype == "float32":
        attention = "triton"
    chosen = {"attention_backend": attention, "sampling_backend": options.sampling_backend}
    return {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        # Weights come from the engine.
        "load_format": "dummy",
        "dtype": dtype,
        # Its scales are 1 (``private.reset_cache_scales``).
        "kv_cache_dtype": "fp8_e4m3" if options.kv_cache_dtype == "fp8" else "auto",
        "trust_remote_code": source.trust_remote_code,
        "tp_size": options.tensor_parallel_size,
        "base_gpu_id": gpu,
        "context_length": context + SPARE,
        "max_running_requests": batch_size,
        "mem_fraction_static": max(
            options.gpu_memory_utilization - ACTIVATIONS, options.gpu_memory_utilization / 2
        ),
        "disable_cuda_graph": not captured,
        "enable_memory_saver": options.memory_saver,
        "enable_deterministic_inference": options.deterministic,
        "custom_weight_loader": [LOADER],
        **({"cuda_graph_max_bs_decode": batch_size} if captured else {}),
        **(
            {"max_total_tokens": _positions_of_batch(batch_size, context)}
            if options.kv_cache_for_batch
            else {}
        ),
        **{name: value for name, value in chosen.items() if value != "auto"},
    }


def _positions_of_batch(batch_size: int, context: int) -> int:
    """Return the positions of a cache for a batch.

    SGLang takes fewer if less memory is left. Its longest sequence is two pages shorter than its
    cache (``SglangRollout._learn_limits``).
    """
    pages = -(-(context + SPARE) // PAGE)
    return (batch_size * pages + 2) * PAGE
