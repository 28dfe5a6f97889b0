"""Every weight of the model, which box of it this rank holds, and how it is read from a Hugging Face folder."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.errors import ConfigError
from engine_api.hf_folder import read_index
from engine_api.weights import ShardSpec
from engine_megatron.families import TIED_HEAD, Cut, Rule, Split, cuts, rules_of, saved_shape
from engine_megatron.masters import Masters
from engine_megatron.parallel import Layout, Place
from engine_megatron.shape import Shape

log = logging.getLogger("engine_megatron")

_DIMENSION: dict[Split, int | None] = {"none": None, "rows": 0, "columns": 1}


@dataclass(kw_only=True, eq=False)
class Weight:
    """One saved tensor of the whole model, and this rank's part of it.

    Attributes:
        per_rank: size in the split dimension on each tensor-parallel rank, padding of the vocabulary included.
        parameters: pipeline stage → Megatron's name of the parameter there, after the number of its model chunk.
        owner: the expert-parallel rank that holds it; None: not of an expert, they all do.
        param: it, on this rank; None on ranks without any of it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    per_rank: int
    parameters: Mapping[int, str]
    cut: Cut
    box: ShardSpec
    dtype: torch.dtype
    owner: int | None = None
    param: nn.Parameter | None = None

    @property
    def held(self) -> nn.Parameter:
        """The parameter, for who knows that this rank holds one."""
        assert self.param is not None, f"{self.name} is not on this rank"
        return self.param

    def part_of(self, parameter: Tensor) -> Tensor:
        """The box in something of the parameter's shape; live memory where that holds it in one piece."""
        return self.cut.read(parameter, self.box.shape)

    def at(self, place: Place) -> int | None:
        """Which of the parts in the split dimension the rank at ``place`` holds; None: nothing."""
        if place.stage not in self.parameters or self.owner not in (None, place.expert):
            return None
        if self.dim is None:
            return 0
        return place.tensor if self.owner is None else place.expert_tensor

    def span(self, tensor_rank: int) -> tuple[int, int]:
        """Start and size of a tensor-parallel rank's box in the split dimension."""
        assert self.dim is not None
        start = min(tensor_rank * self.per_rank, self.shape[self.dim])
        return start, min(self.per_rank, self.shape[self.dim] - start)

    def box_of(self, place: Place) -> ShardSpec:
        """The box of the rank at ``place``, its replica not yet counted."""
        part = self.at(place)
        if part is None:
            return ShardSpec.nothing(self.shape)
        offset, size = [0] * len(self.shape), list(self.shape)
        if self.dim is not None:
            offset[self.dim], size[self.dim] = self.span(part)
        return ShardSpec(global_shape=self.shape, offset=tuple(offset), shape=tuple(size))


