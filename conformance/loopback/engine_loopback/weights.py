"""Which box of which weight each rank holds, and how it is read from a Hugging Face folder."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.errors import ConfigError
from engine_api.weights import ShardSpec
from engine_loopback.parallel import Layout, Place
from engine_loopback.shape import Shape

_COLUMN = re.compile(
    r"\.(q|k|v|gate|up)_proj\.(weight|bias|lora_B\.weight)$"
)  # split in dimension 0
_ROW = re.compile(r"\.(o|down)_proj\.(weight|lora_A\.weight)$")  # split in dimension 1
# Whole on every tensor-parallel rank, but used with that rank's heads, outputs or inputs alone.
_PARTIAL = re.compile(
    r"\.(q|k)_norm\.weight$|\.(q|k|v|gate|up)_proj\.lora_A\.weight$|\.(o|down)_proj\.lora_B\.weight$"
)


@dataclass(kw_only=True, eq=False)
class Weight:
    """One weight of the whole model, and this rank's box of it; ``param`` is None where that is empty."""

    name: str
    shape: tuple[int, ...]
    box: ShardSpec
    dtype: torch.dtype
    param: nn.Parameter | None
    adapter: bool
    trainable: bool
    merges: bool = True  # an export adds its adapter to it

    @property
    def held(self) -> nn.Parameter:
        """The parameter, for who knows that this rank holds one."""
        assert self.param is not None, f"{self.name} is not on this rank"
        return self.param

    @property
    def local(self) -> Tensor:
        """This rank's box; live memory, empty where it holds nothing."""
        return (
            torch.empty(self.box.shape, dtype=self.dtype)
            if self.param is None
            else self.param.detach()
        )


class Partition:
    """Which rank holds which box: layers by stage, experts by expert rank, projections by tensor rank."""

    def __init__(self, shape: Shape, layout: Layout) -> None:
        self.shape, self.layout = shape, layout

    def check(self) -> None:
        """Raise ``ConfigError`` where the model cannot be divided evenly."""
        shape, layout = self.shape, self.layout
        if layout.expert > 1 and not shape.experts:
            raise ConfigError(
                "parallelism.ep",
                f"{layout.expert}, but the model has no experts",
                remedy="set it to 1",
            )
        sizes = {
            "tp": (
                layout.tensor,
                {
                    "attention heads": shape.heads,
                    "key-value heads": shape.kv_heads,
                    "intermediate size": shape.intermediate,
                    "experts' intermediate size": shape.expert_intermediate,
                },
            ),
            "pp": (layout.stages, {"layers": shape.layers}),
            "ep": (layout.expert, {"experts": shape.experts}),
        }
        for name, (size, parts) in sizes.items():
            for what, count in parts.items():
                if count % size:
                    raise ConfigError(
                        f"parallelism.{name}",
                        f"{size} does not divide {count} {what}",
                        remedy="choose a size that divides it",
                    )

    def stages(self, name: str) -> tuple[int, ...]:
        """The pipeline stages that hold a weight; a tied embedding is on the first and on the last."""
        last = self.layout.stages - 1
        if found := re.search(r"model\.layers\.(\d+)\.", name):
            return (int(found[1]) // (self.shape.layers // self.layout.stages),)
        if name == "model.embed_tokens.weight":
            return (0, last) if self.shape.tied and last else (0,)
        return (last,)

    def expert_rank(self, name: str) -> int | None:
        """The expert-parallel rank that holds an expert's weight; None for a dense one."""
        found = re.search(r"\.experts\.(\d+)\.", name)
        return int(found[1]) // (self.shape.experts // self.layout.expert) if found else None

    def split_dim(self, name: str) -> int | None:
        """The dimension that is split over tensor-parallel ranks, if any."""
        if _COLUMN.search(name):
            return 0
        return 1 if _ROW.search(name) else None

    def is_partial(self, name: str) -> bool:
        """Whether each tensor-parallel rank has only a part of the gradient of a weight that it holds whole."""
        return _PARTIAL.search(name) is not None

    def holds(self, name: str, place: Place) -> bool:
        """Whether the rank at ``place`` holds anything of a weight."""
        return place.stage in self.stages(name) and self.expert_rank(name) in (None, place.expert)

    def box(self, name: str, shape: tuple[int, ...], place: Place) -> ShardSpec:
        """The box of the rank at ``place``, its replica not yet counted."""
        if not self.holds(name, place):
            return ShardSpec.nothing(shape)
        dim, offset, size = self.split_dim(name), [0] * len(shape), list(shape)
        if dim is not None:
            size[dim] //= self.layout.tensor
            offset[dim] = place.tensor * size[dim]
        return ShardSpec(global_shape=shape, offset=tuple(offset), shape=tuple(size))

    def own_box(self, name: str, shape: tuple[int, ...]) -> ShardSpec:
        """This rank's box. Which of the ranks with the same box comes first goes round, so that all of them write."""
        boxes = [self.box(name, shape, place) for place in self.layout.places]
        box = boxes[self.layout.rank]
        copies = [rank for rank, other in enumerate(boxes) if other == box]
        replica = (copies.index(self.layout.rank) + zlib.crc32(name.encode())) % len(copies)
        return ShardSpec(global_shape=shape, offset=box.offset, shape=box.shape, replica=replica)

    def holder_index(self, name: str) -> int:
        """How many lower ranks hold anything of a weight."""
        return sum(self.holds(name, place) for place in self.layout.places[: self.layout.rank])


class Files:
    """The safetensors files of a folder."""

    def __init__(self, folder: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder, self.handles = folder, dict[str, Any]()
        for path in sorted(Path(folder).glob("*.safetensors")):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    "model.path", f"{path} cannot be read", why=str(error), remedy="fetch it again"
                ) from error
            self.handles |= dict.fromkeys(handle.keys(), handle)

    def read(self, weight: Weight) -> Tensor:
        """A weight's box; raises ``ConfigError`` where the file has another shape or lacks it."""
        if weight.name not in self.handles:
            raise ConfigError(
                "model.path",
                f"{self.folder} has no tensor {weight.name} (*.safetensors)",
                remedy="use the files that belong to config.json, or model.init: random",
            )
        source = self.handles[weight.name].get_slice(weight.name)
        if tuple(source.get_shape()) != weight.shape:
            raise ConfigError(
                "model.path",
                f"{weight.name} is {tuple(source.get_shape())}, config.json says {weight.shape}",
                remedy="use files and config.json of the same model",
            )
        result: Tensor = source[weight.box.slices]
        return result


def fill(weights: Mapping[str, Weight], files: Files | None, seed: int, std: float) -> None:
    """Fill this rank's boxes from ``files``, or from the seed: adapters, a value head that is absent, or everything."""
    for weight in weights.values():
        if weight.param is None or weight.adapter:
            continue
        absent = files is None or (
            weight.name.startswith("score.") and weight.name not in files.handles
        )
        value = random_weight(weight, seed, std) if absent else files.read(weight)  # type: ignore[union-attr]
        weight.local.copy_(value)


def random_weight(weight: Weight, seed: int, std: float) -> Tensor:
    """Normal values, ones for norms and zeros for biases; a part of the same whole in every layout."""
    if weight.name.endswith("norm.weight"):
        return torch.ones(weight.box.shape)
    if weight.name.endswith(".bias"):
        return torch.zeros(weight.box.shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.name.encode()))
    return (torch.randn(weight.shape, generator=generator) * std)[weight.box.slices]
