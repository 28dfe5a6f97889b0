"""A rollout's images: completions are of the pixels and ids that the engine trains on.

The model is a tiny Qwen2.5-VL, which transformers writes, and computes in float64 one completion at
a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_api.media import Media
from engine_api.rollout import PromptImages, SamplingParams
from engine_conformance.cases._case import FLOAT32, AcceptedUndeclared, SkipCase, case, must
from engine_conformance.cases._pictured import (
    VOCABULARY,
    apart_by_images,
    ask_for,
    mixed_prompts,
    moving_prompts,
    picture_oracle,
    pictured_model,
    pictured_served,
    text_prompts,
    training_batch,
)
from engine_conformance.cases._rollouts import (
    Action,
    Generate,
    RolloutReply,
    Spoil,
    Sync,
    chain,
    drive,
)
from engine_conformance.cases._served import (
    GREEDY,
    engine_matches,
    prompts_of,
    refused,
    replies,
    rollout_model,
    sampled,
    served,
    worked,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.fixtures.pictured_prompts import (
    BANNED,
    PicturedPrompt,
    draw_prompt,
    write_other_tower,
    write_other_weights,
)
from engine_conformance.fixtures.pictures import IMAGE, LAYERS, VIDEO
from engine_conformance.oracle import read_safetensors

SINCE = "1.4"
_VISION = (Capability.VISION,)
# Nearly each token is as likely as any other.
_FLAT = sampled(n=32, temperature=50.0)
_SPOILS: tuple[Spoil, ...] = ("missing", "unknown", "shape", "twice")
_TOWER = "visual."
# Of the model, which are max_position_embeddings in its config.json.
_POSITIONS = 512


@case(id="rollout.images", since=SINCE, requires=_VISION, world=(1,), profile="rollout")
def images(target: Target) -> float:
    """Completions MUST be of each prompt's own images and ids, in any mixture of prompts.

    Prompts with one, two and three images and none stand in one call. Some have the same ids and
    other images, one is there twice, and one begins and ends with an image. They come again in
    another order, with others' images, one at a time, and without any image. In float32 the same
    seed draws the same tokens behind the same images after all of this.

    If this fails: images are left out in silence; features move to another prompt or to the next
    image, or are kept by the ids of a prompt; keys and values of equal ids are shared over other
    images; a server expands placeholders itself, and completes other ids than those that are
    trained on; positions count an image's tokens as text; padding shifts them.
    """
    model = pictured_model(target)
    prompts = mixed_prompts()
    exchanged = [
        prompts[5],
        prompts[2],
        prompts[1],
        prompts[3].with_images_of(prompts[6]),
        *prompts[4:5],
        prompts[0],
    ]
    asks = {
        "a mixture": ask_for(prompts, sampled(n=2)),
        "at temperature 0.7": ask_for(prompts[::-1], sampled(temperature=0.7)),
        "images exchanged": ask_for(exchanged, sampled()),
        "greedy": ask_for(prompts, GREEDY),
        "no prompt with images": ask_for(text_prompts(), sampled()),
        "no images given": replace(ask_for(text_prompts(), sampled()), images=None),
        "the first alone": ask_for(prompts[:1], sampled()),
        "the second alone": ask_for(prompts[1:2], sampled()),
        "the mixture again": ask_for(prompts, sampled(n=2)),
    }
    got = replies(target, model, [Sync(folder=model, version=3), *asks.values()])
    worked(got[0], model.name)
    margins = [
        pictured_served(target, reply, model, where, version=3)
        for where, reply in zip(asks, got[1:], strict=True)
    ]
    if target.dtype == "float32":
        first, again = ([c.tokens for c in one.completions] for one in (got[1], got[-1]))
        must(first == again, "tokens", "the same seed drew others behind the same images")
    differ = apart_by_images(model, got[1])
    clear = 4 * target.tolerance("log_probs", layers=LAYERS).atol
    assert target.dtype != "float32" or min(differ.values()) > clear, (
        f"the fixture's images matter too little: {differ}"
    )
    return max(margins)


@case(
    id="rollout.videos",
    since=SINCE,
    requires=(Capability.VIDEO, Capability.VISION),
    world=(1,),
    profile="rollout",
)
def videos(target: Target) -> float:
    """Completions MUST be of each prompt's own videos, and go on at the positions of its text.

    Prompts with videos, images and text stand in one call, and come again one at a time. Some end
    in a video, or in few tokens behind it: the video's last position, which counts its seconds, is
    then above that of the next token.

    If this fails: frames are left out or taken for images, their seconds are not counted, or a
    completion goes on behind the largest position of its prompt (as transformers' `generate` and
    vLLM count it), where the engine that is trained on it goes on behind the video's first position
    and its larger side in features.
    """
    model = pictured_model(target)
    prompts = moving_prompts()
    asks = {
        "a mixture": ask_for(prompts, sampled(n=2)),
        "greedy": ask_for(prompts, GREEDY),
        "another order": ask_for(prompts[::-1], sampled(temperature=0.7)),
        **{f"prompt {i} alone": ask_for([one], sampled()) for i, one in enumerate(prompts[:5])},
    }
    got = replies(target, model, [Sync(folder=model, version=1), *asks.values()])
    worked(got[0], model.name)
    return max(
        pictured_served(target, reply, model, where, version=1)
        for where, reply in zip(asks, got[1:], strict=True)
    )


@case(id="rollout.image_tokens", since=SINCE, requires=_VISION, world=(1,), profile="rollout")
def image_tokens(target: Target) -> float:
    """No completion MUST hold a token of an image or a video, and log-probs MUST count them in.

    At many places such a token is the likeliest one. They are left out of greedy decoding, of
    draws from a distribution that is nearly flat, and before `top_k` and `top_p`, behind prompts
    with images and without.

    If this fails: an engine refuses a completion with image tokens, whose features there are none;
    log-probs are renormalized over what is left, which biases the importance weights of the loss.
    """
    model = pictured_model(target)
    prompts = [*mixed_prompts()[:2], *text_prompts()[:1]]
    asks = {
        "flat": ask_for(prompts, _FLAT),
        "greedy": ask_for(prompts, replace(GREEDY, max_new_tokens=24)),
        "top_k=1": ask_for(prompts, sampled(n=4, temperature=1.5, top_k=1)),
        "top_p=0.5": ask_for(prompts, sampled(n=4, top_p=0.5)),
        "text alone": replace(ask_for(prompts[2:], sampled(n=16)), images=None),
    }
    got = replies(target, model, [Sync(folder=model, version=1), *asks.values()])
    worked(got[0], model.name)
    margins = [
        pictured_served(target, reply, model, where, version=1)
        for where, reply in zip(asks, got[1:], strict=True)
    ]
    tried = _count_banned_first(target, got[2])
    assert tried > 4, f"the fixture has {tried} places at which such a token is the likeliest"
    return max(margins)


def _count_banned_first(target: Target, reply: RolloutReply) -> int:
    """Return the number of places at which a banned token is the likeliest of all."""
    ask = reply.action
    assert isinstance(ask, Generate)
    assert ask.images is not None
    oracle = picture_oracle(str(pictured_model(target)))
    count = 0
    for c in reply.completions:
        ids = torch.tensor([*ask.prompts[c.prompt_index], *c.tokens])
        shown = ask.images[c.prompt_index]
        media = None if shown is None else shown.media
        with torch.no_grad():
            logits = oracle.logits(
                ids, None if media is None else media.pixels, None if media is None else media.grid
            )
        best = logits[-len(c.tokens) - 1 : -1].argmax(-1)
        count += int(torch.isin(best, torch.tensor(BANNED)).sum())
    return count


@case(id="rollout.image_sync", since=SINCE, requires=_VISION, world=(1,), profile="rollout")
def image_sync(target: Target) -> float:
    """The tower's weights MUST be served after every sync as all others are, or nothing.

    The second sync changes those of the tower and its projector alone, the third all, and the
    fourth brings the first ones back. The same images come after each of them. A sync counts the
    tower's tensors as installed. An export whose tower misses a tensor, has one twice, one of
    another shape or an unknown one is refused.

    If this fails: the tower keeps its first weights, since a loader or a check knows the language
    model's names alone; features of images are kept over a sync, or keys and values of prompts
    behind them.
    """
    first = pictured_model(target)
    folders = [
        first,
        pictured_model(target, write_other_tower),
        pictured_model(target, write_other_weights),
        first,
    ]
    ask = ask_for(mixed_prompts(), sampled())
    script: list[Action] = []
    for version, folder in enumerate(folders, 1):
        script += [Sync(folder=folder, version=version), ask]
    for spoil in _SPOILS:
        script += [Sync(folder=first, version=9, spoil=spoil, part=_TOWER), ask]
    script += [Sync(folder=folders[1], version=9), ask]
    got = replies(target, first, script)
    count = len(read_safetensors(first))
    margins: list[float] = []
    for place, folder in enumerate(folders):
        where = f"sync {place + 1}, {folder.name}"
        worked(got[2 * place], where)
        installed = got[2 * place].completions.num_tensors
        problem = f"{installed} are counted, the export has {count}"
        must(installed == count, "num_tensors", problem, where=where)
        reply = got[2 * place + 1]
        margins.append(pictured_served(target, reply, folder, where, version=place + 1))
    begin = 2 * len(folders)
    for place, spoil in enumerate(_SPOILS):
        refused(got[begin + 2 * place], f"the tower, {spoil}")
        refused(got[begin + 2 * place + 1], f"after a sync that failed ({spoil})")
    worked(got[-2], "a good sync after those that failed")
    margins.append(pictured_served(target, got[-1], folders[1], "after it", version=9))
    return max(margins)


def _with_media(prompt: PicturedPrompt, media: Media) -> PicturedPrompt:
    assert prompt.images is not None
    return replace(prompt, images=replace(prompt.images, media=media))


def _bad_prompts() -> dict[str, PicturedPrompt]:
    """Return prompts whose images are not theirs, by what is wrong."""
    one = draw_prompt(1, 4, (2, 4), 3)
    two = draw_prompt(2, 2, (2, 4), 2, (2, 4), 3)
    text = draw_prompt(3, 6)
    assert one.images is not None
    assert two.images is not None
    shown = one.images.media
    whole = one.ids
    return {
        "two images for one place": replace(one, images=two.images),
        "one image for two places": replace(two, images=one.images),
        "an image without a place": replace(text, images=one.images),
        "a place without an image": replace(one, images=None),
        "a placeholder that is not expanded": replace(one, ids=(*whole[:5], *whole[6:])),
        "a token more than features": replace(one, ids=(*whole[:5], IMAGE, *whole[5:])),
        "an image token in the text": replace(one, ids=(whole[0], IMAGE, *whole[2:])),
        "text in the image": replace(one, ids=(*whole[:5], 9, IMAGE, *whole[6:])),
        "a token of a video": replace(one, ids=(whole[0], VIDEO, *whole[2:])),
        "an image of another size": _with_media(
            one, replace(shown, pixels=shown.pixels[:4], grid=torch.tensor([[1, 2, 2]]))
        ),
        "a grid that does not merge": _with_media(
            one, replace(shown, pixels=shown.pixels[:3], grid=torch.tensor([[1, 3, 1]]))
        ),
        "patches of another width": _with_media(one, replace(shown, pixels=shown.pixels[:, :-1])),
        # It has 16 features. Behind one placeholder the completion would fit.
        "too long": draw_prompt(4, _POSITIONS - 12, (8, 8)),
    }


@case(
    id="rollout.bad_images",
    since=SINCE,
    requires=_VISION,
    world=(1,),
    dtypes=FLOAT32,
    profile="rollout",
)
def bad_images(target: Target) -> float:
    """Images that are not those of their prompt MUST raise ``RolloutError`` or ``ConfigError``.

    There are more images than places and fewer, more image tokens than features and fewer, tokens
    of a video, pixels and grids of another model, images for more prompts than there are and for
    fewer, and a prompt that is too long by an image's features. The error names the prompt, and the
    rollout stays usable. So it is with images for a model without a tower. Placeholders from which
    a server would make other ids are an error, or change nothing. In float32, because little is
    computed.

    If this fails: an image too many is dropped in silence, or one too few moves the features of the
    next one; a request ends a server's process.
    """
    model = pictured_model(target)
    good = mixed_prompts()[:2]
    sampling = sampled()
    bad = _bad_prompts()
    asks = {name: ask_for([*good, one], sampling) for name, one in bad.items()}
    right = ask_for(good, sampling)
    assert right.images is not None
    counts = {
        "images for fewer prompts": replace(right, images=right.images[:1]),
        "images for more prompts": replace(right, images=(*right.images, None)),
    }
    misled = replace(right, images=(right.images[0], _misled(good[1])))
    script = [Sync(folder=model, version=1), *asks.values(), *counts.values(), misled, right]
    got = replies(target, model, script)
    worked(got[0], model.name)
    for name, reply in zip(asks, got[1:], strict=False):
        refused(reply, name, also=(ConfigError,), prompt=2)
    for name, reply in zip(counts, got[1 + len(asks) :], strict=False):
        refused(reply, name, also=(ConfigError,))
    margins = [pictured_served(target, got[-1], model, "after the refused requests", version=1)]
    if got[-2].error is None:
        where = "placeholders of other ids"
        margins.append(pictured_served(target, got[-2], model, where, version=1))
    else:
        refused(got[-2], "placeholders of other ids", also=(ConfigError,))
    return max(*margins, _refuses_without_tower(target, good))


def _misled(prompt: PicturedPrompt) -> PromptImages:
    """Return images of a prompt whose placeholders begin with another token."""
    images = prompt.images
    assert images is not None
    first, *rest = images.placeholders
    return replace(images, placeholders=[3 + (first - 2) % (IMAGE - 3), *rest])


def _refuses_without_tower(target: Target, prompts: Sequence[PicturedPrompt]) -> float:
    model = rollout_model(target)
    text = Generate(prompts=prompts_of(4, 7), sampling=sampled())
    shown = ask_for(prompts, sampled())
    got = replies(target, model, [Sync(folder=model, version=1), shown, text])
    refused(got[1], "images for a model without a tower", also=(ConfigError,), prompt=0)
    return served(target, got[2], model, "text after images for a model without a tower", version=1)


@case(
    id="rollout.image_engine",
    since=SINCE,
    requires=_VISION,
    world=(1,),
    profile="rollout",
    partner=True,
)
def image_engine(target: Target) -> float:
    """Log-probs behind images MUST be the engine's own after each step that trains the tower.

    The engine trains on the prompts with their images, and is asked about the same ids and images
    as the rollout. Needs the name of an engine that declares `vision`.

    If this fails: the export's names of the tower are mapped to another tensor; ids that are
    trained on are not those that were completed; a processor other than the engine's made the
    rollout's pixels.
    """
    model = pictured_model(target)
    other = target.partner_target()
    if Capability.VISION not in other.capabilities:
        raise SkipCase(f"{other.backend} does not declare vision: name another --partner")
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=None)
    memory = Memory(max_tokens=64)
    trainer = other.setup(other.config(model, optimizer=optimizer, memory=memory))
    prompts = mixed_prompts()
    ask = ask_for(prompts, sampled(n=2, temperature=0.8))
    batches = [training_batch(prompts[:4]), training_batch(prompts[3:5])]
    links = target.run(chain, target.config(model), trainer=trainer, batches=batches, ask=ask)[0]
    margins = [0.0]
    for step, link in enumerate(links, 1):
        worked(link.sync, f"sync {step}")
        margins.append(
            engine_matches(target, link, f"step {step}", vocab=VOCABULARY, layers=LAYERS)
        )
    return max(margins)


@case(
    id="rollout.undeclared_images",
    since=SINCE,
    probes=Capability.VISION,
    world=(1,),
    dtypes=FLOAT32,
    profile="rollout",
)
def undeclared_images(target: Target) -> float | None:
    """A rollout without `vision` MUST NOT take images, or refuse them by that name.

    It has no argument `images`, or raises `UnsupportedCapability` that names `vision` for one. A
    model with a tower is refused by that name when it is built, or completes text with the served
    weights.

    If this fails: images are accepted and left out in silence, so that a policy is trained on
    answers to questions that it has not seen.
    """
    takes = _takes_images(target.resolution.load())
    pictured = pictured_model(target)
    shown = ask_for(mixed_prompts()[:1], sampled())
    text = replace(ask_for(text_prompts(), sampled()), images=None)
    asks: list[Action] = [Sync(folder=pictured, version=1), text, *([shown] if takes else [])]
    got = _built_or_refused(target, pictured, asks)
    margin = None
    if isinstance(got, EngineError):
        _require_name(got, Capability.VISION, "a model with a tower")
    else:
        worked(got[0], "a model with a tower")
        margin = pictured_served(target, got[1], pictured, "text", version=1)
        if takes:
            _require_name(got[2].error, Capability.VISION, "images")
    if takes:
        model = rollout_model(target)
        reply = replies(target, model, [Sync(folder=model, version=1), shown])[1]
        _require_name(reply.error, Capability.VISION, "images for a model without a tower")
    return margin


@case(
    id="rollout.undeclared_videos",
    since=SINCE,
    requires=_VISION,
    probes=Capability.VIDEO,
    world=(1,),
    dtypes=FLOAT32,
    profile="rollout",
)
def undeclared_videos(target: Target) -> float:
    """A rollout with `vision` and without `video` MUST refuse videos by that name.

    It raises `UnsupportedCapability` that names `video` for prompts with a video, alone and between
    prompts with images, and serves images afterwards.

    If this fails: the frames of a video are taken for images or left out in silence, so that a
    policy is trained on answers to videos that it has not seen.
    """
    model = pictured_model(target)
    moving = moving_prompts()
    shown = {
        "a video": ask_for(moving[:1], sampled()),
        "a video between images": ask_for((*mixed_prompts()[:2], *moving), sampled()),
    }
    after = ask_for(mixed_prompts(), sampled())
    got = replies(target, model, [Sync(folder=model, version=1), *shown.values(), after])
    worked(got[0], model.name)
    for how, reply in zip(shown, got[1:-1], strict=True):
        _require_name(reply.error, Capability.VIDEO, how)
    return pictured_served(target, got[-1], model, "images after a refusal", version=1)


def _takes_images(cls: Any) -> bool:
    try:
        inspect.signature(cls.generate).bind(None, [], SamplingParams(), images=[])
    except TypeError:
        return False
    return True


def _built_or_refused(
    target: Target, model: Any, actions: Sequence[Action]
) -> list[RolloutReply] | EngineError:
    found: list[RolloutReply] | EngineError = target.run(
        drive_or_refuse, target.config(model), actions=actions
    )[0]
    return found


def drive_or_refuse(setup: Setup, actions: Sequence[Action]) -> list[RolloutReply] | EngineError:
    """Return the replies of one rollout, or the error with which it was not built."""
    try:
        return drive(setup, actions)
    except EngineError as error:
        return error.with_traceback(None)


def _require_name(error: EngineError | None, capability: Capability, how: str) -> None:
    """Raise an error of the case unless a refusal names the capability that is not declared."""
    if error is None:
        raise AcceptedUndeclared(capability, how)
    named = isinstance(error, UnsupportedCapability) and error.capability == capability
    said = f"UnsupportedCapability of {capability} expected, got {error!r}"
    must(named, "error", said, where=how)
