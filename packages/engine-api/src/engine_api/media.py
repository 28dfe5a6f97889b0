"""Images and videos of packed documents, ragged by document.

An image is a number of rows. A row is a patch, or a whole image (a tile, a crop) of the tower's own
size, as the model takes them. ``grid`` says how many rows an image has in time, height and width.
A video counts as an image with a duration: ``seconds`` says how far apart its rows in time are.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from engine_api.codec import register
from engine_api.errors import BatchError, kind_of
from engine_api.tensors import check_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["MEDIA", "Media"]

MEDIA = "media"
_PARTS = ("pixels", "grid", "seconds")
_REMEDY = (
    "give what the model's processor returns: pixels, for patches the grid of each image, and with "
    "videos the seconds between their rows in time"
)


@register
@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """The images and videos of a batch, in the order of the documents and of their tokens.

    Attributes:
        pixels: ``[R, …]`` floating, the rows of all images one after another.
        grid: ``[N, 3]`` int64, the rows of each image in time, height and width, of which an image
            has the product. ``(1, 1, 1)`` is an image of one row.
        cu_images: ``[D+1]`` int64, numbers of the first image of each document,
            ``0 = c0 ≤ c1 ≤ … ≤ cD = N``.
        seconds: ``[N]`` float32, for a video the seconds between two of its rows in time, and 0 for
            an image; None without videos.

    Raises:
        BatchError: when the parts do not fit each other; it names the part and the index in it.
    """

    pixels: torch.Tensor
    grid: torch.Tensor
    cu_images: torch.Tensor
    seconds: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in self.tensors.items():
            check_tensor(f"media.{name}", value)
        _check_pixels(self.pixels)
        _check_grid(self.grid)
        _check_images(self.cu_images, len(self.grid))
        _check_seconds(self.seconds, len(self.grid))
        rows = sum(self.rows)
        if rows != len(self.pixels):
            raise BatchError(
                "media.pixels",
                f"expected {rows} rows, which the grids of {self.num_images} images add up to, "
                f"got {len(self.pixels)}",
                remedy=_REMEDY,
            )
        if not bool(self.pixels.isfinite().all()):
            row = int((~self.pixels.flatten(1).isfinite()).any(1).nonzero()[0])
            raise BatchError(
                "media.pixels",
                f"row {row} of {rows} is not finite",
                index=row,
                remedy="look where the pixels are computed",
            )

    @staticmethod
    def none(documents: int, device: Any = "cpu") -> Media:
        """Return the media of ``documents`` documents without images."""
        import torch

        return Media(
            pixels=torch.zeros(0, 0, device=device),
            grid=torch.zeros(0, 3, dtype=torch.int64, device=device),
            cu_images=torch.zeros(documents + 1, dtype=torch.int64, device=device),
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        found = {"pixels": self.pixels, "grid": self.grid, "cu_images": self.cu_images}
        return found if self.seconds is None else found | {"seconds": self.seconds}

    @property
    def num_images(self) -> int:
        """The number of images and videos N."""
        return int(self.grid.shape[0])

    @cached_property
    def are_videos(self) -> tuple[bool, ...]:
        """Truth value for each image, true for a video."""
        if self.seconds is None:
            return (False,) * self.num_images
        found: list[bool] = (self.seconds > 0).tolist()  # pyright: ignore[reportUnknownVariableType]
        return tuple(found)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each image."""
        found: list[int] = self.grid.prod(-1).tolist()  # pyright: ignore[reportUnknownVariableType]
        return tuple(found)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """``cu_images`` as Python integers."""
        found: list[int] = self.cu_images.tolist()  # pyright: ignore[reportUnknownVariableType]
        return tuple(found)

    def images_of(self, document: int) -> range:
        """Return the numbers of a document's images."""
        return range(self.bounds[document], self.bounds[document + 1])

    @property
    def rows_by_document(self) -> list[int]:
        """The number of rows of each document's images."""
        return [sum(self.rows[i] for i in self.images_of(d)) for d in range(len(self.bounds) - 1)]

    def select(self, documents: Sequence[int]) -> Media:
        """Return the images of these documents, in their order."""
        import torch

        images = [image for document in documents for image in self.images_of(document)]
        parts: Sequence[torch.Tensor] = ()
        if self.rows:
            parts = self.pixels.split(list(self.rows))  # pyright: ignore[reportUnknownVariableType]
        counts = [len(self.images_of(document)) for document in documents]
        device = self.pixels.device
        index = torch.tensor(images, dtype=torch.int64, device=device)
        return Media(
            pixels=torch.cat([parts[i] for i in images]) if images else self.pixels[:0],
            grid=self.grid[index],
            cu_images=torch.tensor([0, *counts], device=device).cumsum(0),
            seconds=None if self.seconds is None else self.seconds[index],
        )

    def to(self, device: Any) -> Media:
        """Return the same images on ``device``."""
        from engine_api.devices import move_tensor

        # The constructor is not called, because the media are already validated.
        copy = object.__new__(Media)
        for name, value in self.tensors.items():
            object.__setattr__(copy, name, move_tensor(value, device))
        if self.seconds is None:
            object.__setattr__(copy, "seconds", None)
        copy.__dict__["are_videos"] = self.are_videos
        copy.__dict__["rows"] = self.rows
        copy.__dict__["bounds"] = self.bounds
        return copy

    @staticmethod
    def concat(parts: Sequence[Media]) -> Media:
        """Return the images of all parts in order.

        Raises ``BatchError`` for rows of different shapes or dtypes.
        """
        import torch

        given = [part for part in parts if part.num_images]
        for part in given[1:]:
            first = given[0].pixels
            if part.pixels.shape[1:] != first.shape[1:] or part.pixels.dtype != first.dtype:
                raise BatchError(
                    "media.pixels",
                    f"expected rows of shape {tuple(first.shape[1:])} and {first.dtype}, as those "
                    f"before, got {tuple(part.pixels.shape[1:])} and {part.pixels.dtype}",
                    index=next(i for i, one in enumerate(parts) if one is part),
                    remedy="process all images with the same processor",
                )
        if not given:
            documents = sum(len(part.bounds) - 1 for part in parts)
            return Media.none(documents, parts[0].pixels.device if parts else "cpu")
        counts = [b - a for part in parts for a, b in pairwise(part.bounds)]
        device = given[0].pixels.device
        seconds = None
        if any(part.seconds is not None for part in given):
            still = [part.grid.new_zeros(part.num_images, dtype=torch.float32) for part in given]
            pairs = zip(given, still, strict=True)
            seconds = torch.cat([none if p.seconds is None else p.seconds for p, none in pairs])
        return Media(
            pixels=torch.cat([part.pixels for part in given]),
            grid=torch.cat([part.grid for part in given]),
            cu_images=torch.tensor([0, *counts], device=device).cumsum(0),
            seconds=seconds,
        )

    @staticmethod
    def pack(documents: Sequence[Mapping[str, Any] | None]) -> Media | None:
        """Pack the images of documents, or return None where no document has any.

        Args:
            documents: by document None, or ``pixels`` ``[R, …]``, ``grid`` ``[N, 3]`` and with
                videos ``seconds`` ``[N]``. Without ``grid`` each row of ``pixels`` is an image.

        Raises:
            BatchError: the images of a document cannot be used; ``index`` is the document's.
        """
        if all(one is None for one in documents):
            return None
        parts = [
            Media.none(1) if one is None else _of_document(index, one)
            for index, one in enumerate(documents)
        ]
        return Media.concat(parts)


