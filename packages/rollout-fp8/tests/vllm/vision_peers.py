"""Functions on images that the tests of vLLM call in ranks.

vLLM's classes of models with a tower import torchvision, of which PyPI's build fails beside a torch
for CPUs: it lacks operators that its own modules name at their import. Nothing here calls them, so
they are declared without a kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Kept: the operators are gone with it.
_LIBRARY = torch.library.Library("torchvision", "DEF")


def import_torchvision() -> None:
    """Import torchvision, whichever build it is."""
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


import_torchvision()

from holders import sleepable  # noqa: E402
from pictured_models import draw, write_rows  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_rollouts import (  # noqa: E402
    compare_vllm_images,
    compare_vllm_images_in_bf16,
    draw_prompt,
    draw_prompts,
    start_vllm,
)
from transformers import AutoConfig  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    is_layer_skipped,
)
from vllm.model_executor.models import registry  # noqa: E402
from vllm_peers import DEVICE, assert_gone, error_of, hide_kernels, weights_of  # noqa: E402

from engine_api.config import ModelSource  # noqa: E402
from engine_api.errors import EngineError  # noqa: E402
from engine_api.hf_vision import read_vision  # noqa: E402
from engine_api.rollout import Completion, PromptImages, SamplingParams  # noqa: E402
from engine_trainer.config import RLConfig  # noqa: E402
from engine_trainer.config.loading import load_config  # noqa: E402
from engine_trainer.rl.loop import train_rl  # noqa: E402
from engine_trainer.telemetry.logs import METRICS, read_metrics  # noqa: E402
from rollout_fp8.options import VllmOptions  # noqa: E402
from rollout_fp8.vllm import images, start  # noqa: E402
from rollout_fp8.vllm.rollout import _quantization_config  # noqa: E402

FLAT = SamplingParams(n=64, max_new_tokens=8, temperature=50.0, seed=1)
SAMPLED = SamplingParams(n=2, max_new_tokens=6, seed=1)


def compare(folder: str) -> dict[str, Any]:
    """Return how vLLM differs behind images (see ``compare_vllm_images``)."""
    return compare_vllm_images(folder, device=DEVICE)


def compare_in_bf16(folder: str) -> dict[str, Any]:
    """Return how vLLM differs in bf16 (see ``compare_vllm_images_in_bf16``)."""
    hide_kernels()
    return compare_vllm_images_in_bf16(folder, device=DEVICE)


@contextmanager
def served(folder: str, **arguments: Any) -> Iterator[Any]:
    """Yield a rollout with the weights of its folder."""
    rollout = start_vllm(folder, device=DEVICE, **arguments)
    try:
        rollout.update_weights(iter(load_file(f"{folder}/model.safetensors").items()), 1)
        yield rollout
    finally:
        rollout.close()


def one_after_another(folder: str) -> None:
    """Start, use and close two rollouts, and check that nothing of either is in memory."""
    vision = read_vision(AutoConfig.from_pretrained(folder), "test")
    assert vision is not None
    prompts, images = draw_prompts(vision)
    for _ in range(2):
        with served(folder, memory_saver=DEVICE == "cuda") as rollout:
            rollout.generate(prompts, SAMPLED, images=images)
            # Towers share activations, which hold no tensor, with later models.
            weights = [one for one in weights_of(rollout) if isinstance(one(), torch.Tensor)]
        # Before anything else is collected: vLLM's next engine looks only there.
        assert sleepable() == []
        assert_gone(weights)


def negative(images: PromptImages) -> PromptImages:
    """Return images with the opposite colors."""
    return replace(images, media=replace(images.media, pixels=-images.media.pixels))


def behaviour(folder: str) -> dict[str, Any]:
    """Return what one rollout answers to several requests, by the name of the request."""
    vision = read_vision(AutoConfig.from_pretrained(folder), "test")
    assert vision is not None
    prompts, images = draw_prompts(vision)
    one, of_one = draw_prompt(vision, 5, [(4, 4)])
    assert of_one is not None
    twice = [of_one, negative(of_one)]
    with served(folder) as rollout:
        found: dict[str, Any] = {
            "special": (vision.image_token, vision.video_token),
            "flat": rollout.generate(prompts, FLAT, images=images),
            "greedy at images": rollout.generate(
                [one], replace(FLAT, n=1, temperature=0.0), images=[of_one]
            ),
            "mixed": rollout.generate(prompts, SAMPLED, images=images),
            "text": rollout.generate([prompts[1], prompts[3]], SAMPLED),
            "pictures": rollout.generate([one, one], SAMPLED, images=twice),
            "second": rollout.generate([one], SAMPLED, images=twice[1:]),
            "errors": {
                "none": error_of(rollout.generate, prompts, SAMPLED),
                "few": error_of(rollout.generate, prompts, SAMPLED, images=images[:1]),
                "cut": error_of(rollout.generate, [prompts[0][:-3]], SAMPLED, images=[images[2]]),
            },
            "other ids": _generate_behind_other_ids(rollout, one, of_one),
        }
        found["after"] = rollout.generate(prompts, SAMPLED, images=images)
    return found


def train(folder: str) -> list[dict[str, float]]:
    """Return the metrics of two steps of RL on rows with one image, none and two."""
    place = Path(folder).parent
    draw(place, "a.png")
    draw(place, "b.jpg", (40, 16))
    (place / "reward.py").write_text(
        "def reward(sample):\n    return sum(map(ord, sample.completion)) % 7 / 6\n"
    )
    shown = ({"images": ["b.jpg"]}, {"images": None}, {"images": ["a.png", "b.jpg"]})
    texts = ("<image>t5", "t6", "<image>t7<image>")
    rows = [
        {"prompt": text, "answer": "1", **images} for text, images in zip(texts, shown, strict=True)
    ]
    engine: dict[str, Any] = {
        "model": {"path": folder},
        "backend": "fsdp2",
        "device": "cpu",
        "optimizer": {"lr": 0.01},
        "memory": {"max_tokens": 256, "max_patches": 64},
    }
    tree: dict[str, Any] = {
        "engine": engine,
        "data": {"source": str(write_rows(place / "rows.jsonl", rows)), "shuffle": False},
        "rollout": {
            "name": "vllm",
            "n": 3,
            "max_new_tokens": 6,
            "batch_size": 8,
            "options": {"kv_cache_bytes": 1 << 27},
        },
        "reward": {"function": f"{place / 'reward.py'}:reward", "workers": 0, "timeout_s": None},
        "algorithm": {"prompts_per_step": 3},
        "run": {
            "output_dir": str(place / "run"),
            "steps": 2,
            "progress": False,
            "tensorboard": False,
            "report": False,
        },
    }
    file = place / "run.yaml"
    # JSON is YAML.
    file.write_text(json.dumps(tree))
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        outcome = train_rl(load_config(RLConfig, file, []))
    return [row for row in read_metrics(outcome.folder / METRICS) if "train/loss" in row]


def _generate_behind_other_ids(
    rollout: Any, prompt: list[int], images: PromptImages
) -> EngineError | list[Completion] | None:
    """Return the error where vLLM takes a prompt for another one."""
    given = rollout._images.prompt

    def changed(ids: list[int], *rest: Any) -> Any:
        return given([ids[0] + 1, *ids[1:]], *rest)

    with mock.patch.object(rollout._images, "prompt", changed):
        return error_of(rollout.generate, [prompt], SAMPLED, images=[images])


def quantized_layers(folder: str) -> dict[str, bool]:
    """Return vLLM's linear layers, and whether its FP8 configuration quantizes each."""

    def read(model: Any) -> dict[str, bool]:
        config = Fp8Config.from_config(_quantization_config(ModelSource(path=folder)))
        config.apply_vllm_mapper(model.hf_to_vllm_mapper)
        return {
            name: not is_layer_skipped(name, config.ignored_layers, model.packed_modules_mapping)
            for name, module in model.named_modules()
            if isinstance(module, LinearBase)
        }

    rollout = start_vllm(folder, device=DEVICE)
    try:
        (found,) = rollout._engine.apply_model(read)
        return found
    finally:
        rollout.close()


