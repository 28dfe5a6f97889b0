"""The ``local`` rollout with images, against transformers' own forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import IMAGE, VIDEO, tiny_config, tiny_model, tiny_pictured_model
from transformers import AutoModelForImageTextToText

from engine_api.config import ModelSource
from engine_api.errors import RolloutError
from engine_api.hf_folder import read_saved_tensors
from engine_api.hf_names import pieces_of, saved_buffers
from engine_api.hf_vision import VIDEO_FAMILIES, build_arguments, read_vision
from engine_api.media import Media
from engine_api.registry import RolloutRegistry
from engine_api.rollout import PromptImages, SamplingParams, VisionRollout
from engine_trainer.rollouts.sampling import uniforms

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "internvl")
EOS = 1


class Served:
    """A tiny model, the rollout that serves it, and prompts with and without images."""

    def __init__(self, family, folder):
        tiny_pictured_model(family).save_pretrained(folder)
        load = AutoModelForImageTextToText.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.saved = read_saved_tensors(str(folder))
        self.vision = read_vision(self.model.config, "test", videos=True)
        self.rollout = RolloutRegistry.create(
            name="local",
            device="cpu",
            model=ModelSource(path=str(folder)),
            pad_token_id=0,
            eos_token_ids=(EOS,),
            batch_size=64,
        )
        self.rollout.update_weights(self.export(), 7)
        shapes = [(2, 4)], [], [(4, 4), (2, 2)], []
        drawn = [self.draw(seed, some) for seed, some in enumerate(shapes)]
        self.prompts = [prompt for prompt, _ in drawn]
        self.images = [images for _, images in drawn]

    def export(self):
        memory = dict(self.model.named_parameters()) | saved_buffers(self.model)
        for name, pieces in pieces_of(self.model, self.saved).items():
            for piece in pieces:
                yield piece.name, piece.view(memory[name].data).float().clone()

    def draw_videos(self):
        """Return prompts with a video, with an image and two videos, and with none."""
        shapes = [(3, 2, 2)], [(2, 2, 4), (2, 2), (1, 2, 2)], []
        return [self.draw(seed, some) for seed, some in enumerate(shapes, start=5)]

    def draw(self, seed, shapes):
        """Return a prompt with images of these heights and widths in patches.

        A video has its rows in time before them.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 50, (3 + seed,), generator=generator).tolist()
        grids = [[1, *shape][-3:] if self.vision.has_grid else [1, 1, 1] for shape in shapes]
        rows = sum(a * b * c for a, b, c in grids)
        seconds = [2 / 3 if len(shape) == 3 else 0.0 for shape in shapes]
        for grid, time in zip(grids, seconds, strict=True):
            for run in self.vision.list_runs(grid, video=time > 0):
                ids += [VIDEO if time else IMAGE] * run + [7 + seed, 9]
        if not shapes:
            return ids, None
        media = Media(
            pixels=torch.rand(rows, *self.vision.row_shape, generator=generator) * 2 - 1,
            grid=torch.tensor(grids),
            cu_images=torch.tensor([0, len(grids)]),
            seconds=torch.tensor(seconds) if any(seconds) else None,
        )
        return ids, PromptImages(media=media, placeholders=ids, pictures=())

    @torch.no_grad()
    def score(self, prompt, images, completion, temperature=1.0):
        """Return a completion's log-probs from one forward pass, without a cache or padding."""
        ids = torch.tensor([*prompt, *completion])
        arguments = build_arguments(self.vision, ids, None if images is None else images.media)
        logits = self.model(**arguments, use_cache=False).logits[0].double() / temperature
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return scores.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Served("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "seed": 1, **kwargs})


def as_rows(completions):
    return [(c.prompt_index, c.tokens) for c in completions]


def test_it_is_a_rollout_that_takes_images(qwen):
    assert isinstance(qwen.rollout, VisionRollout)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_full_forward_with_and_without_images(served, temperature):
    """Prompts with one image, two images and none are generated for in one padded batch."""
    sampling = params(n=4, temperature=temperature)
    completions = served.rollout.generate(served.prompts, sampling, images=served.images)
    assert len(completions) == 4 * len(served.prompts)
    for one in completions:
        index = one.prompt_index
        expected = served.score(
            served.prompts[index], served.images[index], one.tokens, temperature
        )
        got = torch.tensor(one.log_probs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_prompt_without_images_is_completed_as_in_a_batch_of_text(served):
    texts = [served.prompts[1], served.prompts[3]]
    alone = served.rollout.generate(texts, params(n=2))
    mixed = served.rollout.generate(served.prompts, params(n=2), images=served.images)
    of_texts = [one.tokens for one in mixed if one.prompt_index in (1, 3)]
    assert [one.tokens for one in alone] == of_texts


def test_the_images_decide_about_the_completion(qwen):
    prompt, images = qwen.draw(5, [(4, 4)])
    other = replace(images.media, pixels=-images.media.pixels)
    changed = replace(images, media=other)
    greedy = params(temperature=0.0)
    first, second = (
        qwen.rollout.generate([prompt], greedy, images=[one])[0] for one in (images, changed)
    )
    assert first.log_probs != second.log_probs


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_no_completion_has_a_token_of_an_image_or_a_video(qwen, temperature):
    """Nearly each token is as likely as any other at a temperature of 50."""
    sampling = params(n=64, temperature=temperature, max_new_tokens=24)
    found = qwen.rollout.generate(qwen.prompts, sampling, images=qwen.images)
    tokens = {token for one in found for token in one.tokens}
    assert not tokens & {IMAGE, VIDEO}
    assert temperature < 50 or len(tokens) > 50


def test_two_prompts_that_differ_in_their_images_alone_have_random_numbers_of_their_own(qwen):
    prompt, images = qwen.draw(5, [(4, 4)])
    other = replace(images.media, pixels=-images.media.pixels)
    numbers = uniforms([prompt, prompt], params(), [images.media, other])
    again = uniforms([prompt], params(), [other])
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[1], again[0])


def test_completions_do_not_depend_on_the_batch(qwen):
    together = qwen.rollout.generate(qwen.prompts, params(n=2), images=qwen.images)
    apart = [
        (index, one.tokens)
        for index, prompt in enumerate(qwen.prompts)
        for one in qwen.rollout.generate([prompt], params(n=2), images=[qwen.images[index]])
    ]
    assert as_rows(together) == apart


@pytest.mark.parametrize("served", [f for f in FAMILIES if f in VIDEO_FAMILIES], indirect=True)
def test_videos_are_generated_behind(served):
    """Log-probs of videos, images and text in one padded batch are those of a full forward."""
    drawn = served.draw_videos()
    prompts, images = (
        [*own, *more]
        for own, more in (
            (served.prompts, [prompt for prompt, _ in drawn]),
            (served.images, [one for _, one in drawn]),
        )
    )
    completions = served.rollout.generate(prompts, params(n=2), images=images)
    for one in completions:
        index = one.prompt_index
        want = served.score(prompts[index], images[index], one.tokens)
        torch.testing.assert_close(
            torch.tensor(one.log_probs, dtype=torch.float64), want, atol=1e-4, rtol=0
        )
        assert not {IMAGE, VIDEO} & set(one.tokens)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda prompts, images: (prompts, None), "prompt 0 has 0 images of 0 features"),
        (lambda prompts, images: (prompts, images[:1]), "expected images for 4 prompts"),
        (
            lambda prompts, images: ([prompts[0][1:], *prompts[1:]], [images[2], *images[1:]]),
            "prompt 0 has 2 images of 5 features",
        ),
        (
            lambda prompts, images: ([prompts[0], [VIDEO, 5], *prompts[2:]], images),
            "prompt 1 has 0 videos of 0 features, and 1 video tokens",
        ),
    ],
)
def test_images_that_are_not_those_of_their_prompt_are_refused_and_it_goes_on(qwen, spoil, message):
    prompts, images = spoil(qwen.prompts, qwen.images)
    with pytest.raises(RolloutError, match=message):
        qwen.rollout.generate(prompts, params(), images=images)
    assert qwen.rollout.generate(qwen.prompts, params(), images=qwen.images)


def test_a_model_without_a_tower_refuses_images(tmp_path, qwen):
    tiny_config("qwen3").save_pretrained(tmp_path)
    rollout = RolloutRegistry.create(
        name="local",
        device="cpu",
        model=ModelSource(path=str(tmp_path)),
        pad_token_id=0,
        batch_size=4,
    )
    model = tiny_model("qwen3")
    memory = dict(model.named_parameters())
    rollout.update_weights(memory.items(), 1)
    with pytest.raises(RolloutError, match="prompt 0 has images, and the model has no vision"):
        rollout.generate(qwen.prompts, params(), images=qwen.images)