def _of_document(index: int, given: object) -> Media:
    """Return the images of one document."""
    import torch

    kind = kind_of(given)
    values = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None
    if values is None or "pixels" not in values or set(values) - {*_PARTS}:
        got = kind if values is None else f"the keys {sorted(map(str, values))}"
        raise BatchError(
            MEDIA,
            "expected None, or a mapping with pixels, for patches grid, and with videos seconds, "
            f"got {got}",
            index=index,
            remedy=_REMEDY,
        )
    tensors: dict[str, torch.Tensor] = {}
    for name in values:
        try:
            tensors[name] = torch.as_tensor(values[name])
        # torch has no single error class for this.
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(
                f"media.{name}",
                f"expected a tensor or an array, got {kind_of(values[name])}",
                index=index,
                why=str(error),
                remedy=_REMEDY,
            ) from error
    pixels = tensors["pixels"]
    grid = tensors.get("grid")
    if grid is None:
        grid = torch.ones(len(pixels) if pixels.dim() else 0, 3, dtype=torch.int64)
    try:
        ends = torch.tensor([0, len(grid) if grid.dim() else 0], device=grid.device)
        seconds = tensors.get("seconds")
        return Media(
            pixels=pixels,
            grid=grid.to(pixels.device),
            cu_images=ends.to(pixels.device),
            seconds=None if seconds is None else seconds.to(pixels.device),
        )
    except BatchError as error:
        raise BatchError(
            error.field, f"document {index}: {error.what}", index=index, remedy=error.remedy
        ) from error


