"""Low-rank adapters on Megatron's linear layers (Hu et al. 2021, arXiv:2106.09685).

An adapter is on a saved matrix, not on the parameter that Megatron fuses it into, and has PEFT's
names. It is divided as its matrix is: with outputs over ranks B is, with inputs over ranks A is.
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_megatron.families import Cut, Rule, Saved, Split, cuts, rules_of
from engine_megatron.shape import Shape

log = logging.getLogger("engine_megatron")

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
"""Prefix that PEFT gives the names of a model's modules."""


def is_target(module: str, lora: LoraConfig) -> bool:
    """Return whether ``lora.target_modules`` names a module, as PEFT reads it."""
    targets = lora.target_modules
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def check_targets(shape: Shape, lora: LoraConfig) -> None:
    """Raise ``ConfigError`` for target modules that are none of the model's linear layers."""
    targets = lora.target_modules
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ConfigError(
                "lora.target_modules",
                f"{targets!r} is no regular expression",
                why=str(error),
                remedy=f"correct it, or give a list of names or {ALL_LINEAR}",
            ) from error
    linear: list[str] = []
    others: list[str] = []
    experts: list[str] = []
    for _, rule in rules_of(shape):
        for saved in rule.saved:
            name = module_of(saved.name)
            of_expert = rule.expert is not None or rule.stacked
            kind = linear if rule.linear else experts if of_expert else others
            if is_target(name, lora):
                kind.append(name)
    remedy = f"name linear layers of attention and of MLPs, or {ALL_LINEAR}"
    if others and targets != ALL_LINEAR:
        raise ConfigError(
            "lora.target_modules",
            f"{others[0]} cannot carry an adapter",
            why="it is not a linear layer inside the blocks",
            remedy=remedy,
        )
    if not linear:
        why = ""
        if experts:
            why = f"{experts[0]} is an expert's matrix, and all experts are one module in PEFT"
        raise ConfigError(
            "lora.target_modules",
            f"{targets!r} matches no layer of the model",
            why=why,
            remedy=remedy,
        )
    if experts and targets != ALL_LINEAR:
        log.warning(
            "lora.target_modules: experts get no adapter (%s and %d more)",
            experts[0],
            len(experts) - 1,
        )


def module_of(name: str) -> str:
    """Return the module of a saved tensor, or the one that an adapter's matrix is for."""
    for end in (".weight", ".bias", ".lora_A", ".lora_B"):
        name = name.removesuffix(end)
    return name.removeprefix(PREFIX)


def adapters_of(rule: Rule, lora: LoraConfig) -> Iterator[Rule]:
    """Yield the rules of the adapters on the saved matrices of a rule with whole names."""
    if not rule.linear:
        return
    for saved in rule.saved:
        module = module_of(saved.name)
        if not is_target(module, lora):
            continue
        outputs, inputs = saved.shape
        parts: tuple[tuple[str, tuple[int, int], Split], ...] = (
            ("A", (lora.rank, inputs), "columns" if rule.split == "columns" else "none"),
            ("B", (outputs, lora.rank), "rows" if rule.split == "rows" else "none"),
        )
        for part, size, split in parts:
            yield Rule(
                parameter=f"{_layer_of(rule)}.adapters.{_key(module)}.{part.lower()}",
                saved=(Saved(name=f"{PREFIX}{module}.lora_{part}.weight", shape=size),),
                split=split,
                adapter=True,
            )


def _layer_of(rule: Rule) -> str:
    """Return the name of Megatron's linear layer that has a rule's parameter."""
    return rule.parameter.removesuffix(".weight")


def _key(module: str) -> str:
    return module.rpartition(".")[2]


