"""Every weight of the model, this rank's box of it, and reading from a Hugging Face folder."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine_api.errors import ConfigError
from engine_api.hf_folder import WeightFiles
from engine_api.weights import ShardSpec, random_weight
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
        dim: the dimension that is split over tensor-parallel ranks; None if none is.
        per_rank: size in the split dimension on each tensor-parallel rank, padding of the
            vocabulary included.
        parameters: pipeline stage → number of the model chunk and Megatron's parameter name there.
        owner: the expert-parallel rank that holds the expert; None for weights of no expert, which
            all of them hold.
        param: the parameter on this rank; None on ranks without a part of the weight.
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
        """The parameter, of a weight that this rank is known to hold."""
        assert self.param is not None, f"{self.name} is not on this rank"
        return self.param

    def part_of(self, parameter: Tensor) -> Tensor:
        """Return this rank's box of a tensor of the parameter's shape.

        The result is live memory where the tensor holds the box contiguously.
        """
        return self.cut.read(parameter, self.box.shape)

    def at(self, place: Place) -> int | None:
        """Return the number of the part that the rank at ``place`` holds, or None if it has none.

        Parts are counted in the split dimension.
        """
        if place.stage not in self.parameters or self.owner not in (None, place.expert):
            return None
        if self.dim is None:
            return 0
        return place.tensor if self.owner is None else place.expert_tensor

    def span(self, tensor_rank: int) -> tuple[int, int]:
        """Return the start and size of a tensor-parallel rank's box in the split dimension."""
        assert self.dim is not None
        start = min(tensor_rank * self.per_rank, self.shape[self.dim])
        return start, min(self.per_rank, self.shape[self.dim] - start)

    def box_of(self, place: Place) -> ShardSpec:
        """Return the box of the rank at ``place``, with its replica number not yet set."""
        part = self.at(place)
        if part is None:
            return ShardSpec.nothing(self.shape)
        offset = [0] * len(self.shape)
        size = list(self.shape)
        if self.dim is not None:
            offset[self.dim], size[self.dim] = self.span(part)
        return ShardSpec(global_shape=self.shape, offset=tuple(offset), shape=tuple(size))


def check_layout(shape: Shape, layout: Layout, multiple: int) -> None:
    """Raise ``ConfigError`` where the model cannot be divided evenly.

    The vocabulary always can, because it is padded.
    """
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
            remedy="choose a smaller multiple",
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            "model.path",
            f"{shape.heads} attention heads cannot share {shape.kv_heads} key-value heads",
            remedy="set num_key_value_heads in config.json to a divisor of num_attention_heads",
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
    """Return the error for a parallel size that does not divide ``count``.

    ``common`` is the greatest common divisor of all counts that this size divides, so its divisors
    are the sizes that fit.
    """
    fit = f"choose one of {', '.join(str(n) for n in range(1, common + 1) if common % n == 0)}"
    if field != "parallelism.tp":
        return ConfigError(field, f"{size} does not divide {count} {what}", remedy=fit)
    why = ""
    if "heads" in what:
        why = "a rank has whole heads: none is split, and none copied to several ranks"
    return ConfigError(
        field,
        f"{size} does not divide {count} {what}",
        why=why,
        remedy=f"{fit}, and parallelism.cp or pp for the other ranks",
    )


