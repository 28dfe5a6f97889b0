"""Images of rows: their places, their defects, and the model's own processor.

An image is opened twice. Where its row is tokenized, its header alone is read, which tells the
number of its tokens. Where its document goes into a batch, its pixels are decoded.

Pillow reads images, and transformers' processor of the model makes pixel values and expands the
placeholders, so that training sees what transformers and vLLM would serve.
"""

from __future__ import annotations

import base64
import binascii
import copy
import errno
import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, UnidentifiedImageError

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_vision import Vision, read_vision
from engine_api.media import Media
from engine_api.rollout import PromptImages
from engine_trainer.data.readers import Row
from engine_trainer.errors import DataError, ImageError
from engine_trainer.utils.hf_models import MODEL_KEY, first_line, hf_config

# The command line answers many requests without torch.
if TYPE_CHECKING:
    import torch

KWARGS = "data.processor_kwargs"
# Pillow has more formats: some run programs (EPS), and none of them is common in data.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# The keys of an image in a row, in the order in which they are looked at.
KEYS = ("bytes", "base64", "image_url", "image", "url", "path")
# Errors of Pillow's readers for a damaged file.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    RuntimeError,
    struct.error,
    zlib.error,
)
# The system's errors for a path or an offset that no file has. Any other number is a fault of the
# machine; Pillow's own errors have none.
_OF_THE_FILE = (None, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
# EXIF's tag of the orientation, and the values with which height and width change places.
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)
# Height and width of the blank image that the processor and the model are compared with.
_PROBE = (60, 90)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """An image of a row, which is read when it is needed."""

    value: object
    """The image as the row has it.

    It is a path relative to the folder of the data file, ``data:image/…;base64,…``, bytes, or a
    mapping with one of ``KEYS``, such as ``{bytes, path}`` of Hugging Face ``datasets``.
    """
    file: str
    """Data file of the row."""
    row: int
    column: str
    number: int
    """Number of the image in its row, from 1."""

    @property
    def name(self) -> str:
        """The image's path as the row has it, or ``sha256:`` with the digest of its bytes."""
        value = _find_value(self.value)
        if isinstance(value, str) and not _is_base64(value):
            return value
        content = value if isinstance(value, bytes) else repr(value).encode()
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    @property
    def key(self) -> str:
        """Text that is the same for the same file or the same bytes in any row."""
        name = self.name
        return name if name.startswith("sha256:") else str(Path(self.file).parent / name)

    def error(self, what: str, *, why: str = "", remedy: str = "") -> ImageError:
        """Return an ``ImageError`` that names the row, and the image in it."""
        return ImageError(
            f"{self._name} {what}",
            file=self.file,
            row=self.row or None,
            column=self.column,
            why=why,
            remedy=f"{remedy}, or set data.on_bad_image=drop",
        )

    def machine_error(self, error: OSError | MemoryError) -> DataError:
        """Return a ``DataError`` for an error of the machine, which says nothing of the image."""
        return DataError(
            f"{self._name} could not be read",
            file=self.file,
            row=self.row or None,
            column=self.column,
            why=f"{type(error).__name__}: {first_line(error)}",
            remedy="see to the machine's disk, memory, permissions and number of open files, and "
            "start again; data.on_bad_image drops no image for a fault of the machine",
        )

    @property
    def _name(self) -> str:
        path = _find_value(self.value)
        which = f" ({path:.200})" if isinstance(path, str) and not _is_base64(path) else ""
        return f"image {self.number}{which}"

    def read_size(self) -> tuple[int, int]:
        """Return height and width as the image is shown, from its header.

        Raises ``ImageError`` for a file that is missing or no image, and for an image of a kind
        that is refused; ``DataError`` where the machine cannot read it.
        """
        with self._open() as image:
            self._check(image)
            width, height = image.size
            # The method of a PNG would decode the pixels, behind which it may have this, too.
            exif = Image.Image.getexif(image)
            return (width, height) if exif.get(_ORIENTATION) in _LYING else (height, width)

    def decode(self) -> Image.Image:
        """Return the image in RGB, turned as it is shown.

        Raises ``ImageError`` like ``read_size``, and for pixels that cannot be decoded.
        """
        from transformers.image_utils import load_image

        with self._open() as image:
            self._check(image)
            return load_image(image)

    @contextmanager
    def _open(self) -> Iterator[Image.Image]:
        """Open the image, and raise ``ImageError`` for errors of Pillow while it is read."""
        try:
            with Image.open(self._stream(), formats=FORMATS) as image:
                yield image
        except FileNotFoundError as error:
            raise self.error(
                "is missing",
                why="there is no such file",
                remedy="correct the path, which is relative to the folder of the data file (base64 "
                "needs data:image/png;base64, before it)",
            ) from error
        except UnidentifiedImageError as error:
            raise self.error(
                "is no image", why=f"known: {', '.join(FORMATS)}", remedy="convert it to PNG"
            ) from error
        except _BOMB as error:
            raise self._too_large(first_line(error)) from error
        except MemoryError as error:
            raise self.machine_error(error) from error
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno not in _OF_THE_FILE:
                raise self.machine_error(error) from error
            raise self.error(
                "cannot be decoded",
                why=f"{type(error).__name__}: {first_line(error)}",
                remedy="fetch or write it again (a truncated copy gives this error)",
            ) from error

    def _stream(self) -> BytesIO | Path:
        """Return the image's file. Raises ``ImageError`` for a value that names none."""
        value = _find_value(self.value)
        if isinstance(value, bytes) and value:
            return BytesIO(value)
        if isinstance(value, str) and _is_base64(value):
            return BytesIO(self._decode_base64(value.partition(",")[2]))
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            raise self.error(
                "is an address, expected a file",
                why="a run fetches nothing from the network",
                remedy="download the images, and write their paths",
            )
        # The system takes no path with a NUL.
        if isinstance(value, str) and value and "\0" not in value:
            return Path(self.file).parent / value
        raise self.error(
            f"is {_describe(value)}, expected a path, bytes, or base64",
            remedy="write a path, data:image/png;base64,… or a mapping with one of "
            f"{', '.join(KEYS)}",
        )

    def _decode_base64(self, text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.error(
                "is not base64", why=str(error), remedy="write it again, without line breaks"
            ) from error

    def _check(self, image: Image.Image) -> None:
        """Raise ``ImageError`` for an image that is too large, animated, or not of 8 bits."""
        width, height = image.size
        if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
            raise self._too_large(f"{width} x {height} pixels")
        frames = int(getattr(image, "n_frames", 1))
        # What follows the picture in a camera's MPO file is a preview, or the other eye's.
        if frames > 1 and image.format != "MPO":
            raise self.error(
                f"has {frames} frames, expected one",
                why="an animation would be seen as its first frame",
                remedy="write the frames that are meant as images of their own",
            )
        # Pillow's conversion to 8 bits makes everything above 255 white.
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise self.error(
                f"has pixels of mode {image.mode}, expected 8 bits a channel",
                why="which of their values are black and white is not known",
                remedy="scale it to 8 bits",
            )

    def _too_large(self, why: str) -> ImageError:
        return self.error(
            f"has more than {Image.MAX_IMAGE_PIXELS} pixels",
            why=f"{why}: a decompression bomb fills the memory",
            remedy="make it smaller",
        )


def list_sources(row: Row, column: str, value: object, first: int = 1) -> list[ImageSource]:
    """Return the images of a row's column or of a message's part, which is one or a list of them.

    ``first`` is the number of the first one.
    """
    if value is None:
        return []
    images = cast("list[object]", value) if isinstance(value, list) else [value]
    return [
        ImageSource(value=one, file=row.file, row=row.number, column=column, number=number)
        for number, one in enumerate(images, start=first)
    ]


def _find_value(value: object) -> object:
    """Return the path, base64 or bytes of an image, without mappings around them."""
    while isinstance(value, Mapping):
        given = cast("Mapping[str, object]", value)
        key = next((key for key in KEYS if given.get(key) is not None), None)
        if key is None:
            return value
        value = f"data:,{given[key]}" if key == "base64" else given[key]
    return value


def _is_base64(text: str) -> bool:
    return text.startswith("data:")


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, cast("Mapping[object, object]", value)))
        return f"a mapping with {keys or 'no key'}"[:100]
    return "empty" if value in ("", b"") else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedImage:
    """An image whose size is known, and whose pixels are not decoded yet."""

    source: ImageSource
    rows: int
    """Number of rows of pixels, which are patches or whole tiles (``engine_api.media``)."""
    text: str
    """Text that takes the place of the placeholder."""


