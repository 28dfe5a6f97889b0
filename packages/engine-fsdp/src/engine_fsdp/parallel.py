"""Device meshes, and ``fully_shard`` over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine_api.config import EngineConfig, Parallelism
from engine_api.errors import ConfigError
from engine_api.results import Topology
from engine_torch import parallel
from engine_torch.parallel import find_shard_size, is_plain, make_mesh, set_timeouts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The meshes, and this rank's place in them."""

    mesh: DeviceMesh
    """Mesh that ``fully_shard`` shards over, ``(shard,)``, or ``(replicate, shard)`` for HSDP."""

    experts: DeviceMesh | None
    """Mesh ``(replicate, ep_shard, ep)`` of all ranks, or None where experts are not spread."""

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

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """Mesh that experts are spread over, or None where they are not spread."""
        return None if self.experts is None else self.experts["ep"]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh that ``fully_shard`` shards spread experts over, or None where there are none."""
        if self.experts is None:
            return None
        copies = self.experts.size(0)
        return self.experts["replicate", "ep_shard"] if copies > 1 else self.experts["ep_shard"]


def _flatten(mesh: DeviceMesh) -> DeviceMesh:
    """Return the last two dimensions, of one copy of the weights, as one, the same at each call.

    Flattening registers the dimension's name, so that HSDP can slice it together with "replicate",
    and a norm over both dimensions is one sum.
    """
    names = (mesh.mesh_dim_names or ())[1:]
    return mesh[names]._flatten("shard")  # noqa: SLF001 - no public name in torch 2.11


def build_layout(parallelism: Parallelism, device_type: str) -> Layout:
    """Build the layout for the current world.

    Ulysses ranks are neighbours, which have the fastest links. They shard the weights together with
    the data-parallel ranks. The ranks that share one copy of the weights are the ones that experts
    are spread over, neighbours again.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks, or ``ep`` cannot spread
            experts over the ranks of a copy of the weights.
    """
    world = dist.get_world_size()
    replicate = parallelism.dp_replicate
    ulysses = parallelism.ulysses
    dp_shard = find_shard_size(parallelism, world, "ulysses")
    ep = parallelism.ep
    if dp_shard * ulysses % ep:
        raise ConfigError(
            "parallelism.ep",
            f"expected a divisor of dp_shard x ulysses = {dp_shard * ulysses}, got {ep}",
            why="experts are spread over the ranks that share one copy of the weights",
            remedy="choose a divisor of it",
        )
    mesh = make_mesh(device_type, {"replicate": replicate, "dp": dp_shard, "ulysses": ulysses})
    flat = _flatten(mesh)
    experts = {"replicate": replicate, "ep_shard": dp_shard * ulysses // ep, "ep": ep}
    replica, dp, sp = mesh.get_coordinate() or (0, 0, 0)
    topology = Topology(
        rank=dist.get_rank(),
        world_size=world,
        dp_rank=replica * dp_shard + dp,
        dp_size=replicate * dp_shard,
        is_primary=sp == 0,
        sizes={"dp_replicate": replicate, "dp_shard": dp_shard, "ulysses": ulysses, "ep": ep},
    )
    return Layout(
        mesh=mesh["replicate", "shard"] if replicate > 1 else flat,
        experts=make_mesh(device_type, experts) if ep > 1 else None,
        topology=topology,
        ulysses_group=mesh["ulysses"].get_group() if ulysses > 1 else None,
        ulysses=ulysses,
        ulysses_rank=sp,
        shard_group=flat.get_group(),
    )


def limit_groups(layout: Layout, device_type: str, timeout_s: int) -> None:
    """Set the engine's timeout on the meshes' groups."""
    groups = [*layout.mesh.get_all_groups(), layout.shard_group, layout.ulysses_group]
    if layout.experts is not None:
        groups += [*layout.experts.get_all_groups(), _flatten(layout.experts).get_group()]
    set_timeouts(groups, device_type, timeout_s)


def shard_model(
    root: nn.Module,
    blocks: list[nn.Module],
    config: EngineConfig,
    layout: Layout,
    prefetch: int,
    *,
    tower: list[nn.Module],
    experts: Sequence[nn.Module] = (),
) -> None:
    """Apply ``fully_shard`` to each block and the root, with gradients reduced as sums.

    A model that has nothing to shard, reduce or cast stays a plain module. ``tower`` are the blocks
    of a vision tower, if any, and ``experts`` the modules of experts that are spread over ranks.
    """
    if is_plain(config, layout.topology.world_size):
        return
    expert_mesh = layout.expert_mesh
    parts = {} if expert_mesh is None else dict.fromkeys(experts, expert_mesh)
    parallel.shard_model(
        root, blocks, config, layout.mesh, prefetch, parts=parts, exact=experts, tower=tower
    )
