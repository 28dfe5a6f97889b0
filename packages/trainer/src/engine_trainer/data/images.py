"""The model's own processor of images and videos.

transformers' processor of the model makes pixel values and expands the placeholders, so that
training sees what transformers would serve. vLLM expands images in the same way. Around a video of
Qwen3-VL transformers 5.19 keeps the marks of the template, which vLLM drops.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from engine_api.capabilities import Capability
from engine_api.config import ModelSource
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_vision import VIDEO_FAMILIES, Vision, read_vision
from engine_api.media import Media
from engine_api.rollout import PromptImages
from engine_trainer.data.sources import MAX_FRAMES, ImageSource, VideoSource
from engine_trainer.utils.hf_models import MODEL_KEY, first_line, hf_config

# The command line answers many requests without torch.
if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

KWARGS = "data.processor_kwargs"
VIDEO_KWARGS = "data.video_processor_kwargs"
# Settings of a video processor that choose frames, which the rows and data.video_fps do, and those
# that each call gives.
_OF_THE_CALL = (
    "do_sample_frames",
    "fps",
    "num_frames",
    "min_frames",
    "max_frames",
    "max_duration",
    "return_metadata",
    "video_metadata",
    "return_tensors",
    "data_format",
    "input_data_format",
    "device",
)
# Height and width of the blank image that the processor and the model are compared with.
_PROBE = (60, 90)
# The key of the settings of videos among those of images.
_OF_VIDEOS = "video_processor"
_VIDEO_FILE = "video_preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedImage:
    """An image or a video whose size is known, and whose pixels are not decoded yet."""

    source: ImageSource | VideoSource
    rows: int
    """Number of rows of pixels, which are patches or whole tiles (``engine_api.media``)."""
    text: str
    """Text that takes the place of the placeholder."""
    runs: Sequence[int] = ()
    """Number of tokens in each run of a video's tokens (``Vision.list_runs``), none of an image."""

    @property
    def is_video(self) -> bool:
        """True for a video."""
        return isinstance(self.source, VideoSource)


