"""Round trip of dataclasses and errors through JSON."""

from __future__ import annotations

import json

import pytest
import torch

from engine_api import errors
from engine_api.errors import BatchError, ConfigError, RolloutError
from engine_api.media import Media
from engine_api.rollout import Completion, PromptImages, SamplingParams, SyncResult
from rollout_fp8.remote.messages import (
    dumps,
    error_from_json,
    error_to_json,
    from_json,
    images_from_json,
    images_to_json,
    to_json,
)


@pytest.mark.parametrize(
    "value",
    [
        Completion(
            prompt_index=1,
            tokens=[1, 2],
            log_probs=[-0.1, -1 / 3],
            weight_versions=[1, 1],
            finish_reason="stop",
        ),
        SamplingParams(n=3, stop_token_ids=(4, 5), seed=7),
        SyncResult(version=3, seconds={"install": 1 / 3}, audited=True),
    ],
)
def test_dataclasses_come_back_as_they_were(value) -> None:
    assert from_json(type(value), json.loads(dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    "error",
    [
        RolloutError("a", where="b", why="c", remedy="d"),
        ConfigError("x.y", "wrong", remedy="right"),
        BatchError("loss_mask", "negative", index=3),
        errors.UnsupportedCapability("lora", why="no"),
        errors.PluginUnavailable("none", trace=["one", "two"]),
        errors.EngineStateError("step", "closed", "ready"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_come_back_as_they_were(error) -> None:
    back = error_from_json(json.loads(dumps(error_to_json(error))))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert json.loads(dumps(back.__dict__)) == json.loads(dumps(error.__dict__))


def test_an_error_that_is_not_the_contracts_becomes_one() -> None:
    back = error_from_json(error_to_json(KeyError("weights")))
    assert type(back) is RolloutError
    assert "KeyError: 'weights'" in back.why
    assert type(error_from_json({"class": "SystemExit"})) is RolloutError
    assert type(error_from_json({"class": "annotations"})) is RolloutError


def test_images_come_back_bit_for_bit() -> None:
    media = Media(
        pixels=torch.randn(4, 3), grid=torch.tensor([[1, 2, 2]]), cu_images=torch.tensor([0, 1])
    )
    picture = torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3)
    given = PromptImages(media=media, placeholders=[5, 9], pictures=(picture,))
    none, found = images_from_json(json.loads(dumps(images_to_json([None, given])))) or ()
    assert none is None
    assert found is not None
    assert all(torch.equal(t, found.media.tensors[name]) for name, t in media.tensors.items())
    assert found.placeholders == [5, 9]
    assert torch.equal(found.pictures[0], picture)
    assert images_from_json(images_to_json(None)) is None


@pytest.mark.parametrize("given", ["%", "AAAA", 7])
def test_other_images_are_refused(given) -> None:
    with pytest.raises(RolloutError, match="expected the images of prompts"):
        images_from_json(given)
