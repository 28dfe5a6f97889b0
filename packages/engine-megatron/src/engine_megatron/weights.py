"""Every weight of the model, this rank's box of it, and reading from a Hugging Face folder."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_api.hf_folder import WeightFiles
from engine_api.optimizers import TrainedWeight
from engine_api.weights import ShardSpec, random_weight
from engine_megatron.families import EMBEDDING, HEAD, Cut, Rule, Split, cuts, rules_of
from engine_megatron.lora import adapters_of, draw, module_of
from engine_megatron.masters import Masters, mark_saved_buffer
from engine_megatron.parallel import Layout, Place
from engine_megatron.shape import Shape

log = logging.getLogger("engine_megatron")

_DIMENSION: dict[Split, int | None] = {"none": None, "rows": 0, "columns": 1}


@dataclass(kw_only=True, eq=False)
class Weight:
    """One saved tensor of the whole model, and this rank's part of it.

    Attributes:
        dim: the dimension that is split over ranks; None if none is. They are tensor-parallel
            ranks, or for a stack expert-parallel ones.
        per_rank: size in the split dimension on each of these ranks, padding of the vocabulary
            included.
        parameters: pipeline stage → number of the model chunk and Megatron's parameter names there:
            one, or for a stack one for each expert of a rank.
        owner: the expert-parallel rank that holds the expert; None for weights of no expert and for
            stacks, which all of them hold.
        is_stack: True if the tensor has all experts along its first dimension.
        frozen: True for a saved buffer, which is never trained and has its own dtype.
        adapter: True for a part of an adapter, which has PEFT's name.
        params: the parameters on this rank, empty on ranks without a part of the weight.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    per_rank: int
    parameters: Mapping[int, tuple[str, ...]]
    cut: Cut
    box: ShardSpec
    dtype: torch.dtype
    owner: int | None = None
    is_stack: bool = False
    frozen: bool = False
    adapter: bool = False
    params: tuple[nn.Parameter, ...] = ()

    @property
    def key(self) -> str:
        """The canonical key of a checkpoint."""
        return f"{'adapter' if self.adapter else 'model'}.{self.name}"

    @property
    def is_of_experts(self) -> bool:
        """True for a weight of an expert or of a stack of them."""
        return self.is_stack or self.owner is not None

    def part_of(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return this rank's box of tensors of the parameters' shapes.

        The result is live memory where one tensor holds the box contiguously.
        """
        if not self.is_stack:
            return self.cut.read(parameters[0], self.box.shape)
        shape = self.box.shape[1:]
        return torch.stack([self.cut.read(parameter, shape) for parameter in parameters])

    def at(self, place: Place) -> int | None:
        """Return the number of the part that the rank at ``place`` holds, or None if it has none.

        Parts are counted in the split dimension.
        """
        if place.stage not in self.parameters or self.owner not in (None, place.expert):
            return None
        if self.is_stack:
            return place.expert
        if self.dim is None:
            return 0
        return place.tensor if self.owner is None else place.expert_tensor

    def span(self, part: int) -> tuple[int, int]:
        """Return the start and size of a part in the split dimension."""
        assert self.dim is not None
        start = min(part * self.per_rank, self.shape[self.dim])
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A weight in a parameter, and the expert's number on this rank if the weight is a stack."""

    weight: Weight
    expert: int | None = None

    def read(self, parameter: Tensor) -> Tensor:
        """Return the part of this rank's box that a tensor of the parameter's shape holds."""
        shape = self.weight.box.shape
        return self.weight.cut.read(parameter, shape if self.expert is None else shape[1:])

    def of(self, box: Tensor) -> Tensor:
        """Return the part of this rank's box that the parameter holds."""
        return box if self.expert is None else box[self.expert]

    @property
    def box(self) -> ShardSpec:
        """The part of the whole tensor that the parameter holds."""
        box = self.weight.box
        if self.expert is None:
            return box
        offset = (box.offset[0] + self.expert, *box.offset[1:])
        return replace(box, offset=offset, shape=(1, *box.shape[1:]))


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
    mixture = shape.mixture
    split = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    if mixture is None or not all(mixture.sparse):
        split["intermediate size"] = shape.intermediate
    if mixture is not None and mixture.shared:
        split["shared expert's intermediate size"] = mixture.shared
    if mixture is not None and mixture.biased and layout.expert_tensor > 1:
        raise ConfigError(
            "options.expert_tensor_parallel",
            f"{layout.expert_tensor}, but the experts have biases",
            why="each rank that splits an expert would add them",
            remedy="set it to 1",
        )
    sizes = {
        "parallelism.tp": (layout.tensor, split),
        "parallelism.pp": (layout.stages, {"layers": shape.layers}),
        "options.virtual_stages": (
            layout.virtual,
            {"layers of a stage": shape.layers // layout.stages},
        ),
        "parallelism.ep": (layout.experts, {"experts": shape.experts}),
        "options.expert_tensor_parallel": (
            layout.expert_tensor,
            {"experts' intermediate size": mixture.intermediate if mixture else 0},
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


def weight_table(
    shape: Shape,
    layout: Layout,
    multiple: int,
    dtype: torch.dtype,
    lora: LoraConfig | None = None,
) -> list[Weight]:
    """Return every weight in the model's order, tied weights once, without parameters yet.

    A matrix is followed by its adapter. ``dtype`` is that of the masters.
    """
    vocabulary = padded_vocabulary(shape, layout, multiple)
    places = [layout.place(rank) for rank in range(layout.world)]
    table: list[Weight] = []
    for layer, rule in _all_rules(shape, lora):
        stages = _stages(layer, rule, shape, layout)
        for saved, cut in zip(rule.saved, cuts(rule, shape), strict=True):
            dim = _DIMENSION[rule.split]
            is_padded = layer is None and saved.shape[0] == shape.vocab_size
            rows = vocabulary if is_padded else saved.shape[dim or 0]
            ranks = layout.tensor
            owner: int | None = None
            if rule.expert is not None:
                ranks = layout.expert_tensor
                owner = rule.expert // (shape.experts // layout.experts)
            if rule.stacked:
                dim, ranks = 0, layout.experts
            weight = Weight(
                name=saved.name,
                shape=saved.shape,
                dim=dim,
                per_rank=rows // ranks,
                parameters=stages,
                cut=cut,
                owner=owner,
                is_stack=rule.stacked,
                frozen=rule.frozen,
                adapter=rule.adapter,
                box=ShardSpec.nothing(saved.shape),
                dtype=torch.float32 if rule.frozen else dtype,
            )
            table.append(replace(weight, box=_own_box(weight, places, layout.rank)))
    return table


def _all_rules(shape: Shape, lora: LoraConfig | None) -> Iterator[tuple[int | None, Rule]]:
    for layer, rule in rules_of(shape):
        yield layer, rule
        if lora is not None:
            yield from ((layer, own) for own in adapters_of(rule, lora))


def check_stages(table: Sequence[Weight], layout: Layout) -> None:
    """Raise ``ConfigError`` if a part of the model would have nothing to train.

    That is a chunk of a pipeline's stage without an adapter and without a value head.
    """
    trained = {
        (stage, name.partition(".")[0])
        for weight in table
        if weight.adapter or weight.name.startswith("score.")
        for stage, names in weight.parameters.items()
        for name in names
    }
    for stage in range(layout.stages):
        for chunk in range(layout.virtual):
            if (stage, str(chunk)) not in trained:
                part = f", chunk {chunk}," if layout.virtual > 1 else ""
                raise ConfigError(
                    "lora.target_modules",
                    f"no layer of pipeline stage {stage}{part} carries an adapter",
                    why="each of its ranks must have a weight to train in each chunk",
                    remedy="name layers in every stage, or use fewer stages",
                )


def _stages(
    layer: int | None, rule: Rule, shape: Shape, layout: Layout
) -> dict[int, tuple[str, ...]]:
    """Return Megatron's names of a rule's parameters on each pipeline stage that has them."""
    last = layout.stages - 1
    head = layout.virtual - 1
    if layer is not None:
        part, local = divmod(layer, shape.layers // (layout.stages * layout.virtual))
        chunk, stage = divmod(part, layout.stages)
        own = shape.experts // layout.experts
        names = [rule.parameter]
        if rule.expert is not None:
            names = [rule.parameter.replace("N", str(rule.expert % own))]
        elif rule.stacked:
            names = [rule.parameter.replace("N", str(expert)) for expert in range(own)]
        return {stage: tuple(f"{chunk}.decoder.layers.{local}.{name}" for name in names)}
    if rule.parameter == EMBEDDING:
        stages = {0: (f"0.{EMBEDDING}",)}
        if shape.tied and last:
            stages[last] = (f"{head}.{HEAD}",)
        return stages
    return {last: (f"{head}.{rule.parameter}",)}


def _own_box(weight: Weight, places: Sequence[Place], own: int) -> ShardSpec:
    """Return the box of rank ``own``, with its replica number.

    Replica 0 is a different rank for different weights, so that all ranks with the same box write.
    """
    parts = [weight.at(place) for place in places]
    copies = [rank for rank, part in enumerate(parts) if part == parts[own]]
    replica = (copies.index(own) + zlib.crc32(weight.name.encode())) % len(copies)
    return replace(weight.box_of(places[own]), replica=replica)


def attach(table: Sequence[Weight], chunks: nn.Module, layout: Layout) -> None:
    """Set the parameters of each weight that this rank holds.

    ``chunks`` holds the model's chunks under their numbers. Raises ``ConfigError`` for a hole in
    the mapping: a parameter that no weight fills, or a weight without a parameter.
    """
    params = dict(chunks.named_parameters())
    stage = layout.here.stage
    held = [weight for weight in table if weight.at(layout.here) is not None]
    wanted = {name for weight in held for name in weight.parameters[stage]}
    if holes := sorted(wanted ^ set(params)):
        raise ConfigError(
            "model.path",
            f"the mapping and Megatron's model differ in {', '.join(holes[:3])}",
            why="engine_megatron.families has a hole",
            remedy="report the model family",
        )
    for weight in held:
        weight.params = tuple(params[name] for name in weight.parameters[stage])
        for param in weight.params:
            _mark(param, weight, layout)


def _mark(param: nn.Parameter, weight: Weight, layout: Layout) -> None:
    """Set Megatron's marks of a parameter.

    Megatron sets the first ones while it initializes weights, which it does not do here. Without
    them its gradient norm would count one rank's part alone.
    """
    if weight.frozen:
        mark_saved_buffer(param)
    is_split = weight.dim is not None and not weight.is_stack
    param.tensor_model_parallel = is_split  # type: ignore[attr-defined]
    param.partition_dim = weight.dim or 0  # type: ignore[attr-defined]
    param.partition_stride = 1  # type: ignore[attr-defined]
    # Megatron looks at ep alone, and would not add up whole experts' gradients over
    # tensor-parallel ranks.
    is_spread = weight.is_of_experts and layout.spreads_experts
    param.allreduce = not is_spread  # type: ignore[attr-defined]
    if weight.is_of_experts:
        # Experts get the tokens of all tensor-parallel ranks. Megatron marks their biases, and
        # would add up gradients that are whole.
        param.sequence_parallel = False  # type: ignore[attr-defined]


def by_parameter(table: Sequence[Weight]) -> dict[nn.Parameter, list[Use]]:
    """Return this rank's parameters and the weights in each."""
    result: dict[nn.Parameter, list[Use]] = {}
    for weight in table:
        for number, param in enumerate(weight.params):
            use = Use(weight=weight, expert=number if weight.is_stack else None)
            result.setdefault(param, []).append(use)
    return result


def describer_of(table: Sequence[Weight]) -> Callable[[nn.Parameter, Tensor], TrainedWeight]:
    """Return a function that describes a parameter, and its updated tensor, to an optimizer.

    Weights in one parameter are alike: all matrices, all biases or all norms.
    """
    uses = by_parameter(table)

    def describe(param: nn.Parameter, tensor: Tensor) -> TrainedWeight:
        weight = uses[param][0].weight
        return TrainedWeight(tensor=tensor, name=weight.name, dims=len(weight.shape))

    return describe


def put(table: Sequence[Weight], masters: Masters, value_of: Callable[[Use], Tensor]) -> None:
    """Write this rank's weights, masters included.

    ``value_of`` returns a weight's new values in a parameter. Those of one parameter exist at a
    time.
    """
    for param, uses in by_parameter(table).items():
        dtype = masters.dtype_of(param)
        whole = torch.zeros(param.shape, dtype=dtype, device=param.device)
        for use in uses:
            use.weight.cut.write(whole, value_of(use).to(whole))
        masters.write(param, whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """The adapter ``scale · B A`` on a matrix."""

    a: Weight
    b: Weight
    scale: float


def merges_of(table: Sequence[Weight], lora: LoraConfig) -> dict[str, Merge]:
    """Return the adapter of each matrix that has one, by the matrix's name."""
    adapters = {weight.name: weight for weight in table if weight.adapter}
    scale = lora.alpha / lora.rank
    return {
        f"{module_of(name)}.weight": Merge(
            a=weight, b=adapters[name.replace(".lora_A.", ".lora_B.")], scale=scale
        )
        for name, weight in adapters.items()
        if ".lora_A." in name
    }


class Reader:
    """A reader of this rank's boxes in one dtype.

    Parameters that the model computes with are read directly, and spread masters are gathered. A
    matrix with an adapter is read as the sum of both, formed from the masters in float32.
    """

    def __init__(
        self,
        masters: Masters,
        dtype: torch.dtype | None = None,
        merges: Mapping[str, Merge] | None = None,
    ) -> None:
        """Read in ``dtype``, or if it is None in the dtype that each weight is kept in.

        ``merges`` are the adapters to merge, by the name of the matrix.
        """
        self.masters = masters
        self._dtype = dtype
        self._merges = merges or {}
        # The parameter read last: the weights that are fused in it are read one after the other.
        self._last: tuple[nn.Parameter, Tensor] | None = None

    def dtype_of(self, weight: Weight) -> torch.dtype:
        """Return the dtype that a weight is read in."""
        return self._dtype or weight.dtype

    def gathers(self, weight: Weight) -> bool:
        """Return True if all ranks that hold the weight must read it together."""
        if weight.frozen or not self.masters.spread:
            return False
        known = [self.masters.dtype]
        if weight.name not in self._merges:
            known.append(self.dtype_of(weight))
        return any(param.dtype not in known for param in weight.params)

    def read(self, weight: Weight) -> Tensor:
        """Return this rank's box of a weight, an empty tensor where the rank has none."""
        dtype = self.dtype_of(weight)
        if not weight.params:
            return torch.empty(weight.box.shape, dtype=dtype)
        if (merge := self._merges.get(weight.name)) is not None:
            return self._merged(weight, merge).to(dtype)
        return weight.part_of([self._value(param, dtype) for param in weight.params]).to(dtype)

    def _merged(self, weight: Weight, merge: Merge) -> Tensor:
        """Return this rank's box of ``W + scale · B A`` in float32."""
        base = weight.part_of([self._value(param, self.masters.dtype) for param in weight.params])
        # The matrix stays the parameter read last: others are fused with it.
        a, b = (part.part_of([self.masters.read(part.params[0])]) for part in (merge.a, merge.b))
        return base.float() + merge.scale * (b.float() @ a.float())

    def _value(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        # A parameter is its rounded master, so its own dtype needs nothing from other ranks.
        if param.dtype in (dtype, self.masters.dtype_of(param)):
            return param.detach()
        if self._last is None or self._last[0] is not param:
            self._last = (param, self.masters.read(param))
        return self._last[1]

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
            if weight.params and self.gathers(weight):
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

    def value_of(use: Use) -> Tensor:
        name = use.weight.name
        if use.weight.adapter:
            value = draw(name, use.weight.shape, seed)[use.box.slices]
        elif files is not None and name in files:
            value = files.read(name, use.box.slices)
        else:
            if files is not None:
                log.warning("%s is not in the folder: it is initialized from seed %d", name, seed)
            value = random_weight(name, use.box, seed=seed, std=std)
        return value if use.expert is None else value[0]

    put(table, masters, value_of)