def _check_pixels(value: torch.Tensor) -> None:
    """Raise ``BatchError`` unless ``value`` is floating and has rows."""
    if not value.is_floating_point() or value.dim() < 2:
        raise BatchError(
            "media.pixels",
            f"expected a floating tensor [rows, …], got {_describe(value)}",
            remedy=_REMEDY,
        )


def _check_grid(value: torch.Tensor) -> None:
    """Raise ``BatchError`` unless ``value`` has three positive integers for each image."""
    import torch

    if value.dtype != torch.int64 or value.dim() != 2 or value.shape[1] != 3:
        raise BatchError(
            "media.grid",
            "expected an int64 tensor [images, 3], rows in time, height and width, "
            f"got {_describe(value)}",
            remedy=_REMEDY,
        )
    small = (value < 1).any(1).nonzero()
    if small.numel():
        at = int(small[0])
        sizes: list[int] = value[at].tolist()  # pyright: ignore[reportUnknownVariableType]
        raise BatchError(
            "media.grid",
            f"expected numbers of at least 1, got {sizes} for image {at}",
            index=at,
            remedy=_REMEDY,
        )


def _check_images(value: torch.Tensor, images: int) -> None:
    """Raise ``BatchError`` unless ``value`` rises from 0 to the number of images."""
    import torch

    is_list = value.dtype == torch.int64 and value.dim() == 1
    ends: list[int] = value.tolist() if is_list else []  # pyright: ignore[reportUnknownVariableType]
    rises = all(a <= b for a, b in pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != images or not rises:
        got = f"{ends!r:.100}" if ends else _describe(value)
        raise BatchError(
            "media.cu_images",
            f"expected int64 numbers that rise from 0 to {images}, the number of images, got {got}",
            remedy="give the number of images before each document, and that of all at the end",
        )


def _check_seconds(value: torch.Tensor | None, images: int) -> None:
    """Raise ``BatchError`` unless ``value`` has a number of at least 0 for each image."""
    import torch

    if value is None:
        return
    if value.dtype != torch.float32 or tuple(value.shape) != (images,):
        raise BatchError(
            "media.seconds",
            f"expected a float32 tensor [{images}], one number for each image or video, "
            f"got {_describe(value)}",
            remedy=_REMEDY,
        )
    bad = (~(value.isfinite() & (value >= 0))).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise BatchError(
            "media.seconds",
            f"expected 0 for an image and more for a video, got {float(value[at])} for image {at}",
            index=at,
            remedy=_REMEDY,
        )


def _describe(value: torch.Tensor) -> str:
    """Return a tensor's shape and dtype, for errors."""
    return f"the shape {tuple(value.shape)} of {value.dtype}"