def check_layout(shape: Shape, layout: Layout, multiple: int) -> None:
    """Raise ``ConfigError`` where the model cannot be divided evenly; the vocabulary is padded."""
    if layout.experts > 1 and not shape.experts:
        raise ConfigError(
            "parallelism.ep",
            f"{layout.experts}, but the model has no experts",
            remedy="set it to 1",
        )
    rows = padded_vocabulary(shape, layout, multiple) // layout.tensor
    if rows * (layout.tensor - 1) >= shape.vocab_size:
        raise ConfigError(
            "options.vocabulary_multiple",
            f"{multiple} x tp {layout.tensor} leaves a rank nothing but padding",
            why=f"there are {shape.vocab_size} tokens",
            remedy="choose a smaller one",
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            "model.path",
            f"{shape.heads} attention heads cannot share {shape.kv_heads} key-value heads",
            remedy="set num_key_value_heads in config.json to one that divides num_attention_heads",
        )
    heads = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    sizes = {
        "parallelism.tp": (
            layout.tensor,
            heads | ({} if shape.experts else {"intermediate size": shape.intermediate}),
        ),
        "parallelism.pp": (layout.stages, {"layers": shape.layers}),
        "options.virtual_stages": (
            layout.virtual,
            {"layers of a stage": shape.layers // layout.stages},
        ),
        "parallelism.ep": (layout.experts, {"experts": shape.experts}),
        "options.expert_tensor_parallel": (
            layout.expert_tensor,
            {"experts' intermediate size": shape.expert_intermediate},
        ),
    }
    for field, (size, parts) in sizes.items():
        for what, count in parts.items():
            if count % size:
                raise _uneven(field, size, what, count, math.gcd(*parts.values()))


def _uneven(field: str, size: int, what: str, count: int, common: int) -> ConfigError:
    """``common``: what all that is divided by this size has in common; an engine may have as many ranks as divide it."""
    fit = f"choose one of {', '.join(str(n) for n in range(1, common + 1) if common % n == 0)}"
    if field != "parallelism.tp":
        return ConfigError(field, f"{size} does not divide {count} {what}", remedy=fit)
    return ConfigError(
        field,
        f"{size} does not divide {count} {what}",
        why="a rank has whole ones: none is split, and none copied to several ranks"
        if "heads" in what
        else "",
        remedy=f"{fit}, and parallelism.cp or pp for the other ranks",
    )


def padded_vocabulary(shape: Shape, layout: Layout, multiple: int) -> int:
    """Rows of embedding and head: the least multiple of ``multiple`` times the tensor-parallel size."""
    step = multiple * layout.tensor
    return -(-shape.vocab_size // step) * step


def weight_table(shape: Shape, layout: Layout, multiple: int, dtype: torch.dtype) -> list[Weight]:
    """Every weight in the model's order, tied ones once; the parameters are not there yet."""
    vocabulary = padded_vocabulary(shape, layout, multiple)
    places = [layout.place(rank) for rank in range(layout.world)]
    table: list[Weight] = []
    for layer, rule in rules_of(shape):
        stages = _stages(layer, rule, shape, layout)
        for name, cut in zip(rule.saved, cuts(rule, shape), strict=True):
            whole, dim = saved_shape(name, shape), _DIMENSION[rule.split]
            rows = vocabulary if whole[0] == shape.vocab_size and layer is None else whole[dim or 0]
            ranks, owner = layout.tensor, None
            if rule.expert is not None:
                ranks, owner = (
                    layout.expert_tensor,
                    rule.expert // (shape.experts // layout.experts),
                )
            weight = Weight(
                name=name,
                shape=whole,
                dim=dim,
                per_rank=rows // ranks,
                parameters=stages,
                cut=cut,
                owner=owner,
                box=ShardSpec.nothing(whole),
                dtype=dtype,
            )
            table.append(replace(weight, box=_own_box(weight, places, layout.rank)))
    return table


def _stages(layer: int | None, rule: Rule, shape: Shape, layout: Layout) -> dict[int, str]:
    last, head = layout.stages - 1, layout.virtual - 1
    if layer is not None:
        part, local = divmod(layer, shape.layers // (layout.stages * layout.virtual))
        chunk, stage = divmod(part, layout.stages)
        name = rule.parameter
        if rule.expert is not None:
            name = name.replace("N", str(rule.expert % (shape.experts // layout.experts)))
        return {stage: f"{chunk}.decoder.layers.{local}.{name}"}
    if rule.saved == TIED_HEAD.saved:
        return {0: f"0.{rule.parameter}"} | (
            {last: f"{head}.{TIED_HEAD.parameter}"} if shape.tied and last else {}
        )
    return {last: f"{head}.{rule.parameter}"}


def _own_box(weight: Weight, places: Sequence[Place], own: int) -> ShardSpec:
    """The box of rank ``own``. Which of the ranks with the same box comes first goes round, so that all of them write."""
    parts = [weight.at(place) for place in places]
    copies = [rank for rank, part in enumerate(parts) if part == parts[own]]
    return replace(
        weight.box_of(places[own]),
        replica=(copies.index(own) + zlib.crc32(weight.name.encode())) % len(copies),
    )


def attach(table: Sequence[Weight], chunks: nn.Module, layout: Layout) -> None:
    """Give each weight that this rank holds its parameter; ``chunks`` holds the model's chunks under their numbers.

    Raises ``ConfigError`` for a hole in the mapping: a parameter that no weight fills, or the reverse.
    """
    params, stage = dict(chunks.named_parameters()), layout.here.stage
    held = [weight for weight in table if weight.at(layout.here) is not None]
    wanted = {weight.parameters[stage] for weight in held}
    if holes := sorted(wanted ^ set(params)):
        raise ConfigError(
            "model.path",
            f"the mapping and Megatron's model differ in {', '.join(holes[:3])}",
            why="engine_megatron.families has a hole",
            remedy="report the model family",
        )
    for weight in held:
        weight.param = params[weight.parameters[stage]]
        # Megatron says so while it initializes, which it does not here; its norm would count one rank's part alone.
        weight.param.tensor_model_parallel = weight.dim is not None  # type: ignore[attr-defined]
        weight.param.partition_dim = weight.dim or 0  # type: ignore[attr-defined]
        weight.param.partition_stride = 1  # type: ignore[attr-defined]
        # Megatron looks at ep alone, and would not add up whole experts' gradients over tensor-parallel ranks.
        weight.param.allreduce = weight.owner is None or not layout.spreads_experts  # type: ignore[attr-defined]


_FLOATING = ("F64", "F32", "F16", "BF16")  # as safetensors names them


class Files:
    """The safetensors files of a folder. Names and shapes are checked without reading a weight."""

    def __init__(self, folder: str) -> None:
        self.folder, self.handles = folder, dict[str, Any]()
        for path in _weight_files(Path(folder)):
            handle = _open(path)
            self.handles |= dict.fromkeys(handle.keys(), handle)

    def check(self, table: Sequence[Weight]) -> None:
        """Raise ``ConfigError`` where a tensor is missing or has another shape; a value head may be missing."""
        missing = [
            w.name for w in table if w.name not in self.handles and not w.name.startswith("score.")
        ]
        if missing:
            raise ConfigError(
                "model.path",
                f"{self.folder} lacks {len(missing)} tensors: {', '.join(missing[:3])} …",
                remedy="use the folder that save_pretrained wrote for this config.json",
            )
        for weight in (w for w in table if w.name in self.handles):
            stored = self.handles[weight.name].get_slice(weight.name)
            there = tuple(stored.get_shape())
            if stored.get_dtype() not in _FLOATING:
                raise ConfigError(
                    "model.path",
                    f"{weight.name} is stored as {stored.get_dtype()}",
                    why="this engine reads floating-point weights as they are, not quantized ones",
                    remedy="use the model's bf16, fp16 or fp32 files",
                )
            if there != weight.shape:
                raise ConfigError(
                    "model.path",
                    f"{weight.name} is {there}, config.json says {weight.shape}",
                    remedy="use files and config.json of the same model",
                )
        if unused := sorted(set(self.handles) - {w.name for w in table}):
            log.warning(
                "%s: %d tensors are not used: %s", self.folder, len(unused), ", ".join(unused[:4])
            )

    def read(self, weight: Weight) -> Tensor:
        """This rank's box."""
        source = self.handles[weight.name].get_slice(weight.name)
        result: Tensor = source[weight.box.slices]
        return result


def _weight_files(folder: Path) -> list[Path]:
    index = read_index(folder)
    if index is not None:
        return sorted({folder / name for name in index.values()})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            "model.path",
            f"{folder} holds no weights (*.safetensors)",
            remedy="convert it with transformers' save_pretrained, or set model.init: random",
        )
    return files


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "model.path",
        f"{path} cannot be read",
        why=str(error) or type(error).__name__,
        remedy="fetch the model again",
    )


def by_parameter(table: Sequence[Weight]) -> dict[nn.Parameter, list[Weight]]:
    """This rank's parameters and the weights in each."""
    result: dict[nn.Parameter, list[Weight]] = {}
    for weight in (weight for weight in table if weight.param is not None):
        result.setdefault(weight.held, []).append(weight)
    return result


def put(table: Sequence[Weight], masters: Masters, value_of: Callable[[Weight], Tensor]) -> None:
    """Write this rank's weights, masters included; one parameter's new values exist at a time."""
    for param, weights in by_parameter(table).items():
        whole = torch.zeros(param.shape, dtype=masters.dtype, device=param.device)
        for weight in weights:
            weight.cut.write(whole, value_of(weight).to(whole))
        masters.write(param, whole)


class Reader:
    """This rank's boxes in one dtype. What the model computes with is at hand, spread masters are gathered for it."""

    def __init__(self, masters: Masters, dtype: torch.dtype) -> None:
        self.masters, self.dtype = masters, dtype
        self._last: tuple[nn.Parameter, Tensor] | None = (
            None  # fused weights are read one after the other
        )

    def gathers(self, param: nn.Parameter) -> bool:
        """Whether reading takes all ranks that hold the parameter."""
        return self.masters.spread and param.dtype not in (self.dtype, self.masters.dtype)

    def read(self, weight: Weight) -> Tensor:
        """The box; empty where this rank has nothing."""
        if (param := weight.param) is None:
            return torch.empty(weight.box.shape, dtype=self.dtype)
        # A parameter is its master, rounded: in its own dtype there is nothing to fetch.
        if param.dtype == self.dtype:
            return weight.part_of(param.detach())
        if self._last is None or self._last[0] is not param:
            self._last = (param, self.masters.read(param))
        return weight.part_of(self._last[1]).to(self.dtype)

    def forget(self) -> None:
        """Drop the parameter read last. Ranks read other experts: each has another one at hand, and would gather otherwise."""
        self._last = None

    def read_together(self, table: Sequence[Weight]) -> dict[str, Tensor]:
        """The boxes of this rank that must be gathered, by name; of several ranks with the same box one keeps it."""
        gathered: dict[str, Tensor] = {}
        for weight in table:
            if weight.param is not None and self.gathers(weight.param):
                value = self.read(weight)
                if weight.box.replica == 0:
                    gathered[weight.name] = (
                        value.clone()
                    )  # not a view that keeps the whole parameter
        self.forget()
        return gathered


def fill(
    table: Sequence[Weight], masters: Masters, files: Files | None, seed: int, std: float
) -> None:
    """Fill this rank's boxes from ``files``, or from the seed: a value head that is absent, or everything."""

    def value_of(weight: Weight) -> Tensor:
        if files is not None and weight.name in files.handles:
            return files.read(weight)
        if files is not None:
            log.warning(
                "%s is not in the folder: a new one is made from seed %d", weight.name, seed
            )
        return _random(weight, seed, std)

    put(table, masters, value_of)


def _random(weight: Weight, seed: int, std: float) -> Tensor:
    """Normal values, ones for norms and zeros for biases; a part of the same whole in every layout."""
    if weight.name.endswith("norm.weight"):
        return torch.ones(weight.box.shape)
    if weight.name.endswith(".bias"):
        return torch.zeros(weight.box.shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.name.encode()))
    return (torch.randn(weight.shape, generator=generator) * std)[weight.box.slices]