class ImageProcessor:
    """The model's own processor of images, and of videos once there is one.

    Attributes:
        vision: the images that the model takes.
        placeholder: text that stands for an image in a rendered template.
        video_placeholder: text that stands for a video there, or None where none is taken.
    """

    def __init__(
        self, processor: Any, vision: Vision, where: str, videos: VideoSettings | None = None
    ) -> None:
        self._processor = processor
        self.vision = vision
        self.placeholder = str(processor.image_token)
        self.video_placeholder = str(processor.video_token) if vision.takes_videos else None
        self._where = where
        self._videos = videos or VideoSettings(path=where)
        self._compare_with_model()

    @staticmethod
    def load(
        model: ModelSource,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        path: str | None = None,
        *,
        video_kwargs: Mapping[str, Any] | None = None,
        video_fps: float = 2.0,
    ) -> ImageProcessor:
        """Load the processor of a model.

        Args:
            model: the model.
            tokenizer: the tokenizer, which must have the model's placeholder.
            kwargs: settings that take the place of the processor's own.
            path: folder or hub id of the processor's files; None: the model's.
            video_kwargs: settings that take the place of those of the processor of videos.
            video_fps: frames in a second of a video that says none (``data.video_fps``).

        Raises:
            UnsupportedCapability: the model's family is not served.
            ConfigError: the model has no tower, the processor's files are missing or damaged, or
                the processor makes other images than the model takes.
        """
        config = hf_config(model)
        vision = read_vision(config, "engine-train", videos=True)
        if vision is None:
            raise ConfigError(
                MODEL_KEY,
                f"the rows have images or videos, and {model.path!r} has no vision tower",
                why="its config.json has no vision_config",
                remedy="give a vision-language model, or remove these rows",
            )
        revision = model.revision if path is None else None
        path = path or model.path
        processor = _load_processor(path, revision, config, tokenizer, kwargs)
        videos = VideoSettings(
            path=path,
            revision=revision,
            kwargs=video_kwargs or {},
            fps=video_fps,
            family=str(config.model_type),
        )
        return ImageProcessor(processor, vision, path, videos)

    @property
    def settings(self) -> dict[str, Any]:
        """All that the pixels depend on, as JSON: the processor's settings and its backend.

        The settings of the processor of videos are there where it is loaded.
        """
        image_processor = self._processor.image_processor
        found = {
            **json.loads(image_processor.to_json_string()),
            "backend": str(getattr(image_processor, "backend", "")),
        }
        if not self.has_video_processor:
            return found
        of_videos = json.loads(self.video_processor.to_json_string())
        return found | {_OF_VIDEOS: of_videos | {"video_fps": self._videos.fps}}

    def load_videos(self) -> None:
        """Load the processor of videos, so that ``settings`` and ``save`` have its settings.

        Raises the errors of ``video_processor``.
        """
        _ = self.video_processor

    def require(self, then: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the settings are not those of a checkpoint."""
        now = self.settings
        # One of the two may have seen images alone.
        if _OF_VIDEOS not in now or _OF_VIDEOS not in then:
            now, then = ({k: v for k, v in one.items() if k != _OF_VIDEOS} for one in (now, then))
        now, then = _name_settings(now), _name_settings(then)
        changed = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
        if changed:
            raise ConfigError(
                changed[0],
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
        merged = own | given | {"image_processor": own["image_processor"]}
        # It stays as it is in the model's own file where no row has a video.
        if self.has_video_processor:
            self.video_processor.save_pretrained(folder)
            merged["video_processor"] = json.loads(self.video_processor.to_json_string())
        file.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @cached_property
    def video_processor(self) -> Any:
        """The model's processor of videos, which is loaded when it is first asked for.

        Raises ``UnsupportedCapability`` for a family whose videos are not known, and
        ``ConfigError`` where it cannot be loaded or makes other videos than the model takes.
        """
        if not self.vision.takes_videos:
            raise UnsupportedCapability(
                Capability.VIDEO,
                where=f"engine-train with a {self._videos.family}",
                why=f"no test has compared its videos; those of {', '.join(VIDEO_FAMILIES)} are "
                "taken",
                remedy="use a model of these families, or give frames of the videos as images",
            )
        found = _load_video_processor(self._videos)
        # The family's processor reads sizes there when it writes the tokens of a video.
        self._processor.video_processor = found
        self._compare_video_with_model(found)
        return found

    @property
    def has_video_processor(self) -> bool:
        """True where the processor of videos is loaded, because rows have videos."""
        return "video_processor" in self.__dict__

    def plan(self, source: ImageSource | VideoSource) -> PlannedImage:
        """Return an image or a video with the number of its rows, and the text of its tokens.

        Raises ``ImageError``, also for a shape that the processor refuses.
        """
        if isinstance(source, VideoSource):
            return self._plan_video(source)
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

    def _plan_video(self, source: VideoSource) -> PlannedImage:
        import torch

        processor = self.video_processor
        count, height, width = source.read_size(self._videos.fps, self._max_frames)
        try:
            # Without values, so that the processor computes sizes alone.
            blank = torch.empty(count, 3, height, width, dtype=torch.uint8, device="meta")
            output = self._process_video(processor, blank, self._fps_of(source))
        except ValueError as error:
            raise source.error(
                f"has {count} frames of {width} x {height} pixels, which the model's processor "
                "refuses",
                why=first_line(error),
                remedy="cut them, or make them smaller",
            ) from error
        grid: list[int] = output["video_grid_thw"][0].tolist()
        return PlannedImage(
            source=source,
            rows=math.prod(grid),
            text=str(self._processor.replace_video_token(output, 0)),
            runs=self.vision.list_runs(grid, video=True),
        )

    @property
    def _max_frames(self) -> int:
        """The largest number of frames of a video, the processor's own where it has one."""
        return int(getattr(self.video_processor, "max_frames", None) or MAX_FRAMES)

    def _fps_of(self, source: VideoSource) -> float:
        return source.find_fps(self._videos.fps)

    def count_places(self, text: str, *, videos: bool) -> int:
        """Return the number of placeholders of images, or of videos, in a rendered text."""
        mark = self.video_placeholder if videos else self.placeholder
        return 0 if mark is None else text.count(mark)

    def expand(
        self, text: str, images: Iterator[PlannedImage], videos: Iterator[PlannedImage]
    ) -> tuple[str, list[PlannedImage]]:
        """Return the text with the tokens of the next image or video at each placeholder.

        The second value has these images and videos in the order of their places.
        """
        marks = {self.placeholder: images}
        if self.video_placeholder is not None:
            marks[self.video_placeholder] = videos
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        placed = [next(marks[mark]) for mark in parts[1::2]]
        parts[1::2] = [one.text for one in placed]
        return "".join(parts), placed

    def count_features(self, images: Sequence[PlannedImage], *, videos: bool = False) -> int:
        """Return the number of image tokens, or of video tokens, that the model has features for.

        Those of the other kind are not counted.
        """
        merged = self.vision.merge**2
        rows = sum(image.rows for image in images if image.is_video == videos)
        return rows // merged * self.vision.features_per_row

    def make_media(self, images: Sequence[PlannedImage]) -> dict[str, torch.Tensor]:
        """Return ``pixels``, ``grid`` and with videos ``seconds`` as ``Batch.pack`` takes them.

        Raises ``ImageError`` for an image that cannot be decoded.
        """
        return self._make_rows(images, [self._decode(image) for image in images])

    def _decode(self, image: PlannedImage) -> NDArray[np.uint8]:
        """Return the pixels ``[height, width, 3]`` of an image, or of each frame of a video."""
        if isinstance(image.source, VideoSource):
            frames = image.source.decode(self._videos.fps, self._max_frames)
            return np.stack([np.array(one) for one in frames])
        return np.array(image.source.decode())

    def make_prompt_images(
        self, images: Sequence[PlannedImage], placeholders: Sequence[int]
    ) -> PromptImages:
        """Return the images of a prompt as rollouts take them.

        ``placeholders`` are the prompt's ids with one placeholder for each image. Raises
        ``ImageError`` for an image that cannot be decoded.
        """
        import torch

        pictures = [self._decode(image) for image in images]
        media = Media.pack([self._make_rows(images, pictures)])
        assert media is not None, "there are images"
        return PromptImages(
            media=media,
            placeholders=list(placeholders),
            pictures=tuple(map(torch.from_numpy, pictures)),
        )

    def _make_rows(
        self, images: Sequence[PlannedImage], pictures: Sequence[NDArray[np.uint8]]
    ) -> dict[str, torch.Tensor]:
        """Return the pixels and the grids of decoded images and videos, in their order."""
        import torch

        kinds = [image.is_video for image in images]
        stills = [i for i, is_video in enumerate(kinds) if not is_video]
        made = dict(zip(stills, self._make_images(images, pictures, stills), strict=True))
        for i, is_video in enumerate(kinds):
            if is_video:
                made[i] = self._make_video(images[i], pictures[i])
        parts = [made[i] for i in range(len(images))]
        found = {
            "pixels": torch.cat([pixels for pixels, _ in parts]),
            "grid": torch.stack([grid for _, grid in parts]),
        }
        if any(kinds):
            found["seconds"] = torch.tensor([self._seconds_of(image) for image in images])
        return found

    def _make_images(
        self,
        images: Sequence[PlannedImage],
        pictures: Sequence[NDArray[np.uint8]],
        chosen: Sequence[int],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pixels and the grid of each of the chosen images."""
        import torch

        if not chosen:
            return []
        try:
            output = self._process([Image.fromarray(pictures[i]) for i in chosen])
        except MemoryError as error:
            raise images[chosen[0]].source.machine_error(error) from error
        for number, i in enumerate(chosen):
            _require_text(images[i], self._processor.replace_image_token(output, number))
        grid = output.get("image_grid_thw")
        if grid is None:
            grid = torch.tensor([[images[i].rows, 1, 1] for i in chosen])
        pixels: torch.Tensor = output["pixel_values"]
        return list(zip(pixels.split([images[i].rows for i in chosen]), grid, strict=True))

    def _make_video(
        self, video: PlannedImage, frames: NDArray[np.uint8]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pixels and the grid of a video."""
        import torch

        source = cast("VideoSource", video.source)
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        try:
            output = self._process_video(self.video_processor, pixels, self._fps_of(source))
        except MemoryError as error:
            raise source.machine_error(error) from error
        _require_text(video, self._processor.replace_video_token(output, 0))
        return output["pixel_values_videos"], output["video_grid_thw"][0]

    def _seconds_of(self, image: PlannedImage) -> float:
        """Return the seconds between two rows in time of a video, and 0 for an image."""
        if not isinstance(image.source, VideoSource):
            return 0.0
        return float(self.video_processor.temporal_patch_size) / self._fps_of(image.source)

    def _process(self, images: Sequence[Image.Image]) -> Any:
        """Return what the image processor makes of images, as the whole processor calls it.

        The tokenizer is left out: it may not be used by several threads.
        """
        return self._processor.image_processor(
            list(images), return_tensors="pt", **_fixed_settings(self._processor)
        )

    def _process_video(self, processor: Any, frames: torch.Tensor, fps: float) -> Any:
        """Return what the processor makes of all frames ``[n, 3, height, width]`` of a video."""
        # The family's code lengthens this list.
        numbers = list(range(len(frames)))
        metadata = {"total_num_frames": len(frames), "fps": fps, "frames_indices": numbers}
        return processor(
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_metadata=True,
            return_tensors="pt",
        )

    def _compare_video_with_model(self, processor: Any) -> None:
        """Raise ``ConfigError`` if the processor makes other videos than the model takes."""
        import torch

        frames = torch.zeros(4, 3, *_PROBE, dtype=torch.uint8)
        try:
            output = self._process_video(processor, frames, 1.0)
            text = str(self._processor.replace_video_token(output, 0))
        # Each family's own code may raise any of these for the settings that it is given.
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise self._differs(
                "cannot process a video",
                f"{type(error).__name__}: {first_line(error)}",
                videos=True,
            ) from error
        vision = self.vision
        shape = tuple(output["pixel_values_videos"].shape)[1:]
        ids: list[int] = list(
            self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        runs = [len(list(group)) for token, group in groupby(ids) if token == vision.video_token]
        want = vision.list_runs(output["video_grid_thw"][0].tolist(), video=True)
        if shape != vision.row_shape:
            raise self._differs(
                f"makes rows of videos of shape {shape}, the model takes {vision.row_shape}",
                "patch_size or temporal_patch_size differs from the tower's",
                videos=True,
            )
        if runs != want:
            raise self._differs(
                f"writes runs of {runs} video tokens (id {vision.video_token}) for a video of "
                f"{want} features",
                f"its placeholder is {self.video_placeholder!r}, or its merge_size differs from "
                "the tower's",
                videos=True,
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
                "patch_size, temporal_patch_size or the size of a tile differs from the tower's",
            )
        if tokens != vision.count_features(sizes):
            raise self._differs(
                f"writes {tokens} image tokens (id {vision.image_token}) for an image of "
                f"{vision.count_features(sizes)} features",
                f"its placeholder is {self.placeholder!r}, of id "
                f"{self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)}, or its "
                "merge_size differs from the tower's",
            )

    def _differs(self, what: str, why: str, *, videos: bool = False) -> ConfigError:
        key, file = (VIDEO_KWARGS, _VIDEO_FILE) if videos else (KWARGS, "preprocessor_config.json")
        return ConfigError(
            key,
            f"the processor of {self._where!r} {what}",
            why=why,
            remedy="use the processor and the tokenizer that belong to this model; "
            f"see {file}, processor_config.json and {key}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """Place and settings of a model's processor of videos."""

    path: str
    """Folder or hub id of its files."""
    revision: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings that take the place of its own (``data.video_processor_kwargs``)."""
    fps: float = 2.0
    """Frames in a second of a video that says none (``data.video_fps``)."""
    family: str = ""
    """The model's type, for errors."""


def _name_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's settings by the keys of the configuration that would change them."""
    of_videos = settings.get(_OF_VIDEOS, {})
    own = {f"{KWARGS}.{key}": value for key, value in settings.items() if key != _OF_VIDEOS}
    return own | {f"{VIDEO_KWARGS}.{key}": value for key, value in of_videos.items()}


def _require_text(image: PlannedImage, text: object) -> None:
    """Raise ``ImageError`` if decoded pixels are not of the size that was planned."""
    if str(text) != image.text:
        raise image.source.error(
            "has not the size that its header said",
            why="the file has changed since the run began, or it lies in its header",
            remedy="start the run again",
        )


def _require_size(image_processor: Any, asked: object, key: str = KWARGS) -> None:
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
            f"{key}.size",
            f"expected {dict(given)}, got {got}",
            why="the model's own file has min_pixels and max_pixels, which count before it",
            remedy=f"set these in place of size ({key}: {limits} as in the file)",
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
    _require_settings(image_processor, kwargs, KWARGS, also=("backend",))
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
    """Return the settings that a processor gives its image processor in each call.

    They are the processor's own since transformers 5.24, and before that those of its arguments'
    class, which a processor of other code may still have.
    """
    defaults = processor.valid_processor_kwargs._defaults  # noqa: SLF001 - it has no public name
    own: Mapping[str, Any] = getattr(processor, "images_kwargs", None) or {}
    return {**own, **defaults.get("images_kwargs", {})}


def _load_video_processor(settings: VideoSettings) -> Any:
    """Return transformers' processor of videos of a model. Raises ``ConfigError`` without one."""
    if find_spec("torchvision") is None:
        raise ConfigError(
            "data",
            "rows with videos need torchvision",
            why="transformers' processors of videos compute with it",
            remedy="install torchvision in the build of torch: "
            "uv pip install --torch-backend auto torchvision",
        )
    from transformers import AutoVideoProcessor

    try:
        found = AutoVideoProcessor.from_pretrained(
            settings.path, revision=settings.revision, **copy.deepcopy(dict(settings.kwargs))
        )
    # Each family's own code may raise any of these for files with unexpected values.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(
            MODEL_KEY,
            f"no processor of videos can be read at {settings.path!r}",
            why=f"{type(error).__name__}: {first_line(error)}",
            remedy=f"copy {_VIDEO_FILE} (or processor_config.json) into that folder",
        ) from error
    for name in settings.kwargs:
        if name in _OF_THE_CALL:
            raise ConfigError(
                f"{VIDEO_KWARGS}.{name}",
                "expected a setting of the size or the values of pixels",
                why="the frames of a row are all shown, and those of a file are chosen by its own "
                "times",
                remedy="leave it out; data.video_fps says how many frames in a second are taken",
            )
    _require_settings(found, settings.kwargs, VIDEO_KWARGS)
    _require_size(found, settings.kwargs.get("size"), VIDEO_KWARGS)
    return found


def _require_settings(
    processor: Any, kwargs: Mapping[str, Any], key: str, also: Collection[str] = ()
) -> None:
    """Raise ``ConfigError`` for a setting that the processor does not have."""
    known = {*processor.valid_kwargs.__annotations__, *also}
    for name in kwargs:
        if name not in known:
            kind = "video" if key == VIDEO_KWARGS else "image"
            raise ConfigError(
                f"{key}.{name}",
                f"the {kind} processor {type(processor).__name__} has no such setting",
                why=f"it has {', '.join(sorted(known))}",
                remedy="correct the name, or leave it out",
            )
