"""``fully_shard`` over a mesh of data-parallel ranks, sizes of a mesh, and its groups' timeout."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from engine_api.config import EngineConfig, Parallelism
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_torch.fsdp_modules import sum_gradients
from engine_torch.model import DTYPES

__all__ = [
    "find_shard_size",
    "is_plain",
    "keeps_copies",
    "make_mesh",
    "set_timeouts",
    "shard_model",
]

_SHARE_OF_COPIES = 16
"""Divisor of the free memory that copies of the weights may take where nothing was asked."""


# Meshes by default group, device and sizes. DTensor keeps the first of several equal meshes in its
# caches, so a mesh's groups cannot be destroyed while the process goes on. Reused, they do not pile
# up with each engine.
_MESHES: dict[tuple[Any, ...], DeviceMesh] = {}


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with dimensions of these names and sizes.

    It is the same one at each call, for as long as the default process group lives.
    """
    key = (dist.group.WORLD, device_type, *sizes.items())
    # The meshes of a default group that has been destroyed are of no use.
    for stale in [one for one in _MESHES if one[0] is not dist.group.WORLD]:
        del _MESHES[stale]
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
    return _MESHES[key]


def find_shard_size(parallelism: Parallelism, world: int, *others: str) -> int:
    """Return the number of data-parallel ranks that share one copy of the weights.

    Args:
        parallelism: the sizes that were asked for.
        world: number of ranks.
        others: fields of ``parallelism`` that divide the ranks in addition, such as ``tp``.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks.
    """
    sizes = {name: getattr(parallelism, name) for name in ("dp_replicate", *others)}
    fixed = math.prod(sizes.values())
    dp_shard = parallelism.dp_shard
    if dp_shard == -1:
        dp_shard = world // fixed
    if dp_shard < 1 or dp_shard * fixed != world:
        asked = {"dp_replicate": parallelism.dp_replicate, "dp_shard": parallelism.dp_shard}
        product = " x ".join(f"{name} {size}" for name, size in (asked | sizes).items())
        raise ConfigError(
            "parallelism",
            f"{product} does not make a world of {world}",
            remedy="choose sizes whose product is the number of ranks, or dp_shard: -1",
        )
    return dp_shard


def is_plain(config: EngineConfig, world: int) -> bool:
    """Return whether there is nothing to shard, reduce or cast: one rank that uses one dtype.

    FSDP would still copy every weight and gradient through its buffers.
    """
    precision = config.precision
    one_dtype = precision.master == precision.compute == precision.reduce
    return world == 1 and one_dtype and not config.memory.offload_params


def keeps_copies(
    config: EngineConfig,
    world: int,
    module: nn.Module,
    device_type: str,
    cast: bool | None,
    *,
    gathers_float8: bool = False,
) -> bool:
    """Return whether one rank computes with copies of its weights (see ``engine_torch.copies``).

    Args:
        config: the engine's configuration.
        world: number of ranks.
        module: the model, before it takes memory on the device.
        device_type: type of the device.
        cast: the option ``cast_each_pass``.
        gathers_float8: True for weights that are gathered in FP8, which are made of the masters.

    Raises:
        ConfigError: ``cast_each_pass`` is false where weights are cast in each pass.
    """
    precision = config.precision
    if precision.compute == precision.master:
        return False
    reason = _reason_to_cast(config, world, gathers_float8=gathers_float8)
    if reason and cast is False:
        raise ConfigError(
            "options.cast_each_pass",
            f"expected true or null with {reason}, got false",
            why="weights are then cast in each pass, and no copy of them is kept",
            remedy="leave out options.cast_each_pass",
        )
    if reason or cast is not None:
        return not (reason or cast)
    size = DTYPES[precision.compute].itemsize
    need = sum(parameter.numel() * size for parameter in module.parameters())
    return need <= device_of(device_type).room()[1] // _SHARE_OF_COPIES


