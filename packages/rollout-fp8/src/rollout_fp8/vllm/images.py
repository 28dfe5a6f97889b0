"""Images of prompts, as vLLM's engine takes them from its own processing.

A rollout gives vLLM the pixels of the model's own processor, which the engine trains on, in place
of pictures. A prompt's ids have a token for each feature already. So vLLM processes and expands
nothing, and what it computes with cannot differ from what is trained on: neither by another
backend of the processor nor by settings that vLLM does not know (``data.processor_kwargs``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from engine_api.batch import Batch
from engine_api.errors import RolloutError
from engine_api.hf_vision import Vision, find_runs
from engine_api.media import Media
from engine_api.rollout import PromptImages

# vLLM's name of the modality.
_IMAGE = "image"
# Reasons why a family is not served, although engines train it.
_REFUSED = {
    "qwen3_vl_moe": "vLLM cannot load its experts again (0.32.0)",
}
# Families that are refused on a CPU alone.
_REFUSED_ON_CPU = {
    "gemma3": "its image tokens attend in both directions, and attention of vLLM's CPU build is "
    "causal (0.32.0)"
}
# Key of the number of tiles of each image, by family.
_TILES = {"gemma3": "num_patches", "internvl": "image_num_patches"}


class ImageInputs:
    """vLLM's side of a model's images.

    Args:
        vision: the images that the model takes.
        family: the model's ``model_type``.
        dtype: dtype of the computation.
    """

    def __init__(self, vision: Vision, family: str, dtype: torch.dtype) -> None:
        self.vision = vision
        self._family = family
        self._dtype = dtype

    def prompt(self, ids: Sequence[int], images: PromptImages, names: Sequence[str]) -> Any:
        """Return a prompt with images as the engine takes it.

        Args:
            ids: the prompt's tokens.
            images: its images, which ``check_images`` has compared with the tokens.
            names: a name for each image. vLLM computes images of one name once, and keeps their
                features.
        """
        batch = Batch.pack([{"input_ids": list(ids)}])
        places = [
            PlaceholderRange(offset=run.start, length=run.length)
            for run in find_runs(batch, self.vision.image_token)
        ]
        return mm_input(
            list(ids), self._items(images.media), {_IMAGE: list(names)}, {_IMAGE: places}
        )

    def _items(self, media: Media) -> MultiModalKwargsItems:
        """Return the pixels of each image, and what vLLM's class of the family needs with them."""
        rows = torch.tensor(media.rows)
        pixels = media.pixels.to("cpu", self._dtype)
        data: dict[str, Any] = {"pixel_values": pixels}
        fields = {"pixel_values": MultiModalFieldConfig.flat_from_sizes(_IMAGE, rows)}
        if self.vision.has_grid:
            data["image_grid_thw"] = media.grid.cpu()
            fields["image_grid_thw"] = MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True)
        else:
            key = _TILES[self._family]
            data[key] = rows
            fields[key] = MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True)
        if self._family == "internvl":
            data["image_token_id"] = torch.tensor(self.vision.image_token)
            fields["image_token_id"] = MultiModalFieldConfig.shared(_IMAGE, media.num_images)
        return MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), fields)


def require_family(family: str, device: str, where: str) -> None:
    """Raise ``RolloutError`` with the reason for a family that vLLM does not serve rightly."""
    here = _REFUSED_ON_CPU if device == "cpu" else {}
    why = (_REFUSED | here).get(family)
    if why is not None:
        raise RolloutError(
            f"no rollout of a {family} with vLLM{' on a CPU' if family in here else ''}",
            where=where,
            why=why,
            remedy="rollout.name=local for this model",
        )


def digests(media: Media) -> list[str]:
    """Return the SHA-256 of each image as the model takes it."""
    found: list[str] = []
    grids: list[list[int]] = media.grid.tolist()
    for grid, pixels in zip(grids, media.pixels.split(list(media.rows)), strict=True):
        digest = hashlib.sha256(repr(grid).encode())
        digest.update(pixels.float().cpu().contiguous().numpy().data)
        found.append(digest.hexdigest())
    return found


def require_prompt(prompt: Sequence[int], received: Sequence[int] | None, where: str) -> None:
    """Raise ``RolloutError`` that names the first difference if a server has other ids."""
    got = list(received or ())
    want = list(prompt)
    if got == want:
        return
    at = next(
        (i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None
    )
    if at is None:
        what = f"expected a prompt of {len(want)} tokens, got one of {len(got)}"
    else:
        what = f"expected id {want[at]} at place {at} of a prompt, got {got[at]}"
    raise RolloutError(
        what,
        where=where,
        why="vLLM generated behind other ids than those that are trained on",
        remedy="this is a fault of vLLM or of rollout-fp8: use rollout.name=local, and report it",
    )
