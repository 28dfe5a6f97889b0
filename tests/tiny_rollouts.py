"""Rollouts of tiny models of every family, compared with transformers after weight syncs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from emulated_fp8 import EmulatedFp8
from tiny_models import (
    SERVED_ON_GPU_SIZES,
    SERVED_SIZES,
    documents,
    log_probs,
    oracle,
    tiny_model,
)
from transformers import AutoConfig, AutoModelForImageTextToText

from engine_api.batch import Batch
from engine_api.config import EngineConfig, ModelSource, OptimizerConfig
from engine_api.errors import EngineError
from engine_api.hf_names import saved_buffers
from engine_api.hf_vision import Vision, build_arguments, read_vision
from engine_api.media import Media
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, PromptImages, SamplingParams

NEAR = 1e-4
"""Nats by which a log-prob in float32 may differ from the one in float64."""
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
# The first is shorter than windows and chunks, and the longest are longer.
PROMPTS: list[list[int]] = [[5, 6, 7], *(ids.tolist() for ids in documents())]
SYNCS = 2
# For all prompts at once, in blocks of any size that servers choose.
_SMALL: dict[str, Any] = {"enforce_eager": True, "kv_cache_bytes": 1 << 27, "batch_size": 8}
# Another process on the same GPU needs its memory, too. The cache must hold one document of as many
# tokens as the model has positions: 262,144 of Ministral 3 take 537 MB.
_ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "memory_saver": False,
    "kv_cache_bytes": 1 << 30,
    # vLLM's own choice on Hopper is FlashInfer's kernel, which not every build has.
    "gdn_prefill_backend": "triton",
}
# Keys that published models of these families have, servers read, and transformers does not need.
_PUBLISHED: dict[str, dict[str, Any]] = {
    **{
        name: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
    },
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    # vLLM's MLP is four times as wide as the model, as those of published models are (0.26.0).
    "phi": {
        "intermediate_size": 4 * SERVED_ON_GPU_SIZES["hidden_size"],
        "num_key_value_heads": 4,
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
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
    model = tiny_model(model_type, sizes=sizes, **published)
    # A server that ignores the bias of a router, which is zero at first, is found at its start.
    generator = torch.Generator().manual_seed(1)
    for buffer in saved_buffers(model).values():
        if buffer.is_floating_point() and not buffer.any():
            buffer.normal_(std=0.3, generator=generator)
    model.save_pretrained(folder)


def compare_vllm(
    folder: str | Path, device: str = "cpu", quantization: str = "none", dtype: str | None = None
) -> dict[str, Any]:
    """Return how vLLM differs from transformers in float64 after each of two syncs.

    vLLM computes in ``dtype``, by default in float32 on a CPU and in bf16 on a GPU. The weights are
    engine-fsdp's on this rank, and all of them change between the syncs, saved buffers included.
    ``log_probs`` is the largest difference of a greedy token's log-prob, ``mean`` the mean one, and
    ``greedy`` the largest distance of such a log-prob from the best one at its place, all in nats;
    in bf16 ``plain`` is the mean difference of transformers in bf16, with the layers in emulated
    FP8 that the rollout has in FP8. ``audited`` says whether both syncs compared the served
    weights, and ``served_as`` names vLLM's class. Errors of the engine and of the rollout are
    raised.
    """
    served: dict[str, Any] = {"dtype": dtype or ("float32" if device == "cpu" else "bfloat16")}
    if quantization != "none":
        served["quantization"] = quantization
    engine, exporter, rollout = _start_without_kernels(Path(folder), device, **served)
    rounded = served["dtype"] != "float32"
    try:
        return _compare_syncs(
            engine, exporter, rollout, Path(folder), rounded=rounded, fp8=quantization == "fp8"
        )
    finally:
        for part in (exporter, rollout, engine):
            part.close()


def _start_without_kernels(folder: Path, device: str, **served: Any) -> tuple[Any, Any, Any]:
    """Do ``_start_pair`` with an engine that exports weights and computes nothing."""
    checks = dict.fromkeys(("refuse_without_kernels", "refuse_wrong_gradients"), mock.DEFAULT)
    with mock.patch.multiple("engine_torch.model", **checks):
        return _start_pair(folder, device, **served)


def _start_pair(folder: Path, device: str = "cpu", **served: Any) -> tuple[Any, Any, Any]:
    """Return an engine, an exporter and a rollout of a folder's model, or close what was begun.

    ``served`` are arguments of both rollout and exporter, by default ``dtype="float32"``.
    """
    source = ModelSource(path=str(folder))
    config = EngineConfig(model=source, optimizer=OptimizerConfig(lr=0.0))
    served = {"dtype": "float32", **served}
    with ExitStack() as begun:
        engine: Any = EngineRegistry.create(backend="fsdp2", device=device, config=config)
        begun.callback(engine.close)
        engine.initialize()
        rollout: Any = start_vllm(folder, device=device, **served)
        begun.callback(rollout.close)
        exporter: Any = RolloutRegistry.create_exporter(
            name="vllm", device=device, model=source, **served
        )
        begun.pop_all()
    return engine, exporter, rollout


def start_vllm(folder: str | Path, *, device: str = "cpu", **arguments: Any) -> Any:
    """Return vLLM's rollout of a folder's model, by default in float32, in this process."""
    from vllm.model_executor.models import registry

    options = _SMALL | (_ON_GPU if device != "cpu" else {})
    # A process of its own, which vLLM asks about a model's class, imports vLLM once more.
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        return RolloutRegistry.create(
            name="vllm",
            device=device,
            model=ModelSource(path=str(folder)),
            pad_token_id=0,
            **{"dtype": "float32", **options, **arguments},
        )


def compare_vllm_images(folder: str | Path, *, device: str = "cpu") -> dict[str, Any]:
    """Return how vLLM in float32 differs behind images, after each of three syncs.

    The weights are engine-fsdp's on this rank, on the server's device. The second sync changes
    those of the tower and its projector alone, the third all. ``log_probs`` is the largest
    difference of a token's log-prob from transformers in float64, ``engine`` that from the engine,
    both in nats. ``audited`` says whether all syncs compared the served weights, and ``banned``
    counts tokens of images.
    """
    engine, exporter, rollout = _start_pair(Path(folder), device)
    try:
        vision = read_vision(AutoConfig.from_pretrained(folder), "test")
        assert vision is not None
        prompts, images = draw_prompts(vision)
        found: dict[str, Any] = {"log_probs": 0.0, "engine": 0.0, "audited": True, "banned": 0}
        for version, saved, audited in _sync_changed(engine, exporter, rollout, folder):
            found["audited"] &= audited
            model = AutoModelForImageTextToText.from_pretrained(
                saved, dtype=torch.float64, attn_implementation="eager"
            ).eval()
            for temperature in (1.0, 0.7):
                sampling = SamplingParams(
                    n=3, max_new_tokens=6, temperature=temperature, seed=version
                )
                completions = rollout.generate(prompts, sampling, images=images)
                apart = _compare_pictured(
                    completions, prompts, images, vision, model, engine, temperature
                )
                keep_larger(found, apart)
                tokens = [token for one in completions for token in one.tokens]
                found["banned"] += sum(
                    token in (vision.image_token, vision.video_token) for token in tokens
                )
        return found
    finally:
        for part in (exporter, rollout, engine):
            part.close()


def _sync_changed(
    engine: Any, exporter: Any, rollout: Any, folder: str | Path
) -> Iterator[tuple[int, Path, bool]]:
    """Yield the version of each sync, the folder of its weights, and whether it was audited.

    The second sync changes a tower and its projector alone, the third all weights.
    """
    for version, changed in enumerate((None, is_vision, lambda name: True), 1):
        if changed is not None:
            _change_weights(engine, changed)
        result = rollout.update_weights(exporter.export(engine), version)
        saved = Path(f"{folder}-{version}")
        engine.save_hf(saved)
        yield version, saved, result.audited


@torch.no_grad()
def compare_vllm_images_in_bf16(folder: str | Path, *, device: str = "cpu") -> dict[str, Any]:
    """Return how vLLM in bf16 differs behind images and behind text, after each of three syncs.

    Syncs and weights are those of ``compare_vllm_images``, and the engine computes nothing.
    ``rows`` has the mean difference of a token's log-prob from transformers in float64 (``mean``)
    and that of transformers in bf16 (``plain``) of each sync, in nats, behind prompts with images
    and without. One of the latter is longer than the chunks of linear attention. ``audited`` and
    ``banned`` are those of ``compare_vllm_images``.
    """
    engine, exporter, rollout = _start_without_kernels(Path(folder), device, dtype="bfloat16")
    try:
        vision = read_vision(AutoConfig.from_pretrained(folder), "test")
        assert vision is not None
        prompts, images = draw_prompts(vision)
        long, _ = draw_prompt(vision, 90, ())
        prompts.append(long)
        images.append(None)
        found: dict[str, Any] = {"rows": [], "audited": True, "banned": 0}
        for version, saved, audited in _sync_changed(engine, exporter, rollout, folder):
            found["audited"] &= audited
            sampling = SamplingParams(n=8, max_new_tokens=6, temperature=1.0, seed=version)
            completions = rollout.generate(prompts, sampling, images=images)
            tokens = [token for one in completions for token in one.tokens]
            found["banned"] += sum(token in vision.tokens for token in tokens)
            own, plain = (
                _score_pictured(_plain_pictured(saved, dtype), completions, prompts, images, vision)
                for dtype in (torch.float64, torch.bfloat16)
            )
            for kind in ("images", "text"):
                chosen = [
                    place
                    for place, one in enumerate(completions)
                    if (images[one.prompt_index] is None) == (kind == "text")
                ]
                told = [torch.tensor(completions[i].log_probs).double() - own[i] for i in chosen]
                rounding = [plain[i] - own[i] for i in chosen]
                means = {"mean": told, "plain": rounding}
                row = {
                    key: float(torch.cat(one).abs().mean().nan_to_num(math.inf))
                    for key, one in means.items()
                }
                found["rows"].append({"version": version, "kind": kind, **row})
        return found
    finally:
        for part in (exporter, rollout, engine):
            part.close()


def _plain_pictured(folder: Path, dtype: torch.dtype) -> Any:
    """Return a folder's model as transformers computes it in plain PyTorch."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **plain).eval()


