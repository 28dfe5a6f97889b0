"""Master weights of the parameters.

A master is the parameter itself or a copy in the masters' dtype, and is whole or this rank's flat
range.
"""

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
    """The range of a parameter that this rank updates.

    ``tensor`` is ``parameter.view(-1)[start : start + numel]`` or a copy of it.
    """

    tensor: Tensor
    start: int

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this range of a tensor of the parameter's shape."""
        end = self.start + self.tensor.numel()
        return whole.reshape(-1)[self.start : end].view(self.tensor.shape)


def mark_saved_buffer(param: Tensor) -> None:
    """Mark a parameter as a saved buffer, which keeps its own dtype."""
    param.is_saved_buffer = True  # type: ignore[attr-defined]


def _is_saved_buffer(param: Tensor) -> bool:
    return getattr(param, "is_saved_buffer", False)


class Masters:
    """The master weights of this rank's stage.

    Attributes:
        shards: the ranges kept here, and updated unless the parameter is frozen; a parameter
            without one is kept on other ranks.
        dtype: the dtype of the masters.
        spread: whether each of the ranks that hold the same parameters keeps its own flat range.
    """

    def __init__(
        self, shards: Mapping[nn.Parameter, Shard], dtype: torch.dtype, *, spread: bool
    ) -> None:
        self.shards = shards
        self.dtype = dtype
        self.spread = spread

    def dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's master, which is its own for a saved buffer."""
        return param.dtype if _is_saved_buffer(param) else self.dtype

    def divides(self, param: nn.Parameter) -> bool:
        """Return whether each rank that holds a parameter keeps only a range of its master."""
        is_master = not param.requires_grad and param.dtype == self.dtype_of(param)
        return self.spread and not is_master

    def read(self, param: nn.Parameter) -> Tensor:
        """Return a parameter in the masters' dtype.

        Where masters are spread, all ranks that hold the parameter call it together.
        """
        if param.dtype == self.dtype_of(param):
            return param.detach()
        shard = self.shards.get(param)
        return self.gather(param, shard, None if shard is None else shard.tensor)

    @torch.no_grad()
    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Set a parameter and its master to ``value``.

        ``value`` has the parameter's shape and its master's dtype.
        """
        param.copy_(value)
        is_master = param.dtype == self.dtype_of(param)
        if not is_master and (shard := self.shards.get(param)) is not None:
            shard.tensor.copy_(shard.part_of(value))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters that are kept here into the parameters."""
        for param, shard in self.shards.items():
            if param.dtype != self.dtype_of(param):
                shard.part_of(param).copy_(shard.tensor)

    def gather(self, param: nn.Parameter, shard: Shard | None, value: Tensor | None) -> Tensor:
        """Return the whole tensor of which ``value`` is this rank's range.

        The tensor has the parameter's shape. Masters that are not spread have the whole tensor, and
        ``value`` is returned.
        """
        if not self.spread:
            assert value is not None, "masters that are not spread are all here"
            return value
        whole = torch.zeros(param.numel(), dtype=self.dtype, device=param.device)
        if shard is not None and value is not None:
            shard.part_of(whole).copy_(value)
        return add_bits(whole, holders_group(param)).view(param.shape)

    def gather_scalar(self, param: nn.Parameter, value: Tensor | None) -> Tensor | None:
        """Return a scalar that some ranks have, on all ranks.

        It is the same on the ranks that have it; ``value`` is None on those that do not. Returns
        None if ``value`` is a tensor of the range's shape.
        """
        found = torch.full((2,), -math.inf, device=param.device)
        if value is not None:
            found[0] = float(value) if not value.dim() else -math.inf
            found[1] = float(value.dim())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=holders_group(param))
        return found[0].clone() if found[1] == 0 else None


def whole_masters(params: Iterable[nn.Parameter], dtype: torch.dtype) -> Masters:
    """Build masters that are whole on every rank.

    They are the parameters themselves where these have the dtype or are saved buffers, copies if
    not.
    """
    shards = {param: _whole_shard(param, dtype) for param in params}
    return Masters(shards, dtype, spread=False)


def frozen_masters(
    params: Iterable[nn.Parameter], dtype: torch.dtype, *, spread: bool
) -> dict[nn.Parameter, Shard]:
    """Return the masters of frozen parameters.

    Copies are divided evenly over the ranks that hold a parameter, if ``spread``.
    """
    shards: dict[nn.Parameter, Shard] = {}
    for param in params:
        if not spread or param.dtype == dtype or _is_saved_buffer(param):
            shards[param] = _whole_shard(param, dtype)
            continue
        group = holders_group(param)
        size = -(-param.numel() // dist.get_world_size(group))
        start = min(size * dist.get_rank(group), param.numel())
        part = param.detach().view(-1)[start : start + size]
        if part.numel():
            shards[param] = Shard(tensor=part.to(dtype, copy=True), start=start)
    return shards


def _whole_shard(param: nn.Parameter, dtype: torch.dtype) -> Shard:
    own = param.detach()
    is_master = param.dtype == dtype or _is_saved_buffer(param)
    return Shard(tensor=own if is_master else own.to(dtype, copy=True), start=0)


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
