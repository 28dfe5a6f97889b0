"""Models with a vision tower: the images that they take, and the tokens that stand for them.

The names of the keys are transformers'. A model takes an image as rows (``engine_api.media``):
patches, or whole images of the tower's size. Its features replace the embeddings of as many image
tokens, one run of them for each image.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.media import Media

if TYPE_CHECKING:
    import torch

__all__ = [
    "FAMILIES",
    "Positions",
    "Run",
    "Vision",
    "build_arguments",
    "draw_image",
    "find_auto_class",
    "find_runs",
    "has_vision",
    "position_tokens",
    "read_vision",
    "refuse_vision",
]

_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_WHOLE = ("gemma3", "internvl")
FAMILIES = (*_PATCHES, *_WHOLE)
"""Model types whose towers ``read_vision`` knows."""

Positions = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Function of a document's ids ``[n]`` and its images' grids ``[N, 3]`` to positions ``[3, n]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Image tokens of a document without another token between them."""

    document: int
    start: int
    """Position of the first one in the batch."""
    length: int


def find_runs(batch: Batch, token: int) -> list[Run]:
    """Return the runs of ``token`` in the documents of a batch, in order."""
    at: list[int] = (batch.input_ids == token).nonzero()[:, 0].tolist()  # pyright: ignore[reportUnknownVariableType]
    runs: list[Run] = []
    document = 0
    for position in at:
        while position >= batch.boundaries[document + 1]:
            document += 1
        last = runs[-1] if runs else None
        if last and last.document == document and last.start + last.length == position:
            runs[-1] = Run(document=document, start=last.start, length=last.length + 1)
        else:
            runs.append(Run(document=document, start=position, length=1))
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """The images that a model takes, and the tokens that stand for them."""

    image_token: int
    """Id of the tokens whose embeddings the features replace."""

    video_token: int | None
    """Id of the tokens of videos, which no engine takes, or None without such a token."""

    row_shape: tuple[int, ...]
    """Shape of a row of pixels: ``(numbers,)`` of a patch, or ``(channels, height, width)``."""

    merge: int = 1
    """Number of patches in height and in width that become one feature."""

    features_per_row: int = 1
    """Number of features of a row, where rows are whole images."""

    bidirectional: bool = False
    """True where the tokens of an image attend to each other in both directions."""

    @property
    def has_grid(self) -> bool:
        """True where rows are patches, whose places in the image the model receives."""
        return len(self.row_shape) == 1

    @property
    def smallest(self) -> tuple[int, int, int]:
        """The grid of the smallest image."""
        return (1, self.merge, self.merge)

    def count_features(self, grid: Sequence[int]) -> int:
        """Return the number of features of an image, given its rows in time, height and width."""
        time, height, width = grid
        return time * (height // self.merge) * (width // self.merge) * self.features_per_row

    def check(self, batch: Batch) -> None:
        """Raise ``BatchError`` for images that the model does not take, or other image tokens.

        Each image must have one run of image tokens in its document, as many as it has features, in
        the images' order.
        """
        self._refuse_video(batch)
        media = batch.media
        if media is not None and media.num_images:
            self._check_images(media)
        runs: dict[int, list[Run]] = {}
        for run in find_runs(batch, self.image_token):
            runs.setdefault(run.document, []).append(run)
        grids: list[list[int]] = [] if media is None else media.grid.tolist()  # pyright: ignore[reportUnknownVariableType]
        for document in range(batch.num_documents):
            images = range(0) if media is None else media.images_of(document)
            want = [self.count_features(grids[image]) for image in images]
            self._check_document(document, want, runs.get(document, []))

    def _check_document(self, document: int, want: list[int], runs: list[Run]) -> None:
        got = [run.length for run in runs]
        if got == want:
            return
        start = runs[0].start if runs else None
        if len(got) != len(want):
            what = (
                f"document {document} has {len(want)} images of {sum(want)} features, and "
                f"{sum(got)} image tokens (id {self.image_token}) in {len(got)} runs"
            )
        else:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            start = runs[at].start
            what = (
                f"document {document}: expected {want[at]} image tokens (id {self.image_token}) "
                f"for its image {at}, which has as many features, got {got[at]}"
            )
        raise BatchError(
            "input_ids",
            what,
            index=start,
            why="an image's features replace the embeddings of one run of image tokens",
            remedy="build ids and images with the model's own processor, and cut a document that "
            "is too long before an image, not inside it",
        )

    def _refuse_video(self, batch: Batch) -> None:
        if self.video_token is None:
            return
        found = (batch.input_ids == self.video_token).nonzero()
        if found.numel():
            at = int(found[0])
            document = next(d for d, end in enumerate(batch.boundaries[1:]) if at < end)
            raise BatchError(
                "input_ids",
                f"document {document} has a token of a video (id {self.video_token})",
                index=at,
                why="no engine takes videos",
                remedy="give frames of the video as images",
            )

    def _check_images(self, media: Media) -> None:
        if tuple(media.pixels.shape[1:]) != self.row_shape:
            raise BatchError(
                "media.pixels",
                f"expected rows of shape {self.row_shape}, got {tuple(media.pixels.shape[1:])}",
                remedy="process the images with the processor that belongs to this model",
            )
        odd = (media.grid[:, 1:] % self.merge).any(1).nonzero()
        if odd.numel():
            at = int(odd[0])
            sizes: list[int] = media.grid[at].tolist()  # pyright: ignore[reportUnknownVariableType]
            raise BatchError(
                "media.grid",
                f"expected a height and width that {self.merge} divides, "
                f"got {sizes} in time, height and width for image {at}",
                index=at,
                why=f"{self.merge} x {self.merge} patches become one feature",
                remedy="process the images with the processor that belongs to this model",
            )

    def number_image_tokens(self, batch: Batch) -> torch.Tensor:
        """Return ``[T]`` int64, the number of each image token's image in the batch, -1 elsewhere.

        The batch is one that ``check`` accepts.
        """
        import torch

        numbers = torch.full((batch.num_tokens,), -1, dtype=torch.int64)
        for number, run in enumerate(find_runs(batch, self.image_token)):
            numbers[run.start : run.start + run.length] = number
        return numbers


def has_vision(config: Any) -> bool:
    """Return whether a configuration of transformers, or a ``config.json``, has a vision tower."""
    if isinstance(config, dict):
        return config.get("vision_config") is not None
    return getattr(config, "vision_config", None) is not None


def find_auto_class(config: Any) -> Any:
    """Return transformers' class that builds a language model, with its vision tower if it has one.

    The class for causal language models would leave a tower out, with a warning (Qwen3.5).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def refuse_vision(config: Any, declared: Collection[str], where: str) -> None:
    """Raise ``UnsupportedCapability`` for a model with a vision tower, unless ``vision`` is served.

    Args:
        config: configuration of transformers, or the content of a ``config.json``.
        declared: capabilities of the engine.
        where: the engine, for the error.
    """
    if has_vision(config) and Capability.VISION not in declared:
        raise UnsupportedCapability(
            Capability.VISION,
            where=where,
            why="config.json describes a model with a vision tower (vision_config), "
            "whose weights and images this engine would leave out",
            remedy="name a backend that declares it "
            f"(`python -m engine_api list --capability {Capability.VISION}`), "
            "or give a language model without a tower",
        )


def read_vision(config: Any, where: str) -> Vision | None:
    """Return the images that a model takes, or None for a model without a tower.

    Args:
        config: transformers' configuration.
        where: the engine, for errors.

    Raises:
        UnsupportedCapability: the model's family is not one of ``FAMILIES``.
        ConfigError: the configuration lacks a size.
    """
    if not has_vision(config):
        return None
    kind = str(config.model_type)
    if kind not in FAMILIES:
        raise UnsupportedCapability(
            Capability.VISION,
            where=f"{where} with a {kind}",
            why=f"no test has compared its tower; those of {', '.join(FAMILIES)} are served",
            remedy="use a model of these families",
        )
    try:
        return _read_patches(config) if kind in _PATCHES else _read_whole(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "model.path",
            f"config.json of a {kind} lacks a size of its tower",
            why=f"{type(error).__name__}: {error}",
            remedy="fetch the file again",
        ) from error


def _read_patches(config: Any) -> Vision:
    tower = config.vision_config
    channels = getattr(tower, "in_channels", None) or tower.in_chans
    patch = int(tower.patch_size)
    return Vision(
        image_token=int(config.image_token_id),
        video_token=int(config.video_token_id),
        row_shape=(int(channels) * int(tower.temporal_patch_size) * patch * patch,),
        merge=int(tower.spatial_merge_size),
    )


def _read_whole(config: Any) -> Vision:
    tower = config.vision_config
    size = tower.image_size
    height, width = (size, size) if isinstance(size, int) else size
    features = getattr(config, "mm_tokens_per_image", None) or config.image_seq_length
    return Vision(
        image_token=int(config.image_token_id),
        video_token=None,
        row_shape=(int(tower.num_channels), int(height), int(width)),
        features_per_row=int(features),
        bidirectional=config.model_type == "gemma3",
    )


def draw_image(vision: Vision, generator: torch.Generator) -> Media:
    """Return one small image of random numbers, wider than high where the model allows it."""
    import torch

    grid = torch.tensor([vision.smallest])
    if vision.has_grid:
        grid[:, 2] *= 2
    rows = int(grid.prod())
    pixels = torch.rand(rows, *vision.row_shape, generator=generator) * 2 - 1
    return Media(pixels=pixels, grid=grid, cu_images=torch.tensor([0, 1]))


def build_arguments(
    vision: Vision, ids: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return the arguments of the model's own forward pass for one document.

    Args:
        vision: the images that the model takes.
        ids: ``[n]`` ids of the document.
        media: its images, or None.
    """
    arguments = {"input_ids": ids[None]}
    if media is None:
        return arguments
    types = (ids == vision.image_token).int()[None]
    arguments["pixel_values"] = media.pixels.to(ids.device)
    if vision.has_grid:
        arguments |= {"image_grid_thw": media.grid.to(ids.device), "mm_token_type_ids": types}
    if vision.bidirectional:
        arguments["token_type_ids"] = types
    return arguments


def position_tokens(lm: Any, vision: Vision | None) -> Positions | None:
    """Return the function of a family whose image tokens have positions in three dimensions."""
    of_model = getattr(lm.base_model, "get_rope_index", None)
    if vision is None or of_model is None:
        return None

    def positions(ids: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        types = (ids == vision.image_token).int()[None]
        found: torch.Tensor = of_model(ids[None], mm_token_type_ids=types, image_grid_thw=grid)[0]
        return found[:, 0]

    return positions
