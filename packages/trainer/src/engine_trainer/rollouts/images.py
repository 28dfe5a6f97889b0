"""Images of prompts, as a vision-language model of transformers takes them while it generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.hf_vision import Vision, build_media_arguments, position_tokens
from engine_api.media import Media

Shown = Sequence[Media | None]
"""The images of each prompt of a batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefill:
    """The inputs of the first forward pass of a batch in which some prompts have images."""

    arguments: dict[str, torch.Tensor]
    positions: torch.Tensor | None
    """``[3, P, L]``, positions in time, height and width; None where the model has one each."""
    deltas: torch.Tensor | None
    """``[P]``, numbers that turn the number of a token behind the prompt into its position."""


class VisionInputs:
    """The model's side of images in a rollout.

    Attributes:
        vision: the images that the model takes.
        banned: ids of image and video tokens, which no completion has.
    """

    def __init__(self, model: Any, vision: Vision) -> None:
        self.vision = vision
        self.banned = torch.tensor(vision.tokens, device=model.device)
        self._positions_of = position_tokens(model, vision)

    def prefill(
        self, prompts: Sequence[Sequence[int]], shown: Shown, width: int, dtype: torch.dtype
    ) -> Prefill | None:
        """Return the inputs of the prompts' images, or None where no prompt has any.

        Args:
            prompts: token ids, which are padded on the left.
            shown: the images of each prompt.
            width: number of tokens of a padded prompt.
            dtype: dtype of the computation.
        """
        given = [media for media in shown if media is not None]
        if not given:
            return None
        device = self.banned.device
        media = Media.concat(given)
        arguments = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in build_media_arguments(self.vision, media).items()
        }
        if self.vision.bidirectional:
            types = [[int(id_ == self.vision.image_token) for id_ in prompt] for prompt in prompts]
            padded = [[0] * (width - len(row)) + row for row in types]
            arguments["token_type_ids"] = torch.tensor(padded, device=device)
        if self._positions_of is None:
            return Prefill(arguments=arguments, positions=None, deltas=None)
        # Behind a video a text may go on at a position below the video's last one.
        plain = next(id_ for id_ in range(3) if id_ not in self.vision.tokens)
        positions = torch.zeros(3, len(prompts), width, dtype=torch.int64)
        deltas = torch.zeros(len(prompts), dtype=torch.int64)
        for index, (prompt, own) in enumerate(zip(prompts, shown, strict=True)):
            length = len(prompt)
            row = torch.arange(length + 1).expand(3, -1)
            if own is not None:
                times = None if own.seconds is None else own.seconds.cpu()
                ids = torch.tensor([*prompt, plain])
                row = self._positions_of(ids, own.grid.cpu(), times)
            positions[:, index, width - length :] = row[:, :-1]
            deltas[index] = int(row[0, -1]) - length
        return Prefill(
            arguments=arguments, positions=positions.to(device), deltas=deltas.to(device)
        )