def padded_vocabulary(shape: Shape, layout: Layout, multiple: int) -> int:
    """Return the number of rows of embedding and head.

    It is the least multiple of ``multiple`` times the tensor-parallel size that is large enough.
    """
    step = multiple * layout.tensor
    return -(-shape.vocab_size // step) * step


def weight_table(shape: Shape, layout: Layout, multiple: int, dtype: torch.dtype) -> list[Weight]:
    """Return every weight in the model's order, tied weights once, without parameters yet."""
    vocabulary = padded_vocabulary(shape, layout, multiple)
    places = [layout.place(rank) for rank in range(layout.world)]
    table: list[Weight] = []
    for layer, rule in rules_of(shape):
        stages = _stages(layer, rule, shape, layout)
        for name, cut in zip(rule.saved, cuts(rule, shape), strict=True):
            whole = saved_shape(name, shape)
            dim = _DIMENSION[rule.split]
            is_padded = whole[0] == shape.vocab_size and layer is None
            rows = vocabulary if is_padded else whole[dim or 0]
            ranks = layout.tensor
            owner: int | None = None
            if rule.expert is not None:
                ranks = layout.expert_tensor
                owner = rule.expert // (shape.experts // layout.experts)
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
    """Return Megatron's name of a rule's parameter on each pipeline stage that has it."""
    last = layout.stages - 1
    head = layout.virtual - 1
    if layer is not None:
        part, local = divmod(layer, shape.layers // (layout.stages * layout.virtual))
        chunk, stage = divmod(part, layout.stages)
        name = rule.parameter
        if rule.expert is not None:
            name = name.replace("N", str(rule.expert % (shape.experts // layout.experts)))
        return {stage: f"{chunk}.decoder.layers.{local}.{name}"}
    if rule.saved == TIED_HEAD.saved:
        stages = {0: f"0.{rule.parameter}"}
        if shape.tied and last:
            stages[last] = f"{head}.{TIED_HEAD.parameter}"
        return stages
    return {last: f"{head}.{rule.parameter}"}


def _own_box(weight: Weight, places: Sequence[Place], own: int) -> ShardSpec:
    """Return the box of rank ``own``, with its replica number.

    Replica 0 is a different rank for different weights, so that all ranks with the same box write.
    """
    parts = [weight.at(place) for place in places]
    copies = [rank for rank, part in enumerate(parts) if part == parts[own]]
    replica = (copies.index(own) + zlib.crc32(weight.name.encode())) % len(copies)
    return replace(weight.box_of(places[own]), replica=replica)


def attach(table: Sequence[Weight], chunks: nn.Module, layout: Layout) -> None:
    """Set the parameter of each weight that this rank holds.

    ``chunks`` holds the model's chunks under their numbers. Raises ``ConfigError`` for a hole in
    the mapping: a parameter that no weight fills, or a weight without a parameter.
    """
    params = dict(chunks.named_parameters())
    stage = layout.here.stage
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
        # Megatron sets these marks while it initializes weights, which it does not do here. Without
        # them its gradient norm would count one rank's part alone.
        weight.param.tensor_model_parallel = weight.dim is not None  # type: ignore[attr-defined]
        weight.param.partition_dim = weight.dim or 0  # type: ignore[attr-defined]
        weight.param.partition_stride = 1  # type: ignore[attr-defined]
        # Megatron looks at ep alone, and would not add up whole experts' gradients over
        # tensor-parallel ranks.
        is_spread = weight.owner is not None and layout.spreads_experts
        weight.param.allreduce = not is_spread  # type: ignore[attr-defined]


def by_parameter(table: Sequence[Weight]) -> dict[nn.Parameter, list[Weight]]:
    """Return this rank's parameters and the weights in each."""
    result: dict[nn.Parameter, list[Weight]] = {}
    for weight in (weight for weight in table if weight.param is not None):
        result.setdefault(weight.held, []).append(weight)
    return result


def put(table: Sequence[Weight], masters: Masters, value_of: Callable[[Weight], Tensor]) -> None:
    """Write this rank's weights, masters included.

    ``value_of`` returns a weight's new values. Those of one parameter exist at a time.
    """
    for param, weights in by_parameter(table).items():
        whole = torch.zeros(param.shape, dtype=masters.dtype, device=param.device)
        for weight in weights:
            weight.cut.write(whole, value_of(weight).to(whole))
        masters.write(param, whole)


class Reader:
    """A reader of this rank's boxes in one dtype.

    Parameters that the model computes with are read directly, and spread masters are gathered.
    """

    def __init__(self, masters: Masters, dtype: torch.dtype) -> None:
        self.masters = masters
        self.dtype = dtype
        # The parameter read last: the weights that are fused in it are read one after the other.
        self._last: tuple[nn.Parameter, Tensor] | None = None

    def gathers(self, param: nn.Parameter) -> bool:
        """Return True if all ranks that hold the parameter must read it together."""
        return self.masters.spread and param.dtype not in (self.dtype, self.masters.dtype)

    def read(self, weight: Weight) -> Tensor:
        """Return this rank's box of a weight, an empty tensor where the rank has none."""
        if (param := weight.param) is None:
            return torch.empty(weight.box.shape, dtype=self.dtype)
        # A parameter is its rounded master, so its own dtype needs nothing from other ranks.
        if param.dtype == self.dtype:
            return weight.part_of(param.detach())
        if self._last is None or self._last[0] is not param:
            self._last = (param, self.masters.read(param))
        return weight.part_of(self._last[1]).to(self.dtype)

    def forget(self) -> None:
        """Drop the parameter read last.

        Ranks read different experts, so each keeps a different parameter. Then some ranks would
        gather the next parameter and others would not.
        """
        self._last = None

    def read_together(self, table: Sequence[Weight]) -> dict[str, Tensor]:
        """Return the boxes of this rank that must be gathered, by name.

        Of several ranks with the same box one keeps it.
        """
        gathered: dict[str, Tensor] = {}
        for weight in table:
            if weight.param is not None and self.gathers(weight.param):
                value = self.read(weight)
                if weight.box.replica == 0:
                    # A view would keep the whole parameter.
                    gathered[weight.name] = value.clone()
        self.forget()
        return gathered


def fill(
    table: Sequence[Weight], masters: Masters, files: WeightFiles | None, seed: int, std: float
) -> None:
    """Fill this rank's boxes from ``files``, and weights that these lack from the seed.

    A value head may be absent; without ``files`` all weights are drawn.
    """

    def value_of(weight: Weight) -> Tensor:
        if files is not None and weight.name in files:
            return files.read(weight.name, weight.box.slices)
        if files is not None:
            log.warning(
                "%s is not in the folder: it is initialized from seed %d", weight.name, seed
            )
        return random_weight(weight.name, weight.box, seed=seed, std=std)

    put(table, masters, value_of)