class ImageProcessor:
    """The model's own processor of images.

    Attributes:
        vision: the images that the model takes.
        placeholder: text that stands for an image in a rendered template.
    """

    def __init__(self, processor: Any, vision: Vision, where: str) -> None:
        self._processor = processor
        self.vision = vision
        self.placeholder = str(processor.image_token)
        self._where = where
        self._compare_with_model()

    @staticmethod
    def load(
        model: ModelSource, tokenizer: Any, kwargs: Mapping[str, Any], path: str | None = None
    ) -> ImageProcessor:
        """Load the processor of a model.

        Args:
            model: the model.
            tokenizer: the tokenizer, which must have the model's placeholder.
            kwargs: settings that take the place of the processor's own.
            path: folder or hub id of the processor's files; None: the model's.

        Raises:
            UnsupportedCapability: the model's family is not served.
            ConfigError: the model has no tower, the processor's files are missing or damaged, or
                the processor makes other images than the model takes.
        """
        config = hf_config(model)
        vision = read_vision(config, "engine-train")
        if vision is None:
            raise ConfigError(
                MODEL_KEY,
                f"the rows have images, and {model.path!r} has no vision tower",
                why="its config.json has no vision_config",
                remedy="give a vision-language model, or remove the images from the rows",
            )
        revision = model.revision if path is None else None
        path = path or model.path
        processor = _load_processor(path, revision, config, tokenizer, kwargs)
        return ImageProcessor(processor, vision, path)

    @property
    def settings(self) -> dict[str, Any]:
        """All that the pixels depend on, as JSON: the processor's settings and its backend."""
        image_processor = self._processor.image_processor
        return {
            **json.loads(image_processor.to_json_string()),
            "backend": str(getattr(image_processor, "backend", "")),
        }

    def require(self, then: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the settings are not those of a checkpoint."""
        now = self.settings
        changed = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
        if changed:
            raise ConfigError(
                f"{KWARGS}.{changed[0]}",
                f"expected {then.get(changed[0])!r} as in the checkpoint, "
                f"got {now.get(changed[0])!r}",
                why="the image processor has changed since then, or another backend of it is "
                "installed" + (f"; also: {', '.join(changed[1:])}" if changed[1:] else ""),
                remedy="restore the processor's files or set the key, or start a new run in "
                "another run.output_dir",
            )

    def save(self, folder: Path) -> None:
        """Write the processor's settings to a model's folder, which has its other files."""
        self._processor.image_processor.save_pretrained(folder)
        file = folder / "processor_config.json"
        own = json.loads(self._processor.to_json_string())
        given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        # A video processor stays as it is in the model's own file.
        merged = own | given | {"image_processor": own["image_processor"]}
        file.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def plan(self, source: ImageSource) -> PlannedImage:
        """Return an image with the number of its rows, and the text of its tokens.

        Raises ``ImageError``, also for a shape that the processor refuses.
        """
        size = source.read_size()
        try:
            # vLLM's backend for transformers plans with this method, too.
            counted = self._processor._get_num_multimodal_tokens(image_sizes=[size])  # noqa: SLF001
        except (ValueError, ZeroDivisionError) as error:
            raise source.error(
                f"is {size[1]} x {size[0]} pixels, which the model's processor refuses",
                why=first_line(error),
                remedy="cut it, or make it smaller",
            ) from error
        import torch

        rows = int(counted["num_image_patches"][0])
        # By family what the image processor returns of the size: the product of the grid is read.
        like = {
            "image_grid_thw": torch.tensor([[1, 1, rows]]),
            "num_patches": [rows],
            "num_crops": [0],
        }
        text = str(self._processor.replace_image_token(like, 0))
        return PlannedImage(source=source, rows=rows, text=text)

    def expand(self, text: str, images: Iterator[PlannedImage]) -> str:
        """Return the text with each placeholder replaced by the tokens of the next image."""
        head, *rest = text.split(self.placeholder)
        return "".join([head, *(next(images).text + part for part in rest)])

    def count_features(self, images: Sequence[PlannedImage]) -> int:
        """Return the number of image tokens that the model has features for."""
        merged = self.vision.merge**2
        return sum(image.rows // merged * self.vision.features_per_row for image in images)

    def make_media(self, images: Sequence[PlannedImage]) -> dict[str, torch.Tensor]:
        """Return ``pixels`` ``[R, …]`` and ``grid`` ``[N, 3]`` as ``Batch.pack`` takes them.

        Raises ``ImageError`` for an image that cannot be decoded.
        """
        return self._make_rows(images, [image.source.decode() for image in images])

    def make_prompt_images(
        self, images: Sequence[PlannedImage], placeholders: Sequence[int]
    ) -> PromptImages:
        """Return the images of a prompt as rollouts take them.

        ``placeholders`` are the prompt's ids with one placeholder for each image. Raises
        ``ImageError`` for an image that cannot be decoded.
        """
        import torch

        pictures = [image.source.decode() for image in images]
        media = Media.pack([self._make_rows(images, pictures)])
        assert media is not None, "there are images"
        return PromptImages(
            media=media,
            placeholders=list(placeholders),
            pictures=tuple(torch.from_numpy(np.array(picture)) for picture in pictures),
        )

    def _make_rows(
        self, images: Sequence[PlannedImage], pictures: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """Return the pixels and the grids of decoded images."""
        import torch

        try:
            output = self._process(pictures)
        except MemoryError as error:
            raise images[0].source.machine_error(error) from error
        for number, image in enumerate(images):
            if str(self._processor.replace_image_token(output, number)) != image.text:
                raise image.source.error(
                    "has not the size that its header said",
                    why="the file has changed since the run began, or it lies in its header",
                    remedy="start the run again",
                )
        grid = output.get("image_grid_thw")
        if grid is None:
            grid = torch.tensor([[image.rows, 1, 1] for image in images])
        return {"pixels": output["pixel_values"], "grid": grid}

    def _process(self, images: Sequence[Image.Image]) -> Any:
        """Return what the image processor makes of images, as the whole processor calls it.

        The tokenizer is left out: it may not be used by several threads.
        """
        return self._processor.image_processor(
            list(images), return_tensors="pt", **_fixed_settings(self._processor)
        )

    def _compare_with_model(self) -> None:
        """Raise ``ConfigError`` if the processor makes other images than the model takes.

        A blank image is processed, and compared in its pixels and its tokens.
        """
        height, width = _PROBE
        try:
            output = self._process([Image.new("RGB", (width, height))])
        # Each family's own code may raise any of these for the settings that it is given.
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise self._differs(
                "cannot process an image", f"{type(error).__name__}: {first_line(error)}"
            ) from error
        vision = self.vision
        shape = tuple(output["pixel_values"].shape)
        text = str(self._processor.replace_image_token(output, 0))
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = list(ids).count(vision.image_token)
        grid = output.get("image_grid_thw")
        sizes = [shape[0], 1, 1] if grid is None else grid[0].tolist()
        if shape[1:] != vision.row_shape:
            raise self._differs(
                f"makes rows of pixels of shape {shape[1:]}, the model takes {vision.row_shape}",
                "patch_size, temporal_patch_size or the size of a tile is another than the tower's",
            )
        if tokens != vision.count_features(sizes):
            raise self._differs(
                f"writes {tokens} image tokens (id {vision.image_token}) for an image of "
                f"{vision.count_features(sizes)} features",
                f"its placeholder is {self.placeholder!r}, of id "
                f"{self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)}, or its "
                "merge_size is another than the tower's",
            )

    def _differs(self, what: str, why: str) -> ConfigError:
        return ConfigError(
            KWARGS,
            f"the processor of {self._where!r} {what}",
            why=why,
            remedy="use the processor and the tokenizer that belong to this model; "
            f"see preprocessor_config.json, processor_config.json and {KWARGS}",
        )


def _require_size(image_processor: Any, asked: object) -> None:
    """Raise ``ConfigError`` if the processor has another size than was asked for.

    The ``min_pixels`` and ``max_pixels`` of a family's file take the place of its ``size``.
    """
    if not isinstance(asked, Mapping):
        return
    got = dict(image_processor.size)
    given = cast("Mapping[str, object]", asked)
    if any(got.get(key) != value for key, value in given.items()):
        limits = {"min_pixels": got.get("shortest_edge"), "max_pixels": got.get("longest_edge")}
        raise ConfigError(
            f"{KWARGS}.size",
            f"expected {dict(given)}, got {got}",
            why="the model's own file has min_pixels and max_pixels, which count before it",
            remedy=f"set these in place of size ({KWARGS}: {limits} as in the file)",
        )


def _load_processor(
    path: str, revision: str | None, config: Any, tokenizer: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return transformers' processor of a model, without its part for videos."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    family: Any = PROCESSOR_MAPPING[type(config)]

    class WithoutVideos(family):
        # A processor of videos needs torchvision.
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    WithoutVideos.__name__ = family.__name__
    try:
        # transformers changes the mappings in them.
        asked = copy.deepcopy(dict(kwargs))
        image_processor = AutoImageProcessor.from_pretrained(path, revision=revision, **asked)
        settings, _ = WithoutVideos.get_processor_dict(path, revision=revision)
        processor = WithoutVideos.from_args_and_dict(
            [image_processor, tokenizer],
            {name: value for name, value in settings.items() if name != "video_processor"},
        )
    # Each family's own code may raise any of these for files with unexpected values.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(
            MODEL_KEY,
            f"no processor of images can be read at {path!r}",
            why=f"{type(error).__name__}: {first_line(error)}",
            remedy="copy preprocessor_config.json (and processor_config.json, where the model has "
            "it) and the whole tokenizer into that folder",
        ) from error
    known = set(image_processor.valid_kwargs.__annotations__) | {"backend"}
    for name in kwargs:
        if name not in known:
            raise ConfigError(
                f"{KWARGS}.{name}",
                f"the image processor {type(image_processor).__name__} has no such setting",
                why=f"it has {', '.join(sorted(known))}",
                remedy="correct the name, or leave it out",
            )
    _require_size(image_processor, kwargs.get("size"))
    for name, value in _fixed_settings(processor).items():
        if name in kwargs:
            raise ConfigError(
                f"{KWARGS}.{name}",
                f"{family.__name__} sets it to {value!r:.100} in each call",
                why="a server would not see the setting",
                remedy="leave it out",
            )
    return processor


def _fixed_settings(processor: Any) -> dict[str, Any]:
    """Return the settings that a processor gives its image processor in each call."""
    defaults = processor.valid_processor_kwargs._defaults  # noqa: SLF001 - it has no public name
    return dict(defaults.get("images_kwargs", {}))
