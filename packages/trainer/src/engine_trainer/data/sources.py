"""Images and videos of rows: where they are, what they show, and their defects.

A source is opened twice. Where its row is tokenized, its size is read, which tells the number of
its tokens. The header of an image has it. An animation is decoded there frame by frame, because
Pillow finds the time of a frame only behind the pixels of the frame before. Where its document goes
into a batch, its pixels are decoded. Pillow reads both.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TypeVar, cast

from PIL import Image, ImageOps, UnidentifiedImageError

from engine_trainer.config.checks import FRAMES_PER_SECOND
from engine_trainer.data.readers import Row
from engine_trainer.errors import DataError, ImageError
from engine_trainer.utils.hf_models import first_line

# Pillow has more formats: some run programs (EPS), and none of them is common in data.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# Those that say how long each of their frames is shown.
ANIMATED = ("GIF", "PNG", "WEBP")
# The keys of an image in a row, in the order in which they are looked at.
KEYS = ("bytes", "base64", "image_url", "image", "url", "path")
# The keys of a video in a row, around its frames or its file.
VIDEO_KEYS = ("frames", "video", "video_url")
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
_OF_THE_FILE = (None, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
# Largest number of frames of a video, that of Qwen3-VL's processor.
MAX_FRAMES = 768
# Pixels of all frames of a video, in multiples of Pillow's limit for one image. 768 frames of
# 1280 x 720 pixels have 7.9 times that limit.
_MAX_VIDEO = 8
# EXIF's tag of the orientation, and the values with which height and width change places.
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)
# Milliseconds of a frame whose file gives none, as browsers show it.
_DEFAULT_DURATION = 100.0
# Decimals of a time in milliseconds. Without them the sum of thirds would lie before or behind the
# same time as a product.
_DECIMALS = 6
# Number of bytes that are read of a file that is no image, and of those that an error shows.
_START_BYTES = 1024
_SHOWN_BYTES = 40
# What to do about a file of another kind, by its beginning in lower case.
_PAGE = "fetch it again: a page came in its place, such as that of an error or of a login"
_OTHERS = {
    b"<!doctype html": _PAGE,
    b"<html": _PAGE,
    b"version https://git-lfs": "fetch it with `git lfs pull`: this is a pointer to it",
}
_EXTRACT = (
    "extract its frames (ffmpeg -i clip.mp4 -vf fps=2 frames/%04d.png), and give them as a list"
)
_LISTED = '[["0001.png", "0002.png"]] or {"frames": ["0001.png", "0002.png"]}'
_WHY_TWO = "the tower sees two frames at a time"
_WHY_FEWER = "the frames of a video are decoded together, and each has its tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """An image or a video of a row, which is read when it is needed."""

    value: object
    """The image or the video as the row has it."""
    file: str
    """Data file of the row."""
    row: int
    column: str
    number: int
    """Number of the image in its row or in its video, or of the video in its row, from 1."""
    noun: str
    """Word for it in errors, before its number."""

    def error(self, what: str, *, why: str = "", remedy: str = "") -> ImageError:
        """Return an ``ImageError`` that names the row, and the image in it."""
        return ImageError(
            f"{self._described} {what}",
            file=self.file,
            row=self.row or None,
            column=self.column,
            why=why,
            remedy=f"{remedy}, or set data.on_bad_image=drop",
        )

    def machine_error(self, error: OSError | MemoryError) -> DataError:
        """Return a ``DataError`` for an error of the machine, which says nothing of the image."""
        return DataError(
            f"{self._described} could not be read",
            file=self.file,
            row=self.row or None,
            column=self.column,
            why=f"{type(error).__name__}: {first_line(error)}",
            remedy="see to the machine's disk, memory, permissions and number of open files, and "
            "start again; data.on_bad_image drops no image for a fault of the machine",
        )

    @property
    def _described(self) -> str:
        path = _find_value(self._inner)
        which = f" ({path:.200})" if isinstance(path, str) and not _is_base64(path) else ""
        return f"{self.noun} {self.number}{which}"

    @property
    def _inner(self) -> object:
        """The value that has the path of its file."""
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource(_Source):
    """An image of a row, or a frame of a video, which is read when it is needed.

    Its value is a path relative to the folder of the data file, ``data:image/…;base64,…``, bytes,
    or a mapping with one of ``KEYS``, such as ``{bytes, path}`` of Hugging Face ``datasets``.
    """

    noun: str = "image"

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

    def read_size(self) -> tuple[int, int]:
        """Return height and width as the image is shown, from its header.

        Raises ``ImageError`` for a file that is missing or no image, and for an image of a kind
        that is refused; ``DataError`` where the machine cannot read it.
        """
        with self.open() as image:
            self._check(image)
            return _read_shown_size(image)

    def decode(self) -> Image.Image:
        """Return the image in RGB, turned as it is shown.

        Raises ``ImageError`` like ``read_size``, and for pixels that cannot be decoded.
        """
        from transformers.image_utils import load_image

        with self.open() as image:
            self._check(image)
            return load_image(image)

    @contextmanager
    def open(self) -> Iterator[Image.Image]:
        """Open the image, and raise ``ImageError`` for errors of Pillow while it is read."""
        try:
            with Image.open(self._stream(), formats=FORMATS) as image:
                yield image
        except IsADirectoryError as error:
            raise self.error(
                "is a folder, expected a file",
                why="each image or animation is one file",
                remedy="write the path of a file in it",
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.error(
                "is missing",
                why="there is no such file",
                remedy="correct the path, which is relative to the folder of the data file (base64 "
                "needs data:image/png;base64, before it)",
            ) from error
        except UnidentifiedImageError as error:
            raise self._unidentified() from error
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

    def check_pixels(self, image: Image.Image) -> None:
        """Raise ``ImageError`` for an image that is too large, or not of 8 bits."""
        width, height = image.size
        if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
            raise self._too_large(f"{width} x {height} pixels")
        # Pillow's conversion to 8 bits makes everything above 255 white.
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise self.error(
                f"has pixels of mode {image.mode}, expected 8 bits a channel",
                why="which of their values are black and white is not known",
                remedy="scale it to 8 bits",
            )

    def _check(self, image: Image.Image) -> None:
        """Raise ``ImageError`` for an image that is too large, animated, or not of 8 bits."""
        frames = int(getattr(image, "n_frames", 1))
        # What follows the picture in a camera's MPO file is a preview, or the other eye's.
        if frames > 1 and image.format != "MPO":
            raise self.error(
                f"has {frames} frames, expected one",
                why="an animation would be seen as its first frame",
                remedy="write the frames that are meant as images of their own, or give it as a "
                "video",
            )
        self.check_pixels(image)

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

    def _unidentified(self) -> ImageError:
        # A page may have blanks or a byte order mark before it.
        start = self._read_start().lstrip(b" \t\r\n\xef\xbb\xbf")
        if not start:
            why = "it has no bytes, or blanks alone"
            return self.error("is empty", why=why, remedy="fetch or write it again")
        is_video = self.noun == "video"
        known = ANIMATED if is_video else FORMATS
        usual = _EXTRACT if is_video else "convert it to PNG"
        other = (way for begins, way in _OTHERS.items() if start.lower().startswith(begins))
        shown = start[:_SHOWN_BYTES].decode("latin-1")
        return self.error(
            "is no animation" if is_video else "is no image",
            why=f"it begins with {shown!r}; known: {', '.join(known)}",
            remedy=next(other, usual),
        )

    def _read_start(self) -> bytes:
        """Return the first bytes of the image's file."""
        stream = self._stream()
        with stream.open("rb") if isinstance(stream, Path) else stream as file:
            return file.read(_START_BYTES)

    def _too_large(self, why: str) -> ImageError:
        return self.error(
            f"has more than {Image.MAX_IMAGE_PIXELS} pixels",
            why=f"{why}: a decompression bomb fills the memory",
            remedy="make it smaller",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSource(_Source):
    """A video of a row: its frames in order, or an animation that Pillow reads.

    Its value is a list of images, ``{"frames": […], "fps": 2.0}``, or a file as an image is one,
    whose mapping may have ``fps``, too. ``fps`` is the number of frames in a second of a list, and
    of those that are taken from a file.
    """

    noun: str = "video"

    @property
    def name(self) -> str:
        """The path of its file or of its first frame, or the digest of its bytes."""
        frames = self._list_frames()
        if frames is None:
            return self._file.name
        rest = f" and {len(frames) - 1} more" if len(frames) > 1 else ""
        return f"{frames[0].name}{rest}" if frames else "no frames"

    @property
    def key(self) -> str:
        """Text that is the same for the same frames in any row."""
        frames = self._list_frames()
        parts = [self._file] if frames is None else frames
        return "\n".join([*(one.key for one in parts), f"fps={self._given_fps}"])

    def find_fps(self, default: float) -> float:
        """Return its number of frames in a second, ``default`` where the row gives none.

        Raises ``ImageError`` for a rate that is no number, too low or too high.
        """
        given = self._given_fps
        if given is None:
            return default
        if isinstance(given, int | float) and FRAMES_PER_SECOND.holds(given):
            return float(given)
        raise self.error(
            f"has fps {given!r:.100}, expected {FRAMES_PER_SECOND.words}",
            remedy="give its frames in a second, or leave fps out (data.video_fps)",
        )

    def read_size(self, default_fps: float, max_frames: int = MAX_FRAMES) -> tuple[int, int, int]:
        """Return the number of frames, and their height and width as they are shown.

        ``default_fps`` is that of ``find_fps``. Raises ``ImageError`` and ``DataError`` as
        ``ImageSource.read_size``, for fewer than two frames or more than ``max_frames``, frames of
        several sizes, and too many pixels in all of them.
        """
        fps = self.find_fps(default_fps)
        frames = self._list_frames()
        if frames is None:
            with self._file.open() as image:
                count = len(self._choose_frames(image, fps, max_frames))
                return count, *_read_shown_size(image)
        self._require_count(len(frames), max_frames)
        sizes = [frame.read_size() for frame in frames]
        self._require_one_size(sizes)
        height, width = sizes[0]
        self._require_pixels(len(frames), width, height)
        return len(frames), height, width

    def decode(self, default_fps: float, max_frames: int = MAX_FRAMES) -> list[Image.Image]:
        """Return its frames in RGB, turned as they are shown.

        Raises ``ImageError`` like ``read_size``, and for pixels that cannot be decoded.
        """
        frames = self._list_frames()
        if frames is not None:
            self.read_size(default_fps, max_frames)
            found = [frame.decode() for frame in frames]
        else:
            found = self._decode_file(self.find_fps(default_fps), max_frames)
        # The orientation may stand behind the pixels, where a header has not shown it.
        self._require_one_size([(one.height, one.width) for one in found])
        return found

    def _decode_file(self, fps: float, max_frames: int) -> list[Image.Image]:
        found: list[Image.Image] = []
        with self._file.open() as image:
            for frame in self._choose_frames(image, fps, max_frames):
                # One that is shown for longer is taken again.
                if found and image.tell() == frame:
                    found.append(found[-1])
                    continue
                image.seek(frame)
                found.append(ImageOps.exif_transpose(image.convert("RGB")))
        return found

    def _choose_frames(self, image: Image.Image, fps: float, max_frames: int) -> list[int]:
        """Return the frames that an animation shows at each step of 1 / ``fps`` from its start.

        Each frame is shown for the time that the file says.
        """
        self._file.check_pixels(image)
        # What a PNG shows where animations are not known may be no frame of its animation.
        first = int(bool(image.info.get("default_image")))
        numbers = range(first, int(getattr(image, "n_frames", 1)))
        if image.format not in ANIMATED or len(numbers) < 2:
            raise self.error(
                f"is a {image.format} of {say_count(len(numbers), 'frame')}, expected an animation",
                why=f"known: {', '.join(ANIMATED)} with two frames or more",
                remedy=f"{_EXTRACT} inside the list of videos: {_LISTED}",
            )
        durations: list[float] = []
        for number in numbers:
            image.seek(number)
            # Pillow knows the time of a frame of WebP when it is decoded.
            image.load()
            durations.append(float(image.info.get("duration") or _DEFAULT_DURATION))
        ends = [round(end, _DECIMALS) for end in accumulate(durations)]
        count = math.ceil(ends[-1] * fps / 1000)
        # The list may be one longer, for a count that was rounded down, and is never much longer
        # than the limit.
        times = [round(1000 * n / fps, _DECIMALS) for n in range(min(count, max_frames) + 1)]
        chosen = [numbers[bisect_right(ends, time)] for time in times if time < ends[-1]]
        if len(chosen) < 2:
            raise self._wrong_rate(ends[-1], len(chosen), fps, "at least two", _WHY_TWO, "raise")
        if len(chosen) > max_frames:
            most = f"at most {max_frames}"
            raise self._wrong_rate(ends[-1], count, fps, most, _WHY_FEWER, "lower")
        self._require_pixels(len(chosen), *image.size)
        return chosen

    def _wrong_rate(
        self, end: float, count: int, fps: float, expected: str, why: str, change: str
    ) -> ImageError:
        """Return the error of an animation of which too few or too many frames are taken."""
        return self.error(
            f"lasts {end / 1000:g} s, of which {say_count(count, 'frame')} "
            f"{'is' if count == 1 else 'are'} taken at {fps:g} frames in a second, expected "
            f"{expected}",
            why=why,
            remedy=f"{change} data.video_fps, or its own fps in the row",
        )

    def _require_count(self, count: int, max_frames: int) -> None:
        """Raise ``ImageError`` for a list of fewer than two frames, or of too many."""
        if count < 2:
            raise self.error(
                f"has {say_count(count, 'frame')}, expected at least two",
                why=_WHY_TWO,
                remedy="give one frame as an image",
            )
        if count > max_frames:
            raise self.error(
                f"has {count} frames, expected at most {max_frames}",
                why=_WHY_FEWER,
                remedy="give fewer frames, with fewer in a second (fps), or cut the video",
            )

    def _require_pixels(self, count: int, width: int, height: int) -> None:
        """Raise ``ImageError`` for frames that would fill the memory together."""
        if Image.MAX_IMAGE_PIXELS is None:
            return
        limit = _MAX_VIDEO * Image.MAX_IMAGE_PIXELS
        if count * width * height > limit:
            raise self.error(
                f"has more than {limit} pixels in its frames",
                why=f"{count} frames of {width} x {height} pixels are decoded together",
                remedy="give smaller frames or fewer of them (fps)",
            )

    def _require_one_size(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Raise ``ImageError`` for frames of several sizes, each height and width."""
        for number, (height, width) in enumerate(sizes, start=1):
            if (height, width) != sizes[0]:
                raise self.error(
                    f"has a frame {number} of {width} x {height} pixels, expected "
                    f"{sizes[0][1]} x {sizes[0][0]} as its first one",
                    why="the frames of a video have one size",
                    remedy="give all frames the same size",
                )

    @property
    def _file(self) -> ImageSource:
        """The animation."""
        return self._as_image(self._inner, self.number, "video")

    @property
    def _inner(self) -> object:
        """The frames or the file, without the mapping around them."""
        value = self.value
        if isinstance(value, Mapping):
            given = cast("Mapping[str, object]", value)
            key = next((key for key in VIDEO_KEYS if given.get(key) is not None), None)
            return value if key is None else given[key]
        return value

    @property
    def _given_fps(self) -> object:
        if isinstance(self.value, Mapping):
            return cast("Mapping[str, object]", self.value).get("fps")
        return None

    def _list_frames(self) -> list[ImageSource] | None:
        """Return the frames, or None for a file."""
        inner = self._inner
        if not isinstance(inner, list):
            return None
        frames = cast("list[object]", inner)
        noun = f"video {self.number}, frame"
        return [self._as_image(one, number, noun) for number, one in enumerate(frames, start=1)]

    def _as_image(self, value: object, number: int, noun: str) -> ImageSource:
        return ImageSource(
            value=value,
            file=self.file,
            row=self.row,
            column=self.column,
            number=number,
            noun=noun,
        )


S = TypeVar("S", ImageSource, VideoSource)


def list_sources(row: Row, column: str, value: object, kind: type[S], first: int = 1) -> list[S]:
    """Return the images or videos of a row's column or of a message's part, one or a list of them.

    ``first`` is the number of the first one.
    """
    if value is None:
        return []
    found = cast("list[object]", value) if isinstance(value, list) else [value]
    return [
        kind(value=one, file=row.file, row=row.number, column=column, number=number)
        for number, one in enumerate(found, start=first)
    ]


def _read_shown_size(image: Image.Image) -> tuple[int, int]:
    """Return height and width as an image is shown, from its header."""
    width, height = image.size
    # The method of a PNG would decode the pixels, behind which it may have this, too.
    exif = Image.Image.getexif(image)
    return (width, height) if exif.get(_ORIENTATION) in _LYING else (height, width)


def say_count(number: int, noun: str) -> str:
    """Return a number with its noun, as ``1 frame`` or ``2 frames``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
