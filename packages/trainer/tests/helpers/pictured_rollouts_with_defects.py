"""Rollouts that are wrong about images on purpose, each as `local` but for one defect."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.errors import RolloutError, UnsupportedCapability
from engine_api.hf_vision import find_runs, read_vision
from engine_api.media import Media
from engine_api.rollout import Completion, PromptImages, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from engine_trainer.rollouts.images import Prefill
from engine_trainer.rollouts.local import LocalRollout

Prompts = Sequence[Sequence[int]]
Images = Sequence[PromptImages | None]


def with_pixels(images: PromptImages, pixels: torch.Tensor) -> PromptImages:
    """Return the images with other pixels."""
    return replace(images, media=replace(images.media, pixels=pixels))


class _Changes(LocalRollout):
    """A rollout that generates behind changed prompts or images."""

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        *,
        images: Images | None = None,
    ) -> list[Completion]:
        if images is None:
            return super().generate(prompts, sampling)
        changed, shown = self._change(prompts, images)
        return super().generate(changed, sampling, images=shown)

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images | None]:
        raise NotImplementedError


class ExchangesImages(_Changes):
    """Prompts of a call with images of the same sizes get each other's."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        places: dict[str, list[int]] = {}
        for place, one in enumerate(images):
            if one is not None:
                places.setdefault(repr(one.media.grid.tolist()), []).append(place)
        shown = list(images)
        for group in places.values():
            for place, other in zip(group, [*group[1:], group[0]], strict=True):
                shown[place] = images[other]
        return prompts, shown


class ShiftsImages(_Changes):
    """The images of one prompt are off by one, where they have one size."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        return prompts, [one if one is None else self._shifted(one) for one in images]

    def _shifted(self, images: PromptImages) -> PromptImages:
        media = images.media
        if media.num_images < 2 or len({*media.rows}) > 1:
            return images
        first, *rest = media.pixels.split(list(media.rows))
        return with_pixels(images, torch.cat([*rest, first]))


class TakesNeighbours(_Changes):
    """The patches of a call are off by eight, over the bounds of its prompts."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        shown = [one for one in images if one is not None]
        if not shown:
            return prompts, images
        rolled = torch.cat([one.media.pixels for one in shown]).roll(8, 0)
        parts = iter(rolled.split([sum(one.media.rows) for one in shown]))
        return prompts, [one if one is None else with_pixels(one, next(parts)) for one in images]


class KnowsImagesByIds(_Changes):
    """Prompts of the same ids get the images of the first one that came with them."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._known: dict[tuple[int, ...], PromptImages | None] = {}

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        return prompts, [
            self._known.setdefault((*prompt,), one)
            for prompt, one in zip(prompts, images, strict=True)
        ]


class CompletesPlaceholders(_Changes):
    """Completions are of the ids that are not expanded, with one feature of each image."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        ids = [
            prompt if one is None else one.placeholders
            for prompt, one in zip(prompts, images, strict=True)
        ]
        return ids, [one if one is None else self._smallest(one) for one in images]

    def _smallest(self, images: PromptImages) -> PromptImages:
        media = images.media
        parts = media.pixels.split(list(media.rows))
        grid = torch.tensor([[1, 2, 2]] * media.num_images)
        pixels = torch.cat([part[:4] for part in parts])
        return replace(images, media=replace(media, pixels=pixels, grid=grid))


class TakesMoreImages(_Changes):
    """Images for which a prompt has no place are left out in silence."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        return prompts, [
            self._as_many(prompt, one) for prompt, one in zip(prompts, images, strict=True)
        ]

    def _as_many(self, prompt: Sequence[int], images: PromptImages | None) -> PromptImages | None:
        if images is None or self._vision is None:
            return images
        batch = Batch.pack([{"input_ids": list(prompt)}])
        count = len(find_runs(batch, self._vision.vision.image_token))
        media = images.media
        if count >= media.num_images:
            return images
        if count == 0:
            return None
        shorter = Media(
            pixels=media.pixels[: sum(media.rows[:count])],
            grid=media.grid[:count],
            cu_images=torch.tensor([0, count]),
        )
        return replace(images, media=shorter)


class TakesFewerImages(_Changes):
    """Places without an image are completed as text."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        if self._vision is None:
            return prompts, images
        image = self._vision.vision.image_token
        return [
            [5 if one is None and token == image else token for token in prompt]
            for prompt, one in zip(prompts, images, strict=True)
        ], images


class TakesImagesWithoutTower(_Changes):
    """A model without a tower completes the text of prompts with images."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images | None]:
        return prompts, None if self._vision is None else images


class TakesTooManyEntries(_Changes):
    """Images for more prompts than there are, or for fewer, are cut or filled up."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        return prompts, [*images, None][: len(prompts)]


class CountsPlaceholders(LocalRollout):
    """A prompt is as long as it would be without the features of its images."""

    def _check(self, prompts: Prompts, sampling: SamplingParams) -> None:
        image = None if self._vision is None else self._vision.vision.image_token
        short = [
            [token for place, token in enumerate(prompt) if token != image or place == 0]
            for prompt in prompts
        ]
        super()._check(short, sampling)


class RaisesOwnErrors(LocalRollout):
    """A bad request is an error of Python."""

    def generate(self, *arguments: Any, **named: Any) -> list[Completion]:
        try:
            return super().generate(*arguments, **named)
        except RolloutError as error:
            raise ValueError(str(error)) from error


