"""Models with a vision tower: the images that they take, and the tokens that stand for them.

The names of the keys are transformers'. A model takes an image as rows (``engine_api.media``):
patches, or whole images of the tower's size. Its features replace the embeddings of as many image
tokens, one run of them for each image. Those of a video replace video tokens, which are one run or,
in families that write the time before each frame, one run for each of the video's rows in time.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.media import Media

if TYPE_CHECKING:
    import torch

__all__ = [
    "FAMILIES",
    "VIDEO_FAMILIES",
    "Positions",
    "Run",
    "Vision",
    "build_arguments",
    "build_media_arguments",
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

VIDEO_FAMILIES = _PATCHES
"""Those of them whose videos are known, too."""

_ONE_RUN = ("qwen2_vl", "qwen2_5_vl")

Positions = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
"""Function of a document to positions ``[3, n]``.

It is given the document's ids ``[n]``, and its images' grids ``[N, 3]`` and seconds ``[N]``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Image tokens, or video tokens, of a document without another token between them."""

    document: int
    token: int
    start: int
    """Position of the first one in the batch."""
    length: int

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.start + self.length


def find_runs(batch: Batch, *tokens: int) -> list[Run]:
    """Return the runs of each of ``tokens`` in the documents of a batch, in order."""
    import torch

    ids = batch.input_ids
    at = torch.isin(ids, torch.tensor(tokens, device=ids.device)).nonzero()[:, 0]
    found: list[int] = ids[at].tolist()  # pyright: ignore[reportUnknownVariableType]
    places: list[int] = at.tolist()  # pyright: ignore[reportUnknownVariableType]
    runs: list[Run] = []
    document = 0
    for position, token in zip(places, found, strict=True):
        while position >= batch.boundaries[document + 1]:
            document += 1
        last = runs[-1] if runs else None
        if last and (last.document, last.token, last.end) == (document, token, position):
            runs[-1] = replace(last, length=last.length + 1)
        else:
            runs.append(Run(document=document, token=token, start=position, length=1))
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """The images that a model takes, and the tokens that stand for them."""

    image_token: int
    """Id of the tokens whose embeddings the features replace."""

    video_token: int | None
    """Id of the tokens of videos, or None without such a token."""

    row_shape: tuple[int, ...]
    """Shape of a row of pixels: ``(numbers,)`` of a patch, or ``(channels, height, width)``."""

    merge: int = 1
    """Number of patches in height and in width that become one feature."""

    features_per_row: int = 1
    """Number of features of a row, where rows are whole images."""

    bidirectional: bool = False
    """True where the tokens of an image attend to each other in both directions."""

    takes_videos: bool = False
    """True where videos are taken, and not images alone."""

    by_frame: bool = False
    """True where each row in time of a video has a run of video tokens of its own."""

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

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images and videos."""
        return tuple(t for t in (self.image_token, self.video_token) if t is not None)

    def list_runs(self, grid: Sequence[int], *, video: bool) -> list[int]:
        """Return the lengths of the runs of tokens that stand for an image or a video."""
        features = self.count_features(grid)
        parts = grid[0] if video and self.by_frame else 1
        return [features // parts] * parts

    def check(self, batch: Batch) -> None:
        """Raise ``BatchError`` for images that the model does not take, or other image tokens.

        Each image must have one run of image tokens in its document, as many as it has features, in
        the images' order. So must a video of video tokens, or each of its rows in time. A video
        raises ``UnsupportedCapability`` where images alone are taken.
        """
        media = batch.media
        if not self.takes_videos:
            self._refuse_videos(batch)
        if media is not None and media.num_images:
            self._check_images(media)
        runs: dict[int, list[Run]] = {}
        for run in find_runs(batch, *self.tokens):
            runs.setdefault(run.document, []).append(run)
        grids: list[list[int]] = [] if media is None else media.grid.tolist()  # pyright: ignore[reportUnknownVariableType]
        for document in range(batch.num_documents):
            own = runs.get(document, [])
            shown = range(0) if media is None else media.images_of(document)
            kinds = [media is not None and media.are_videos[image] for image in shown]
            for video in (False, True):
                chosen = [
                    image for image, is_video in zip(shown, kinds, strict=True) if is_video == video
                ]
                want = [self.list_runs(grids[image], video=video) for image in chosen]
                self._check_document(document, want, own, video=video)
            self._check_order(
                document,
                [
                    video
                    for image, video in zip(shown, kinds, strict=True)
                    for _ in self.list_runs(grids[image], video=video)
                ],
                own,
            )

    def _check_document(
        self, document: int, images: list[list[int]], runs: list[Run], *, video: bool
    ) -> None:
        """Raise ``BatchError`` unless the runs of one kind are as long as the images' features."""
        token = self.video_token if video else self.image_token
        runs = [run for run in runs if run.token == token]
        want = [length for image in images for length in image]
        got = [run.length for run in runs]
        if got == want:
            return
        kind = "video" if video else "image"
        start = runs[0].start if runs else None
        if len(got) != len(want):
            what = (
                f"document {document} has {len(images)} {kind}s of {sum(want)} features, and "
                f"{sum(got)} {kind} tokens (id {token}) in {len(got)} runs"
            )
            if self.by_frame and video:
                what += f", expected {len(want)}, one for each row in time"
        else:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            number = [i for i, image in enumerate(images) for _ in image][at]
            start = runs[at].start
            what = (
                f"document {document}: expected {want[at]} {kind} tokens (id {token}) "
                f"for its {kind} {number}, which has as many features, got {got[at]}"
            )
        raise BatchError(
            "input_ids",
            what,
            index=start,
            why=f"the features of an image replace the embeddings of one run of {kind} tokens",
            remedy="build ids and images with the model's own processor, and cut a document that "
            "is too long before an image, not inside it",
        )

    def _check_order(self, document: int, videos: list[bool], runs: list[Run]) -> None:
        """Raise ``BatchError`` unless videos and images are in the order of their tokens."""
        for run, video in zip(runs, videos, strict=True):
            if (run.token == self.video_token) != video:
                raise BatchError(
                    "media.seconds",
                    f"document {document}: the tokens at {run.start} are those of "
                    f"{'an image' if video else 'a video'}, and next comes "
                    f"{'a video' if video else 'an image'}",
                    index=run.start,
                    why="images and videos are in the order of their tokens",
                    remedy="give them in that order",
                )

    def _refuse_videos(self, batch: Batch) -> None:
        """Raise ``UnsupportedCapability`` for a video, and ``BatchError`` for a token of one."""
        media = batch.media
        if media is not None and any(media.are_videos):
            raise UnsupportedCapability(
                Capability.VIDEO,
                where="media.seconds",
                why=f"image {media.are_videos.index(True)} of the batch is a video, and images "
                "alone are taken here",
                remedy="give frames of the video as images, or name a backend that declares it "
                f"(`python -m engine_api list --capability {Capability.VIDEO}`)",
            )
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
                why="images alone are taken here",
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


def read_vision(config: Any, where: str, *, videos: bool = False) -> Vision | None:
    """Return the images that a model takes, or None for a model without a tower.

    Args:
        config: transformers' configuration.
        where: the engine, for errors.
        videos: True where videos are taken as well, of a family in ``VIDEO_FAMILIES``.

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
        return _read_patches(config, videos) if kind in _PATCHES else _read_whole(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "model.path",
            f"config.json of a {kind} lacks a size of its tower",
            why=f"{type(error).__name__}: {error}",
            remedy="fetch the file again",
        ) from error


def _read_patches(config: Any, videos: bool) -> Vision:
    tower = config.vision_config
    channels = getattr(tower, "in_channels", None) or tower.in_chans
    patch = int(tower.patch_size)
    return Vision(
        image_token=int(config.image_token_id),
        video_token=int(config.video_token_id),
        row_shape=(int(channels) * int(tower.temporal_patch_size) * patch * patch,),
        merge=int(tower.spatial_merge_size),
        takes_videos=videos,
        by_frame=str(config.model_type) not in _ONE_RUN,
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
    if vision.bidirectional:
        arguments["token_type_ids"] = (ids == vision.image_token).int()[None]
    shown = media.to(ids.device)
    arguments |= build_media_arguments(vision, shown)
    if vision.has_grid:
        arguments |= _place(vision, ids, shown.grid, shown.seconds)
    return arguments


def build_media_arguments(vision: Vision, media: Media) -> dict[str, torch.Tensor]:
    """Return the pixels and the grids of images and of videos by transformers' names."""
    import torch

    if not any(media.are_videos):
        found = {"pixel_values": media.pixels}
        return found | {"image_grid_thw": media.grid} if vision.has_grid else found
    by_image: list[torch.Tensor] = list(media.pixels.split(list(media.rows)))  # pyright: ignore[reportUnknownArgumentType]
    found: dict[str, torch.Tensor] = {}
    for pixels, grid, kind in (
        ("pixel_values", "image_grid_thw", False),
        ("pixel_values_videos", "video_grid_thw", True),
    ):
        own = [image for image, is_video in enumerate(media.are_videos) if is_video == kind]
        if own:
            found[pixels] = torch.cat([by_image[image] for image in own])
            found[grid] = media.grid[own]
    return found


def _place(
    vision: Vision, ids: torch.Tensor, grid: torch.Tensor, seconds: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers that tell a document's positions."""
    types = (ids == vision.image_token).int()
    if seconds is None or vision.video_token is None:
        return {"mm_token_type_ids": types[None], "image_grid_thw": grid}
    types += 2 * (ids == vision.video_token).int()
    are_videos = seconds > 0
    found = {"mm_token_type_ids": types[None]}
    if not bool(are_videos.all()):
        found["image_grid_thw"] = grid[~are_videos]
    if bool(are_videos.any()):
        found["video_grid_thw"] = grid[are_videos]
        # Families that write the time as text take no notice of it.
        found["second_per_grid_ts"] = seconds[are_videos]
    return found


def position_tokens(lm: Any, vision: Vision | None) -> Positions | None:
    """Return the function of a family whose image tokens have positions in three dimensions."""
    of_model = getattr(lm.base_model, "get_rope_index", None)
    if vision is None or of_model is None:
        return None

    def positions(
        ids: torch.Tensor, grid: torch.Tensor, seconds: torch.Tensor | None
    ) -> torch.Tensor:
        found: torch.Tensor = of_model(ids[None], **_place(vision, ids, grid, seconds))[0]
        return found[:, 0]

    return positions
