"""Expert parallelism of transformers' mixtures of experts: whole experts spread over ranks.

A rank holds some experts of each layer. Each token's row is sent to the ranks of its experts, and
their outputs are sent back, where they are weighted and added as transformers does it for experts
of one rank. The routing weights, and with them the gradient of the router, stay with the token.
Gradients of an expert are of all ranks' tokens and are sums already: nothing is multiplied or
divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine_api.errors import ConfigError, UnsupportedCapability

__all__ = ["are_experts", "spread_experts"]


def spread_experts(
    lm: nn.Module, mesh: DeviceMesh, *, knows: Callable[[Any], bool], engine: str
) -> list[nn.Module]:
    """Spread the experts of every layer over the ranks of a mesh, and return their modules.

    Their parameters become DTensors that are sharded in their first dimension, the experts'.

    Args:
        lm: a transformers model on any device, with all experts.
        mesh: mesh of one dimension.
        knows: function that says of a module whether the forward pass of its class takes tokens,
            their experts and their weights, reads its own parameters and ``num_experts``, and adds
            weighted outputs (``ModelClasses.knows_experts``).
        engine: name of the engine in errors.

    Raises:
        ConfigError: the model has no experts, or a number of them that the ranks do not divide.
        UnsupportedCapability: the experts are computed in a way that is not known.
    """
    ranks = mesh.size()
    found = [module for name, module in lm.named_modules() if are_experts(name, module)]
    if not found:
        raise ConfigError(
            "parallelism.ep",
            f"expected 1 for a model without experts, got {ranks}",
            remedy="leave parallelism.ep out, or choose a mixture of experts",
        )
    for module in found:
        _check(module, ranks, knows, engine)
    for module in found:
        _spread(module, mesh)
    return found


def are_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module holds the weights of a layer's experts."""
    named = name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
    return named and any(True for _ in module.parameters())


def _check(module: Any, ranks: int, knows: Callable[[Any], bool], engine: str) -> None:
    """Raise an error for experts that cannot be spread over a number of ranks."""
    own = list(module.parameters(recurse=False))
    whole = len(own) == len(list(module.parameters()))
    if not knows(module) or not whole or any(len(one) != module.num_experts for one in own):
        raise UnsupportedCapability(
            "ep",
            where=f"{engine} with {type(module).__name__}",
            why="the family computes its experts in code of its own",
            remedy="set parallelism.ep: 1",
        )
    if module.num_experts % ranks:
        raise ConfigError(
            "parallelism.ep",
            f"num_experts {module.num_experts} cannot be divided over {ranks} ranks",
            remedy="choose a divisor of it",
        )


def _spread(module: Any, mesh: DeviceMesh) -> None:
    """Leave a module this rank's experts, and let it exchange tokens with the other ranks."""
    count = module.num_experts // mesh.size()
    rank = mesh.get_local_rank()
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach()[rank * count : (rank + 1) * count].clone()
        whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        spread = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        module.register_parameter(name, spread)
    # An instance's own forward, because FSDP replaces the classes of modules.
    module.forward = _exchanging(module, count, mesh.get_group())


class _LocalExperts:
    """This rank's experts, as the forward pass of their class sees a module of all experts."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self._module = module
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def _exchanging(module: nn.Module, count: int, group: Any) -> Callable[..., Tensor]:
    """Return the forward pass of experts of which ``count`` are on each rank of a group."""
    compute: Any = type(module).forward
    local = _LocalExperts(module, count)
    ranks = dist.get_world_size(group)

    def forward(hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums ``[N, d]`` of the experts' outputs.

        Args:
            hidden: inputs ``[N, d]``.
            experts: numbers of each token's experts ``[N, k]``. A number beyond the last expert
                selects none.
            weights: their weights ``[N, k]``.
        """
        # By expert, which is also by rank; tokens of one expert keep their order.
        ordered, order = experts.flatten().sort(stable=True)
        bounds = torch.arange(ranks * count + 1, dtype=ordered.dtype, device=ordered.device)
        sent = torch.searchsorted(ordered, bounds).diff()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        by_rank = torch.stack([sent, received]).unflatten(1, (ranks, count)).sum(-1)
        sends, receives = by_rank.tolist()
        order = order[: sum(sends)]
        rows = _exchange(hidden[order // experts.shape[1]], receives, sends, group)
        outputs = _compute(compute, local, rows, received.view(ranks, count))
        outputs = _exchange(outputs, sends, receives, group)
        pairs = outputs.new_zeros(len(ordered), hidden.shape[1]).index_copy(0, order, outputs)
        weighted = pairs.unflatten(0, experts.shape) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)

    # The number of rows that a rank gets is known in the middle of the pass.
    uncompiled: Any = torch.compiler.disable(forward)
    return uncompiled


def _compute(compute: Any, local: _LocalExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the outputs of rows ``[R, d]``, without the routing weights.

    ``counts`` ``[ranks, experts]`` are the numbers of rows of each rank for each expert, in their
    order. Without any row, one of zeros is computed, so that the weights have a gradient.
    """
    numbers = torch.arange(counts.shape[1], device=rows.device).repeat(counts.shape[0])
    numbers = numbers.repeat_interleave(counts.flatten(), output_size=len(rows))
    count = len(rows)
    if not count:
        rows = F.pad(rows, (0, 0, 0, 1))
        numbers = F.pad(numbers, (0, 1))
    weights = rows.new_ones(len(rows), 1)
    outputs: Tensor = compute(local, rows, numbers.unsqueeze(-1), weights)
    return outputs[:count]


class _Exchange(torch.autograd.Function):
    """The exchange of rows between ranks, whose gradient is the exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: Any
    ) -> Tensor:
        ctx.receives = receives
        ctx.sends = sends
        ctx.group = group
        return _all_to_all(rows, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.sends, ctx.receives, ctx.group), None, None, None


def _all_to_all(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: Any) -> Tensor:
    """Return the rows that the ranks of a group send here (see ``_exchange``)."""
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receives), list(sends), group=group)
    return received


def _exchange(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: Any) -> Tensor:
    """Send rows ``[R, d]`` to the ranks of a group, in the order of the ranks, and return theirs.

    Args:
        rows: rows of this rank.
        receives: numbers of rows that each rank sends here.
        sends: numbers of rows that go to each rank.
        group: the ranks.
    """
    result: Tensor = _Exchange.apply(rows, receives, sends, group)  # type: ignore[no-untyped-call]
    return result
