"""What each parameter is trained in: itself, or a copy in the masters' dtype, whole or this rank's flat range of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_api.config import Precision
from engine_api.errors import ConfigError
from engine_megatron.parallel import add_bits, holders_group


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What is updated of a parameter on this rank: ``parameter.view(-1)[start : start + numel]``, or a copy of that."""

    tensor: Tensor
    start: int

    def part_of(self, whole: Tensor) -> Tensor:
        """This range of something of the parameter's shape."""
        return whole.reshape(-1)[self.start : self.start + self.tensor.numel()].view(
            self.tensor.shape
        )


class Masters:
    """The master weights of this rank's stage.

    Attributes:
        shards: what is updated here; a parameter without any is updated on other ranks.
        spread: whether the ranks that hold the same parameters update flat ranges of them, each its own.
    """

    def __init__(
        self, shards: Mapping[nn.Parameter, Shard], dtype: torch.dtype, *, spread: bool
    ) -> None:
        self.shards, self.dtype, self.spread = shards, dtype, spread

    def read(self, param: nn.Parameter) -> Tensor:
        """A parameter in the masters' dtype; where they are spread, all ranks that hold it together."""
        if param.dtype == self.dtype:
            return param.detach()
        shard = self.shards.get(param)
        return self.gather(param, shard, None if shard is None else shard.tensor)

    @torch.no_grad()
    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Set a parameter and its master to ``value``, of the parameter's shape and the masters' dtype."""
        param.copy_(value)
        if param.dtype != self.dtype and (shard := self.shards.get(param)) is not None:
            shard.tensor.copy_(shard.part_of(value))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters, as far as they are updated here."""
        for param, shard in self.shards.items():
            if param.dtype != self.dtype:
                shard.part_of(param).copy_(shard.tensor)

    def gather(self, param: nn.Parameter, shard: Shard | None, value: Tensor | None) -> Tensor:
        """From this rank's range of something of the parameter's shape to the whole, if it is spread."""
        if not self.spread:
            assert value is not None, "masters that are not spread are all here"
            return value
        whole = torch.zeros(param.numel(), dtype=self.dtype, device=param.device)
        if shard is not None and value is not None:
            shard.part_of(whole).copy_(value)
        return add_bits(whole, holders_group(param)).view(param.shape)

    def gather_scalar(self, param: nn.Parameter, value: Tensor | None) -> Tensor | None:
        """A scalar that is the same wherever it is, on all ranks; None if ``value`` is a tensor of the range's shape."""
        found = torch.full((2,), -math.inf, device=param.device)
        if value is not None:
            found[0] = float(value) if not value.dim() else -math.inf
            found[1] = float(value.dim())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=holders_group(param))
        return found[0].clone() if found[1] == 0 else None


def whole_masters(params: Iterable[nn.Parameter], dtype: torch.dtype) -> Masters:
    """Masters that are whole on every rank: the parameters themselves, where they have the dtype."""
    shards = {
        param: Shard(
            tensor=param.detach() if param.dtype == dtype else param.detach().to(dtype, copy=True),
            start=0,
        )
        for param in params
    }
    return Masters(shards, dtype, spread=False)


def check_precision(precision: Precision) -> None:
    """Raise ``ConfigError`` for dtypes that Megatron's buffers and optimizers do not combine."""
    if precision.reduce != "float32":
        raise ConfigError(
            "precision.reduce",
            f"{precision.reduce} is not float32",
            why="Megatron's gradient buffers would add micro-batches up in it as well",
            remedy="leave it at float32",
        )
    if precision.compute == "float32" != precision.master:
        raise ConfigError(
            "precision.master",
            f"{precision.master}, but precision.compute is float32",
            why="Megatron computes with its parameters, and masters are no narrower than these",
            remedy=f"set precision.compute: {precision.master}, or precision.master: float32",
        )