def sync_audited(folder: str) -> bool:
    """Return whether a sync of a folder's weights compared all that is then served.

    The family may be one that vLLM does not compute rightly here: nothing is generated.
    """
    with mock.patch.object(images, "_REFUSED_ON_CPU", {}), served(folder) as rollout:
        weights = load_file(f"{folder}/model.safetensors")
        return rollout.update_weights(iter(weights.items()), 2).audited


def refused(folder: str, **arguments: Any) -> EngineError | None:
    """Return the error of making a rollout."""

    def make() -> None:
        with served(folder, **arguments):
            pass

    return error_of(make)


def refused_without_torchvision(folder: str) -> EngineError | None:
    """Return the error where torchvision cannot be imported."""
    with mock.patch.dict("sys.modules", {"torchvision": None}):
        return refused(folder)


def overrides_of(device: str, *, tied: bool) -> dict[str, Any]:
    """Return the keys that vLLM reads in the place of a folder's, for a model with a tower."""
    plan = start.Plan(
        device=torch.device(device),
        model=ModelSource(path="model", config_overrides={"text_config": {"rope_theta": 1e5}}),
        dtype="bfloat16",
        max_num_seqs=1,
        options=VllmOptions(),
        tied=tied,
        has_vision=True,
    )
    return start._arguments(plan)["hf_overrides"]