def _score_pictured(
    model: Any,
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None],
    vision: Vision,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """Return transformers' log-probs of each completion's tokens, in float64."""
    found: list[torch.Tensor] = []
    for one in completions:
        prompt = prompts[one.prompt_index]
        own = images[one.prompt_index]
        ids = torch.tensor([*prompt, *one.tokens])
        arguments = build_arguments(vision, ids, None if own is None else own.media)
        if own is not None:
            arguments["pixel_values"] = arguments["pixel_values"].to(model.dtype)
        logits = model(**arguments, use_cache=False).logits[0].double() / temperature
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(scores.gather(-1, torch.tensor(one.tokens)[:, None])[:, 0])
    return found


def draw_prompts(vision: Vision) -> tuple[list[list[int]], list[PromptImages | None]]:
    """Return prompts with one image, none, two images and none, and the images of each."""
    prompts: list[list[int]] = []
    images: list[PromptImages | None] = []
    for seed, shapes in enumerate(([(2, 4)], [], [(4, 4), (2, 2)], [])):
        prompt, own = draw_prompt(vision, seed, shapes)
        prompts.append(prompt)
        images.append(own)
    return prompts, images


def draw_prompt(
    vision: Vision, seed: int, shapes: Sequence[tuple[int, int]]
) -> tuple[list[int], PromptImages | None]:
    """Return a prompt with images of these heights and widths in patches."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(6, 50, (3 + seed,), generator=generator).tolist()
    placeholders = list(ids)
    grids = [[1, *shape] if vision.has_grid else [1, 1, 1] for shape in shapes]
    for grid in grids:
        ids += [*[vision.image_token] * vision.count_features(grid), 7 + seed, 9]
        placeholders += [vision.image_token, 7 + seed, 9]
    if not shapes:
        return ids, None
    rows = sum(a * b * c for a, b, c in grids)
    media = Media(
        pixels=torch.rand(rows, *vision.row_shape, generator=generator) * 2 - 1,
        grid=torch.tensor(grids),
        cu_images=torch.tensor([0, len(grids)]),
    )
    return ids, PromptImages(media=media, placeholders=placeholders, pictures=())


def is_vision(name: str) -> bool:
    """Return whether a parameter is one of a tower or its projector."""
    return "visual" in name or "vision_tower" in name or "multi_modal_projector" in name


@torch.no_grad()
def _compare_pictured(
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None],
    vision: Vision,
    model: Any,
    engine: Any,
    temperature: float,
) -> dict[str, float]:
    rows: list[dict[str, Any]] = []
    media: list[Media] = []
    found = {"log_probs": 0.0, "engine": 0.0}
    wanted = _score_pictured(model, completions, prompts, images, vision, temperature)
    for one, want in zip(completions, wanted, strict=True):
        own = images[one.prompt_index]
        apart = float((want - torch.tensor(one.log_probs, dtype=torch.float64)).abs().max())
        keep_larger(found, {"log_probs": apart})
        rows.append({"input_ids": [*prompts[one.prompt_index], *one.tokens]})
        media.append(Media.none(1) if own is None else own.media)
    batch = Batch.pack(rows)
    batch = batch.with_media(Media.concat(media))
    scored = engine.infer_batch(batch, temperature=temperature).log_probs.cpu()
    parts = scored.split([len(row["input_ids"]) for row in rows])
    for one, told in zip(completions, parts, strict=True):
        given = torch.tensor(one.log_probs)
        apart = float((told[-len(given) :] - given).abs().max())
        keep_larger(found, {"engine": apart})
    return found


def keep_larger(found: dict[str, Any], apart: Mapping[str, float]) -> None:
    """Keep the larger of each two differences in ``found``; one that is no number is infinite."""
    for key, value in apart.items():
        found[key] = max(found[key], math.inf if math.isnan(value) else value)


def refusal(folder: str | Path) -> EngineError | None:
    """Return the error with which engine or vLLM refuse a model, without its frames."""
    try:
        compare_vllm(folder)
    except EngineError as error:
        return error.with_traceback(None)
    return None


def _compare_syncs(
    engine: Any, exporter: Any, rollout: Any, folder: Path, *, rounded: bool, fp8: bool
) -> dict[str, Any]:
    (served_as,) = rollout._engine.apply_model(lambda model: type(model).__name__)
    found: dict[str, Any] = {"log_probs": 0.0, "greedy": 0.0, "audited": True}
    if rounded:
        found |= {"mean": 0.0, "plain": 0.0}
    for version in range(1, SYNCS + 1):
        if version > 1:
            _change_weights(engine)
        found["audited"] &= rollout.update_weights(exporter.export(engine), version).audited
        saved = folder.with_name(f"{folder.name}-{version}")
        engine.save_hf(saved)
        completions = rollout.generate(PROMPTS, GREEDY)
        apart = _compare_completions(completions, saved, rounded=rounded, fp8=fp8)
        keep_larger(found, apart)
    return found | {"served_as": served_as}


def _change_weights(engine: Any, changed: Callable[[str], bool] = lambda name: True) -> None:
    """Add noise to the weights and saved buffers of an engine whose names are chosen."""
    generator = torch.Generator().manual_seed(3)
    for entry in engine.table:
        if not changed(entry.name):
            continue
        local = entry.local.detach()
        noise = torch.randn(local.shape, generator=generator)
        local.add_(0.05 * noise.to(local))
        entry.publish()


def _compare_completions(
    completions: Sequence[Completion], folder: Path, *, rounded: bool, fp8: bool
) -> dict[str, float]:
    model = oracle(str(folder))
    found = {"log_probs": 0.0, "greedy": 0.0}
    differences: list[torch.Tensor] = []
    plain_differences: list[torch.Tensor] = []
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
        keep_larger(found, {key: float(value) for key, value in apart.items()})
        plain_differences.append(own)
    if not rounded:
        return found
    plain = oracle(str(folder), dtype=torch.bfloat16)
    rounding: AbstractContextManager[Any] = nullcontext()
    if fp8:
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        rounding = EmulatedFp8(plain, architecture)
    for place, completion in enumerate(completions):
        ids = torch.tensor([*PROMPTS[completion.prompt_index], *completion.tokens])
        with rounding:
            found_plain = log_probs(plain, ids)[-len(completion.tokens) :]
        plain_differences[place] = (found_plain - plain_differences[place]).abs()
    means = {"mean": differences, "plain": plain_differences}
    return found | {
        key: float(torch.cat(one).mean().nan_to_num(math.inf)) for key, one in means.items()
    }
