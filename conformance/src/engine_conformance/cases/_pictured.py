"""Prompts with pictures for a rollout, and the judgement of completions behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.rollout import Completion, PromptImages, SamplingParams
from engine_conformance.cases._case import SkipCase, must
from engine_conformance.cases._rollouts import Generate, RolloutReply
from engine_conformance.cases._served import well_formed
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_close_per_token
from engine_conformance.fixtures.pictured_prompts import (
    BANNED,
    PicturedPrompt,
    draw_prompt,
    write_served_model,
)
from engine_conformance.fixtures.pictures import LAYERS, PictureOracle

__all__ = [
    "VOCABULARY",
    "apart_by_images",
    "ask_for",
    "mixed_prompts",
    "moving_prompts",
    "picture_oracle",
    "pictured_model",
    "pictured_served",
    "text_prompts",
    "training_batch",
]

VOCABULARY = 64


def pictured_model(target: Target, write: Callable[[Path], Path] = write_served_model) -> Path:
    """Return the folder of the model that ``write`` writes, written once."""
    if find_spec("transformers") is None:
        raise SkipCase("needs transformers, which writes and computes the model of these cases")
    return target.written(write)


@cache
def picture_oracle(folder: str) -> PictureOracle:
    """Return the oracle of a folder."""
    return PictureOracle(Path(folder))


def mixed_prompts() -> tuple[PicturedPrompt, ...]:
    """Return prompts with one, two and three images and none, some of which differ in images alone.

    The second and third have two images of one size. The last but two begins and ends with an
    image. The last is the first one again.
    """
    one = draw_prompt(1, 4, (2, 4), 3)
    two = draw_prompt(2, 2, (4, 4), 2, (4, 4), 3)
    return (
        one,
        two,
        draw_prompt(2, 2, (4, 4), 2, (4, 4), 3, pictures=12),
        draw_prompt(3, 6),
        draw_prompt(4, (4, 6), 1, (2, 2), 2, (2, 4)),
        draw_prompt(1, 4, (2, 4), 3, pictures=11),
        draw_prompt(5, 1),
        one,
    )


def moving_prompts() -> tuple[PicturedPrompt, ...]:
    """Return prompts with a video, with videos and images, with an image, and with text alone.

    The first two differ in the frames of their videos alone. The last but two ends in a video,
    and another one in few tokens behind it.
    """
    return (
        draw_prompt(11, 4, (3, 2, 4), 3),
        draw_prompt(11, 4, (3, 2, 4), 3, pictures=21),
        draw_prompt(12, 2, (2, 4), 2, (4, 2, 2), 1),
        draw_prompt(13, 3, (2, 2, 2), 2, (4, 2), 2, (1, 4, 2), 4),
        draw_prompt(14, 3, (4, 2, 4)),
        draw_prompt(15, 4, (2, 4), 3),
        draw_prompt(16, 6),
    )


def text_prompts() -> tuple[PicturedPrompt, ...]:
    """Return prompts without images."""
    return draw_prompt(6, 5), draw_prompt(7, 1), draw_prompt(8, 9)


def ask_for(prompts: Sequence[PicturedPrompt], sampling: SamplingParams) -> Generate:
    """Return the request for completions of prompts with their images."""
    return Generate(
        prompts=tuple(one.ids for one in prompts),
        sampling=sampling,
        images=tuple(one.images for one in prompts),
    )


def training_batch(prompts: Sequence[PicturedPrompt]) -> Batch:
    """Return the prompts as documents to train on."""
    return Batch.pack(
        [
            {
                "input_ids": torch.tensor(one.ids),
                "loss_weight": torch.tensor([0.0] + [1.0] * (len(one.ids) - 1)),
                "media": None
                if one.images is None
                else {"pixels": one.images.media.pixels, "grid": one.images.media.grid},
            }
            for one in prompts
        ]
    )


def _scores(
    oracle: PictureOracle, ask: Generate, c: Completion, images: PromptImages | None
) -> Tensor:
    """Return the log-probs ``[len(c.tokens), V]`` behind a prompt and these images."""
    prompt = ask.prompts[c.prompt_index]
    ids = torch.tensor([*prompt, *c.tokens])
    media = None if images is None else images.media
    with torch.no_grad():
        shown = () if media is None else (media.pixels, media.grid, media.seconds)
        logits = oracle.logits(ids, *(shown or (None, None)))[len(prompt) - 1 : -1]
    return (logits / (ask.sampling.temperature or 1.0)).log_softmax(-1)


def _own_scores(oracle: PictureOracle, ask: Generate, c: Completion) -> Tensor:
    return _scores(oracle, ask, c, None if ask.images is None else ask.images[c.prompt_index])


def pictured_served(
    target: Target, reply: RolloutReply, folder: Path, where: str, *, version: int
) -> float:
    """Require that completions are of the weights of ``folder``, behind their prompts' own images.

    Greedy tokens must be the oracle's likeliest ones apart from `BANNED`, as far as rounding leaves
    a choice. Log-probs of sampled tokens must be those before banned tokens are left out. Returns
    the margin.
    """
    ask = reply.action
    assert isinstance(ask, Generate)
    completions = well_formed(reply, where, version=version, vocab=VOCABULARY)
    for c in completions:
        found = sorted({*BANNED} & {*c.tokens})
        problem = f"{c.tokens} has tokens of an image or a video: {found}"
        must(not found, "tokens", problem, where=f"{where}, prompt {c.prompt_index}")
    oracle = picture_oracle(str(folder))
    rows = [_own_scores(oracle, ask, c) for c in completions]
    bound = target.tolerance("log_probs", layers=LAYERS)
    if ask.sampling.temperature == 0 or ask.sampling.top_k == 1:
        return _likeliest(completions, rows, 2 * bound.atol, where)
    picked = [
        one.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
        for one, c in zip(rows, completions, strict=True)
    ]
    _name_other_images(oracle, reply, picked, bound.atol, where)
    got = [p for c in completions for p in c.log_probs]
    bounds = [0, *accumulate(map(len, picked))]
    name = f"log_probs ({where}; a document is a completion)"
    return assert_close_per_token(name, got, torch.cat(picked), bound, cu_seqlens=bounds)


def _likeliest(
    completions: Sequence[Completion], rows: Sequence[Tensor], rounding: float, where: str
) -> float:
    """Require the likeliest of the tokens that are not banned, and return the margin."""
    worst = 0.0
    for c, scores in zip(completions, rows, strict=True):
        allowed = scores.index_fill(-1, torch.tensor(BANNED), -torch.inf)
        behind = allowed.amax(-1) - allowed.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
        step = int(behind.argmax())
        margin = float(behind[step] / rounding)
        problem = (
            f"token {c.tokens[step]}, the oracle has {int(allowed[step].argmax())} "
            f"(by {behind[step]:.3g} nats)"
        )
        place = f"{where}, prompt {c.prompt_index}, step {step}"
        must(margin <= 1, "likeliest tokens", problem, where=place)
        worst = max(worst, margin)
    return worst


def _name_other_images(
    oracle: PictureOracle, reply: RolloutReply, picked: Sequence[Tensor], bound: float, where: str
) -> None:
    """Raise `ConformanceFailure` for log-probs that other images than the prompt's own explain.

    Args:
        oracle: of the served weights.
        reply: completions with their log-probs.
        picked: for each completion the oracle's log-probs behind its own images.
        bound: error of a log-prob, in nats.
        where: the call, for the error.
    """
    ask = reply.action
    assert isinstance(ask, Generate)
    for c, own in zip(reply.completions, picked, strict=True):
        got = torch.tensor(c.log_probs, dtype=torch.float64)
        near = float((got - own).abs().max())
        if near <= bound:
            continue
        for kind, images in _other_images(ask, c.prompt_index):
            other = _scores(oracle, ask, c, images)
            other = other.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
            apart = float((got - other).abs().max())
            must(
                apart > bound,
                "log_probs",
                f"{kind} explain them to {apart:.3g} nats, the prompt's own images to {near:.3g}",
                where=f"{where}, prompt {c.prompt_index}",
            )


def _other_images(ask: Generate, index: int) -> list[tuple[str, PromptImages | None]]:
    """Return wrong images for a prompt, with their names."""
    own = None if ask.images is None else ask.images[index]
    if ask.images is None or own is None:
        return []
    found: list[tuple[str, PromptImages | None]] = [("no images", None)]
    for other, images in enumerate(ask.images):
        is_alike = images is not None and torch.equal(images.media.grid, own.media.grid)
        if is_alike and images is not own:
            found.append((f"the images of prompt {other}", images))
    alike = bool((own.media.grid == own.media.grid[0]).all())
    if own.media.num_images > 1 and alike:
        parts = own.media.pixels.split(list(own.media.rows))
        turned = torch.cat([*parts[1:], parts[0]])
        moved = replace(own, media=replace(own.media, pixels=turned))
        found.append(("its images in another order", moved))
    return found


def apart_by_images(folder: Path, reply: RolloutReply) -> dict[str, float]:
    """Return by kind of wrong images the least difference that they make to a completion, in nats.

    The difference is the largest one of its tokens' log-probs. Prompts count that have other images
    of this kind.
    """
    ask = reply.action
    assert isinstance(ask, Generate)
    oracle = picture_oracle(str(folder))
    found: dict[str, float] = {}
    for c in reply.completions:
        tokens = torch.tensor(c.tokens)[:, None]
        own = _own_scores(oracle, ask, c).gather(-1, tokens)
        for kind, images in _other_images(ask, c.prompt_index):
            apart = float((_scores(oracle, ask, c, images).gather(-1, tokens) - own).abs().max())
            name = "others" if kind.startswith("the images of") else kind
            found[name] = min(found.get(name, apart), apart)
    return found
