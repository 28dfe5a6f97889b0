"""Checks that every rollout makes before it generates or installs anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_api.errors import BatchError, RolloutError
from engine_api.rollout import PromptImages, SamplingParams

if TYPE_CHECKING:
    from engine_api.hf_vision import Vision


def check_sampling(sampling: SamplingParams, where: str) -> None:
    """Raise ``RolloutError`` for sampling parameters outside their range."""
    ranges = {
        "n": sampling.n >= 1,
        "max_new_tokens": sampling.max_new_tokens >= 1,
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
    }
    for name, fits in ranges.items():
        if not fits:
            raise RolloutError(
                f"{name}={getattr(sampling, name)}",
                where=where,
                remedy="n and max_new_tokens: at least 1; temperature and top_k: at least 0; "
                "top_p: above 0, at most 1",
            )


def check_prompts(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    where: str,
    *,
    vocabulary: int,
    limit: int | None,
    room: str,
    remedy: str,
) -> None:
    """Raise ``RolloutError`` that names the first prompt which cannot be completed.

    Args:
        prompts: token ids of each prompt.
        max_new_tokens: number of tokens that may follow each prompt.
        where: name of the rollout, for the error.
        vocabulary: number of token ids; each id is below it.
        limit: largest number of tokens of a prompt and its completion together; None is no limit.
        room: reason for the limit, for the error.
        remedy: advice on the limit, for the error.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RolloutError(
                f"prompt {index} is empty", where=where, remedy="give it at least one token"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise RolloutError(
                f"prompt {index} has a token outside the vocabulary",
                where=where,
                why=f"ids are 0 to {vocabulary - 1}",
                remedy="use the model's own tokenizer",
            )
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise RolloutError(
                f"prompt {index} has {len(prompt)} tokens, and {max_new_tokens} may follow",
                where=where,
                why=room,
                remedy=remedy,
            )


def check_images(
    prompts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None] | None,
    vision: Vision | None,
    where: str,
) -> None:
    """Raise ``RolloutError`` for images that are not those of their prompts.

    A prompt with image tokens and without images is refused, too.

    Args:
        prompts: token ids of each prompt, none empty.
        images: the images of each prompt; None: no prompt has any.
        vision: the images that the model takes, or None for a model without a tower.
        where: name of the rollout, for the error.
    """
    given = [None] * len(prompts) if images is None else list(images)
    if len(given) != len(prompts):
        raise RolloutError(
            f"expected images for {len(prompts)} prompts, got them for {len(given)}",
            where=where,
            remedy="give None for a prompt without images",
        )
    if vision is None:
        for index, one in enumerate(given):
            if one is not None:
                raise RolloutError(
                    f"prompt {index} has images, and the model has no vision tower",
                    where=where,
                    why="its config.json has no vision_config",
                    remedy="give a vision-language model, or remove the images",
                )
        return
    # torch is imported with it, which no check of text needs.
    from engine_api.batch import Batch

    for index, (prompt, one) in enumerate(zip(prompts, given, strict=True)):
        try:
            batch = Batch.pack([{"input_ids": list(prompt)}])
            vision.check(batch.with_media(None if one is None else one.media))
        except BatchError as error:
            # Errors of pixels and grids name no document.
            what = error.what if "document 0" in error.what else f"document 0: {error.what}"
            raise RolloutError(
                what.replace("document 0", f"prompt {index}"),
                where=where,
                why=error.why,
                remedy=error.remedy,
            ) from error


def check_version(version: int, served: int, *, where: str) -> None:
    """Raise ``RolloutError`` for weights older than the version ``served`` last (-1: none yet)."""
    if version < served:
        raise RolloutError(
            f"version {version} is stale",
            where=where,
            why=f"{served} was served before",
            remedy="sync the engine's current weights; after a return to a checkpoint create "
            "another rollout",
        )