class _ChangesInputs(LocalRollout):
    """A rollout that changes what the model's first forward pass receives."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._vision is None:
            return
        # Its own check at the first weights would find the defect.
        self._verified = True
        prefill = self._vision.prefill

        def changed(*given: Any) -> Prefill | None:
            made = prefill(*given)
            return None if made is None else self._changed(made)

        self._vision.prefill = changed

    def _changed(self, made: Prefill) -> Prefill | None:
        raise NotImplementedError


class DropsImages(_ChangesInputs):
    """Images are left out in silence, and their tokens are as other tokens."""

    def _changed(self, made: Prefill) -> None:
        return None


class PositionsOfText(_ChangesInputs):
    """An image's tokens have positions as those of text."""

    def _changed(self, made: Prefill) -> Prefill:
        assert made.positions is not None
        rows = made.positions.shape[1:]
        flat = torch.arange(rows[1]).expand(3, *rows)
        return replace(made, positions=flat, deltas=None)


class GoesOnBehindTheVideo(_ChangesInputs):
    """A completion goes on behind the largest position of its prompt, as transformers counts it."""

    def _changed(self, made: Prefill) -> Prefill:
        assert made.positions is not None
        assert made.deltas is not None
        above = made.positions.amax((0, 2)) - made.positions[0, :, -1]
        return replace(made, deltas=made.deltas + above)


class ForgetsSeconds(_Changes):
    """The rows in time of a video lie one position apart."""

    def _change(self, prompts: Prompts, images: Images) -> tuple[Prompts, Images]:
        return prompts, [one if one is None else self._counted(one) for one in images]

    def _counted(self, images: PromptImages) -> PromptImages:
        seconds = images.media.seconds
        if seconds is None:
            return images
        return replace(images, media=replace(images.media, seconds=seconds.sign() / 4))


class _Bans(LocalRollout):
    """A rollout that leaves out other tokens than those of images and videos."""

    banned = slice(0, 0)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._vision is not None:
            self._vision.banned = self._vision.banned[self.banned]


class DrawsImageTokens(_Bans):
    """Tokens of images and videos are drawn."""


class DrawsVideoTokens(_Bans):
    """Tokens of videos are drawn."""

    banned = slice(0, 1)


class RenormalizesOverAllowed(LocalRollout):
    """Log-probs are of what is left without tokens of images and videos."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._vision is not None:
            banned = self._vision.banned
            self._model.lm_head.register_forward_hook(
                lambda module, given, logits: logits.index_fill(-1, banned, -1e9)
            )


class KeepsTower(LocalRollout):
    """From the second sync on the tower stays as it was."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        tower = [p for n, p in self._model.named_parameters() if ".visual." in n]
        old = [parameter.detach().clone() for parameter in tower]
        is_first = self.weight_version < 0
        result = super().update_weights(export, version)
        if not is_first:
            for parameter, before in zip(tower, old, strict=True):
                parameter.data.copy_(before)
        return result


class KeepsFeatures(LocalRollout):
    """Features of images that came before a sync are served after it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._vision is None:
            return
        tower = self._model.model.visual
        compute = tower.forward
        kept: dict[bytes, Any] = {}

        def forward(pixels: torch.Tensor, *given: Any, **named: Any) -> Any:
            key = pixels.numpy().tobytes()
            if key not in kept:
                kept[key] = compute(pixels, *given, **named)
            # The model changes it.
            return copy.copy(kept[key])

        tower.forward = forward


class PassesOverTower(LocalRollout):
    """Tensors of the tower that an export lacks are passed over."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        assert self._table is not None
        tower = {name: one for name, one in self._table._views.items() if "visual." in name}
        given = {name: tensor.clone() for name, tensor in export}
        return super().update_weights(iter((tower | given).items()), version)


class CountsTextAlone(LocalRollout):
    """A sync says that the text model's tensors alone are installed."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        result = super().update_weights(export, version)
        tower = [name for name, _ in self._model.named_parameters() if ".visual." in name]
        return replace(result, num_tensors=result.num_tensors - len(tower))


class ForgetsSeed(LocalRollout):
    """Behind images tokens are drawn without the request's seed."""

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, images: Images | None = None
    ) -> list[Completion]:
        pictured = images is not None and any(one is not None for one in images)
        drawn = replace(sampling, seed=None) if pictured else sampling
        return super().generate(prompts, drawn, images=images)


class DropsUndeclaredImages(LocalRollout):
    """Images are accepted and left out, and the plug-in does not declare `vision`."""

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, **ignored: Any
    ) -> list[Completion]:
        del ignored
        image = None if self._vision is None else self._vision.vision.image_token
        shown = [[5 if token == image else token for token in prompt] for prompt in prompts]
        return super().generate(shown, sampling)


class NamesNoCapability(LocalRollout):
    """Images are refused by an error that does not name `vision`, which is not declared."""

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, images: Images | None = None
    ) -> list[Completion]:
        if images is not None:
            raise RolloutError("no images", remedy="remove them")
        return super().generate(prompts, sampling)


class TakesUndeclaredVideos(LocalRollout):
    """Videos are completed, and the plug-in declares `vision` without `video`."""


class NamesVision(LocalRollout):
    """Videos are refused by the name of `vision`, which is declared."""

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, images: Images | None = None
    ) -> list[Completion]:
        if any(one is not None and one.media.seconds is not None for one in images or ()):
            raise UnsupportedCapability(Capability.VISION, where="here", why="videos", remedy="")
        return super().generate(prompts, sampling, images=images)


class TakesImagesAlone(LocalRollout):
    """A right rollout that does not declare `video`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._vision is not None:
            found = read_vision(self._model.config, "images alone")
            assert found is not None
            self._vision.vision = found


class TakesTextAlone(LocalRollout):
    """A right rollout that does not declare `vision`, whose model may have a tower."""

    def generate(self, prompts: Prompts, sampling: SamplingParams) -> list[Completion]:
        return super().generate(prompts, sampling)
