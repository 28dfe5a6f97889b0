"""Device mesh, and ``fully_shard`` over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine_api.config import EngineConfig, Parallelism
from engine_api.results import Topology
from engine_torch import parallel
from engine_torch.parallel import find_shard_size, is_plain, set_timeouts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh, and this rank's place in it."""

    mesh: DeviceMesh
    """Mesh that ``fully_shard`` shards over, ``(shard,)``, or ``(replicate, shard)`` for HSDP."""

    topology: Topology
    """Topology that the engine reports."""

    ulysses_group: Any
    """Process group of Ulysses, or None without sequence parallelism."""

    ulysses: int
    """Number of ranks in the Ulysses group."""

    ulysses_rank: int
    """This rank's index in the Ulysses group."""

    shard_group: Any
    """Process group of the ranks that share one copy of the weights."""


# Meshes by default group, device and sizes. DTensor keeps the first of several equal meshes in its
# caches, so a mesh's groups cannot be destroyed while the process goes on. Reused, they do not pile
# up with each engine.
_MESHES: dict[tuple[Any, ...], tuple[DeviceMesh, DeviceMesh]] = {}


def _meshes(device_type: str, sizes: tuple[int, int, int]) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh (replicate, dp, ulysses), and its last two dimensions flattened."""
    key = (dist.group.WORLD, device_type, sizes)
    # The meshes of a default group that has been destroyed are of no use.
    for stale in [one for one in _MESHES if one[0] is not dist.group.WORLD]:
        del _MESHES[stale]
    if key not in _MESHES:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "dp", "ulysses"))
        # Flattening registers the dimension's name, so that HSDP can slice it together with
        # "replicate".
        flat = mesh["dp", "ulysses"]._flatten("shard")  # noqa: SLF001 - no public name in torch 2.11
        _MESHES[key] = (mesh, flat)
    return _MESHES[key]


def build_layout(parallelism: Parallelism, device_type: str) -> Layout:
    """Build the layout for the current world.

    Ulysses ranks are neighbours, which have the fastest links. They shard the weights together with
    the data-parallel ranks.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks.
    """
    world = dist.get_world_size()
    replicate = parallelism.dp_replicate
    ulysses = parallelism.ulysses
    dp_shard = find_shard_size(parallelism, world, "ulysses")
    mesh, flat = _meshes(device_type, (replicate, dp_shard, ulysses))
    replica, dp, sp = mesh.get_coordinate() or (0, 0, 0)
    topology = Topology(
        rank=dist.get_rank(),
        world_size=world,
        dp_rank=replica * dp_shard + dp,
        dp_size=replicate * dp_shard,
        is_primary=sp == 0,
        sizes={"dp_replicate": replicate, "dp_shard": dp_shard, "ulysses": ulysses},
    )
    return Layout(
        mesh=mesh["replicate", "shard"] if replicate > 1 else flat,
        topology=topology,
        ulysses_group=mesh["ulysses"].get_group() if ulysses > 1 else None,
        ulysses=ulysses,
        ulysses_rank=sp,
        shard_group=flat.get_group(),
    )


def limit_groups(layout: Layout, device_type: str, timeout_s: int) -> None:
    """Set the engine's timeout on the mesh's groups."""
    groups = [*layout.mesh.get_all_groups(), layout.shard_group, layout.ulysses_group]
    set_timeouts(groups, device_type, timeout_s)


def shard_model(
    root: nn.Module,
    blocks: list[nn.Module],
    config: EngineConfig,
    layout: Layout,
    prefetch: int,
    *,
    tower: list[nn.Module],
) -> None:
    """Apply ``fully_shard`` to each block and the root, with gradients reduced as sums.

    A model that has nothing to shard, reduce or cast stays a plain module. ``tower`` are the blocks
    of a vision tower, if any.
    """
    if not is_plain(config, layout.topology.world_size):
        parallel.shard_model(root, blocks, config, layout.mesh, prefetch, tower=tower)