def _reason_to_cast(config: EngineConfig, world: int, *, gathers_float8: bool) -> str:
    """Return the setting that leaves no choice but casts in each pass, or an empty text."""
    precision = config.precision
    if world > 1:
        return f"{world} ranks"
    if config.memory.offload_params:
        return "memory.offload_params: true"
    if precision.reduce != precision.master:
        return f"precision.reduce: {precision.reduce} and precision.master: {precision.master}"
    return "weights that are gathered in FP8" if gathers_float8 else ""


def set_timeouts(groups: Iterable[Any], device_type: str, timeout_s: int) -> None:
    """Set the engine's timeout on process groups, of which some may be None.

    torch creates a mesh's groups with its own default timeout, not with that of the default group.
    """
    timeout = device_of(device_type).group_timeout(timedelta(seconds=timeout_s))
    # The public name came between torch 2.13 and 2.14.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # noqa: SLF001
    for group in groups:
        if group is not None:
            set_timeout(timeout, group)


def shard_model(
    root: nn.Module,
    blocks: list[nn.Module],
    config: EngineConfig,
    mesh: DeviceMesh,
    prefetch: int,
    *,
    parts: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
    exact: Collection[nn.Module] = (),
    tower: Sequence[nn.Module] = (),
) -> None:
    """Apply ``fully_shard`` to each block and the root, with gradients reduced as sums.

    Args:
        root: the module with everything, which becomes FSDP's root.
        blocks: the repeated blocks in their order.
        config: the engine's configuration, for dtypes and memory.
        mesh: the ranks to shard over, ``(shard,)``, or ``(replicate, shard)`` for HSDP.
        prefetch: number of blocks whose weights are gathered ahead.
        parts: modules inside the blocks that are sharded over a mesh of their own, with the mesh.
        exact: the parts that take their inputs as they are, such as routing weights in float32.
        tower: the blocks of a vision tower, which a forward pass without images leaves out. Their
            rotary positions stay float32.
    """
    dtypes: dict[str, Any] = {
        "param_dtype": DTYPES[config.precision.compute],
        "reduce_dtype": DTYPES[config.precision.reduce],
    }
    pins = device_of(mesh.device_type).pins_memory
    arguments: dict[str, Any] = {"offload_policy": _offload_policy(config, pins)}
    # The root's inputs are ids, and per-token values that must stay float32.
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    uncast = {*exact, *tower}
    own_meshes = {**parts, **dict.fromkeys([*blocks, *tower], mesh)}
    for module, own_mesh in own_meshes.items():
        fully_shard(
            module,
            mesh=own_mesh,
            mp_policy=policy if module in uncast else MixedPrecisionPolicy(**dtypes),
            reshard_after_forward=config.memory.reshard_after_forward,
            **arguments,
        )
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, **arguments)
    sum_gradients(root)
    _prefetch(blocks, prefetch, parts)
    # A chain of its own, because text alone must not gather the tower's weights.
    _prefetch(tower, prefetch, parts)


def _offload_policy(config: EngineConfig, pins: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=pins) if config.memory.offload_params else OffloadPolicy()


def _prefetch(blocks: Sequence[nn.Module], count: int, parts: Collection[nn.Module]) -> None:
    """Let FSDP gather ``count`` blocks ahead, in forward and in backward.

    ``parts`` are the modules inside of blocks that are gathered on their own. Those of a block
    itself are gathered ahead as well.
    """
    if not count:
        return
    own = [[one for one in block.modules() if one in parts] for block in blocks]
    chains = [[block, *inside] for block, inside in zip(blocks, own, strict=True)]
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        later = chains[index + 1 : index + 1 + count]
        earlier = chains[max(0, index - count) : index][::-1]
        block.set_modules_to_forward_prefetch([*own[index], *chain.from_iterable(later)])  # type: ignore[list-item]
        block.set_modules_to_backward_prefetch([*own[index], *chain.from_iterable(earlier)])  # type: ignore[list-item]