def draw(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the first values of a whole matrix with PEFT's name, in float32.

    A is uniform in ±1/sqrt(inputs), which is PEFT's default, and B is zero. The values are the same
    in every layout, and those of engine-fsdp.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(*shape)
    own = name.removeprefix(PREFIX).replace(".lora_A.", ".lora_A.default.")
    generator = torch.Generator().manual_seed(seed + zlib.crc32(own.encode()))
    return (torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The division of a linear layer over tensor-parallel ranks."""

    split: Split
    """Dimension of the layer's matrix that is divided."""

    ranks: int
    """Number of tensor-parallel ranks."""

    by_tokens: bool
    """True if sequence parallelism divides the tokens outside of a divided layer."""


class LowRank(nn.Module):
    """An adapter ``alpha / rank · B A`` on one saved matrix, whose inputs may be dropped."""

    def __init__(
        self, inputs: int, outputs: int, lora: LoraConfig, config: Any, division: Division
    ) -> None:
        """Make this rank's part, of ``inputs`` and ``outputs`` of the layer on this rank."""
        super().__init__()
        device = None if config.use_cpu_initialization else torch.accelerator.current_device_index()
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.a = nn.Parameter(torch.empty(lora.rank, inputs, **kind))
        self.b = nn.Parameter(torch.empty(outputs, lora.rank, **kind))
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout
        self.division = division
        # Megatron adds up the gradients of marked parameters over the tensor-parallel ranks: of
        # those that are whole, and see this rank's tokens alone.
        split = division.split
        self.a.sequence_parallel = division.by_tokens and split != "columns"  # type: ignore[attr-defined]
        self.b.sequence_parallel = division.by_tokens and split != "rows"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapter adds to the layer's outputs ``[…, outputs]`` on this rank."""
        low = F.linear(F.dropout(x, self.dropout, self.training), self.a)
        return F.linear(self._exchange(low), self.b) * self.scale

    def _exchange(self, low: Tensor) -> Tensor:
        """Make ``low`` whole, with the tokens that the layer's outputs have on this rank."""
        division = self.division
        if division.ranks == 1 or division.split == "none":
            return low
        if division.split == "rows":
            if division.by_tokens:
                return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(low)
        if division.by_tokens:
            return reduce_scatter_to_sequence_parallel_region(low)
        return reduce_from_tensor_model_parallel_region(low)


class Adapters(nn.ModuleDict):
    """The adapters of one of Megatron's linear layers, by the last name of the saved matrix."""

    def __init__(self, adapters: Mapping[str, LowRank], cuts_of: Mapping[str, Cut]) -> None:
        """Keep ``adapters``, of some of the saved matrices that ``cuts_of`` names in order."""
        super().__init__(adapters)
        self.cuts = cuts_of
        self.is_on = True

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the layer's outputs ``out`` of inputs ``x`` with what the adapters add."""
        if not self.is_on:
            return out
        parts: list[Tensor] = []
        for name, cut in self.cuts.items():
            unit = cut.unit or out.shape[-1] // cut.slots
            groups = out.shape[-1] // (unit * cut.slots)
            size = (*out.shape[:-1], groups, cut.count * unit)
            part = self[name](x) if name in self else out.new_zeros(1).expand(size)
            parts.append(part.view(size))
        return out + torch.cat(parts, dim=-1).view(out.shape)


def add_adapters(
    layers: Mapping[int, nn.Module], shape: Shape, lora: LoraConfig, config: Any
) -> None:
    """Put adapters on a chunk's ``layers``, which are given by their number in the model."""
    division: dict[Split, Division] = {
        split: Division(
            split=split,
            ranks=config.tensor_model_parallel_size,
            by_tokens=config.sequence_parallel,
        )
        for split in _SPLITS
    }
    for number, rule in rules_of(shape):
        if number is not None and number in layers and any(True for _ in adapters_of(rule, lora)):
            layer = layers[number].get_submodule(_layer_of(rule))
            _adapt(layer, rule, shape, lora, config, division[rule.split])


_SPLITS: tuple[Literal["none", "rows", "columns"], ...] = ("none", "rows", "columns")


def _adapt(
    layer: Any, rule: Rule, shape: Shape, lora: LoraConfig, config: Any, division: Division
) -> None:
    by_key = dict(zip((_key(module_of(one.name)) for one in rule.saved), rule.saved, strict=True))
    ranks = division.ranks if division.split == "rows" else 1
    adapters = {
        key: LowRank(layer.weight.shape[1], saved.shape[0] // ranks, lora, config, division)
        for key, saved in by_key.items()
        if is_target(module_of(saved.name), lora)
    }
    own = Adapters(adapters, dict(zip(by_key, cuts(rule, shape), strict=True)))
    layer.adapters = own

    def add(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> Any:
        out, bias = outputs
        return own.add(inputs[0], out), bias

    # Before the layer's own hooks: they are about its outputs with the adapters.
    layer.register_forward_hook(add, prepend=True)


def freeze_base(model: nn.Module) -> None:
    """Freeze all parameters of a chunk but adapters and a value head."""
    for name, param in model.named_parameters():
        param.requires_grad_(".adapters." in name or name.startswith("score."))


def require_embedding_gradient(embedding: nn.Module) -> None:
    """Let a frozen embedding's outputs require a gradient, without which none is recomputed.

    Megatron's recomputation takes part in a backward pass only if an input of its layers does.
    """

    def require(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not out.requires_grad:
            out.requires_grad_()
        return out

    embedding.register_forward_hook(require)


@contextmanager
def disabled(chunks: nn.Module) -> Iterator[None]:
    """Turn the adapters off inside the block, which makes the model its own reference."""
    all_of = [module for module in chunks.modules() if isinstance(module, Adapters)]
    for adapters in all_of:
        adapters.is_on = False
    try:
        yield
    finally:
        for adapters in all_of:
            adapters.is_on = True
