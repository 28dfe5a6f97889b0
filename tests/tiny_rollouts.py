"""Rollouts of tiny models of every family, compared with transformers after weight syncs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tiny_models import (
    SERVED_ON_GPU_SIZES,
    SERVED_SIZES,
    documents,
    log_probs,
    oracle,
    tiny_model,
)

from engine_api.config import EngineConfig, ModelSource, OptimizerConfig
from engine_api.errors import EngineError
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, SamplingParams

NEAR = 1e-4
"""Nats by which a log-prob in float32 may differ from the one in float64."""
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
# The first is shorter than windows and chunks, and the longest are longer.
PROMPTS: list[list[int]] = [[5, 6, 7], *(ids.tolist() for ids in documents())]
SYNCS = 2
# For all prompts at once, in blocks of any size that servers choose.
_SMALL: dict[str, Any] = {"enforce_eager": True, "kv_cache_bytes": 1 << 27, "batch_size": 8}
# Another process on the same GPU needs its memory, too.
_ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.05, "memory_saver": False}
# Keys that published models of these families have, servers read, and transformers does not need.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "lfm2": {
        "block_auto_adjust_ff_dim": False,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 32,
        "conv_dim": 128,
    },
}


def make_served_model(model_type: str, folder: Path, device: str = "cpu") -> None:
    """Write a tiny model whose heads and experts are large enough for the kernels of servers."""
    published = _PUBLISHED.get(model_type, {})
    sizes = SERVED_SIZES if device == "cpu" else SERVED_ON_GPU_SIZES
    tiny_model(model_type, sizes=sizes, **published).save_pretrained(folder)


def compare_vllm(
    folder: str | Path, device: str = "cpu", quantization: str = "none"
) -> dict[str, Any]:
    """Return how vLLM differs from transformers in float64 after each of two syncs.

    vLLM computes in float32 on a CPU and in bf16 on a GPU. The weights are engine-fsdp's on this
    rank, and all of them change between the syncs, saved buffers included. ``log_probs`` is the
    largest difference of a greedy token's log-prob, ``mean`` the mean one, and ``greedy`` the
    largest distance of such a log-prob from the best one at its place, all in nats; on a GPU
    ``plain`` is the mean difference of transformers in bf16. ``audited`` says whether both syncs
    compared the served weights, and ``served_as`` names vLLM's class. Errors of the engine and of
    the rollout are raised.
    """
    from vllm.model_executor.models import registry

    on_gpu = device != "cpu"
    dtype = "bfloat16" if on_gpu else "float32"
    source = ModelSource(path=str(folder))
    config = EngineConfig(model=source, optimizer=OptimizerConfig(lr=0.0))
    engine: Any = EngineRegistry.create(backend="fsdp2", device=device, config=config)
    options = _SMALL | (_ON_GPU if on_gpu else {})
    served: dict[str, Any] = {"name": "vllm", "device": device, "model": source, "dtype": dtype}
    if quantization != "none":
        served["quantization"] = quantization
    rollout: Any = None
    exporter: Any = None
    try:
        # The engine exports its weights, and computes nothing: it needs no kernels.
        with mock.patch("engine_torch.model.refuse_without_kernels"):
            engine.initialize()
        # A process of its own, which vLLM asks about a model's class, imports vLLM once more.
        with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
            rollout = RolloutRegistry.create(pad_token_id=0, **served, **options)
        exporter = RolloutRegistry.create_exporter(**served)
        return _compare_syncs(engine, exporter, rollout, Path(folder), on_gpu=on_gpu)
    finally:
        for part in (exporter, rollout, engine):
            if part is not None:
                part.close()


def refusal(folder: str | Path) -> EngineError | None:
    """Return the error with which engine or vLLM refuse a model, without its frames."""
    try:
        compare_vllm(folder)
    except EngineError as error:
        return error.with_traceback(None)
    return None


def _compare_syncs(
    engine: Any, exporter: Any, rollout: Any, folder: Path, *, on_gpu: bool
) -> dict[str, Any]:
    (served_as,) = rollout._engine.apply_model(lambda model: type(model).__name__)
    found: dict[str, Any] = {"log_probs": 0.0, "greedy": 0.0, "audited": True}
    if on_gpu:
        found |= {"mean": 0.0, "plain": 0.0}
    for version in range(1, SYNCS + 1):
        if version > 1:
            _change_weights(engine)
        found["audited"] &= rollout.update_weights(exporter.export(engine), version).audited
        saved = folder.with_name(f"{folder.name}-{version}")
        engine.save_hf(saved)
        apart = _compare_completions(rollout.generate(PROMPTS, GREEDY), saved, on_gpu=on_gpu)
        for key, value in apart.items():
            found[key] = max(found[key], value)
    return found | {"served_as": served_as}


def _change_weights(engine: Any) -> None:
    """Add noise to every weight and every saved buffer of an engine."""
    generator = torch.Generator().manual_seed(3)
    for entry in engine.table:
        local = entry.local.detach()
        local.add_(0.05 * torch.randn(local.shape, generator=generator).to(local))
        entry.publish()


def _compare_completions(
    completions: Sequence[Completion], folder: Path, *, on_gpu: bool
) -> dict[str, float]:
    model = oracle(str(folder))
    found = {"log_probs": 0.0, "greedy": 0.0}
    differences: list[torch.Tensor] = []
    rounded: list[torch.Tensor] = []
    for completion in completions:
        count = len(completion.tokens)
        assert count == GREEDY.max_new_tokens
        ids = torch.tensor([*PROMPTS[completion.prompt_index], *completion.tokens])
        own = log_probs(model, ids)[-count:]
        with torch.no_grad():
            scores = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        best = scores[-count - 1 : -1].max(-1).values
        told = torch.tensor(completion.log_probs, dtype=torch.float64)
        differences.append((own - told).abs())
        apart = {"log_probs": differences[-1].max(), "greedy": (best - own).max()}
        for key, value in apart.items():
            # A difference that is not a number must not pass a comparison.
            found[key] = max(found[key], math.inf if value.isnan() else float(value))
        rounded.append(own)
    if not on_gpu:
        return found
    plain = oracle(str(folder), dtype=torch.bfloat16)
    for place, completion in enumerate(completions):
        ids = torch.tensor([*PROMPTS[completion.prompt_index], *completion.tokens])
        rounded[place] = (log_probs(plain, ids)[-len(completion.tokens) :] - rounded[place]).abs()
    means = {"mean": differences, "plain": rounded}
    return found | {
        key: float(torch.cat(one).mean().nan_to_num(math.inf)) for key, one in means.items()
    }
