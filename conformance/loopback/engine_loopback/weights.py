"""Partition of the weights into boxes of ranks, and their reading from a Hugging Face folder."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine_api.errors import ConfigError
from engine_api.hf_folder import WeightFiles
from engine_api.weights import ShardSpec, random_weight
from engine_loopback.parallel import Layout, Place
from engine_loopback.shape import Shape

# Split in dimension 0.
_COLUMN = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias|lora_B\.weight)$")
# Split in dimension 1.
_ROW = re.compile(r"\.(o|down)_proj\.(weight|lora_A\.weight)$")
# Whole on every tensor-parallel rank, but used with that rank's heads, outputs or inputs alone.
_PARTIAL = re.compile(
    r"\.(q|k)_norm\.weight$"
    r"|\.(q|k|v|gate|up)_proj\.lora_A\.weight$"
    r"|\.(o|down)_proj\.lora_B\.weight$"
)


@dataclass(kw_only=True, eq=False)
class Weight:
    """One weight of the whole model with this rank's box (``param`` is None for an empty box)."""

    name: str
    shape: tuple[int, ...]
    box: ShardSpec
    dtype: torch.dtype
    param: nn.Parameter | None
    adapter: bool
    trainable: bool
    merges: bool = True
    """True if an export adds the weight's adapter to it."""

    @property
    def held(self) -> nn.Parameter:
        """The parameter of a weight that this rank is known to hold."""
        assert self.param is not None, f"{self.name} is not on this rank"
        return self.param

    @property
    def local(self) -> Tensor:
        """This rank's box in live memory.

        It is empty if the rank holds nothing.
        """
        if self.param is None:
            return torch.empty(self.box.shape, dtype=self.dtype)
        return self.param.detach()


class Partition:
    """Boxes by rank: layers by stage, experts by expert rank, projections by tensor rank."""

    def __init__(self, shape: Shape, layout: Layout) -> None:
        self.shape = shape
        self.layout = layout

    def check(self) -> None:
        """Raise ``ConfigError`` if the model cannot be divided evenly."""
        shape = self.shape
        layout = self.layout
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
            for part, count in parts.items():
                if count % size:
                    raise ConfigError(
                        f"parallelism.{name}",
                        f"{size} does not divide {count} {part}",
                        remedy="choose a size that divides it",
                    )

    def stages(self, name: str) -> tuple[int, ...]:
        """Return the pipeline stages that hold a weight.

        A tied embedding is on the first and on the last.
        """
        last = self.layout.stages - 1
        if found := re.search(r"model\.layers\.(\d+)\.", name):
            return (int(found[1]) // (self.shape.layers // self.layout.stages),)
        if name == "model.embed_tokens.weight":
            return (0, last) if self.shape.tied and last else (0,)
        return (last,)

    def expert_rank(self, name: str) -> int | None:
        """Return the expert-parallel rank that holds an expert's weight.

        It is None for a dense weight.
        """
        found = re.search(r"\.experts\.(\d+)\.", name)
        return int(found[1]) // (self.shape.experts // self.layout.expert) if found else None

    def split_dim(self, name: str) -> int | None:
        """Return the dimension that is split over tensor-parallel ranks, if any."""
        if _COLUMN.search(name):
            return 0
        return 1 if _ROW.search(name) else None

    def is_partial(self, name: str) -> bool:
        """Return whether tensor-parallel ranks hold a weight whole, but its gradient in parts."""
        return _PARTIAL.search(name) is not None

    def holds(self, name: str, place: Place) -> bool:
        """Return whether the rank at ``place`` holds any part of a weight."""
        return place.stage in self.stages(name) and self.expert_rank(name) in (None, place.expert)

    def box(self, name: str, shape: tuple[int, ...], place: Place) -> ShardSpec:
        """Return the box of the rank at ``place``, without its replica number."""
        if not self.holds(name, place):
            return ShardSpec.nothing(shape)
        dim = self.split_dim(name)
        offset = [0] * len(shape)
        size = list(shape)
        if dim is not None:
            size[dim] //= self.layout.tensor
            offset[dim] = place.tensor * size[dim]
        return ShardSpec(global_shape=shape, offset=tuple(offset), shape=tuple(size))

    def own_box(self, name: str, shape: tuple[int, ...]) -> ShardSpec:
        """Return this rank's box with its replica number.

        The first of the ranks with the same box differs by weight, so that all of them write.
        """
        boxes = [self.box(name, shape, place) for place in self.layout.places]
        box = boxes[self.layout.rank]
        copies = [rank for rank, other in enumerate(boxes) if other == box]
        replica = (copies.index(self.layout.rank) + zlib.crc32(name.encode())) % len(copies)
        return ShardSpec(global_shape=shape, offset=box.offset, shape=box.shape, replica=replica)

    def holder_index(self, name: str) -> int:
        """Return the number of lower ranks that hold any part of a weight."""
        return sum(self.holds(name, place) for place in self.layout.places[: self.layout.rank])


def shapes_of(weights: Mapping[str, Weight]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's own weights by name."""
    return {weight.name: weight.shape for weight in weights.values() if not weight.adapter}


def fill(weights: Mapping[str, Weight], files: WeightFiles | None, seed: int, std: float) -> None:
    """Fill this rank's boxes from ``files``, or from the seed.

    Without files, or for a value head that they lack, values are made from the seed. Adapters are
    left as they are.
    """
    if files is not None:
        files.check(shapes_of(weights))
    for weight in weights.values():
        if weight.param is None or weight.adapter:
            continue
        if files is not None and weight.name in files:
            value = files.read(weight.name, weight.box.slices)
        else:
            value = random_weight(weight.name, weight.box, seed=seed, std=std)
        weight.local.copy_(value)
