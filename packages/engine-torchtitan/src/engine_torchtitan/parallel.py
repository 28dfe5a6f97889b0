"""torchtitan's meshes, and this rank's place in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.results import Topology
from engine_torch.parallel import find_shard_size, set_timeouts
from engine_torchtitan.library import SPMD_BACKEND, ParallelDims, building_meshes_for

__all__ = ["Layout", "build_layout", "connect_stages", "limit_groups", "list_routes"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The meshes, and this rank's place in them."""

    dims: ParallelDims
    """torchtitan's meshes by name."""

    topology: Topology
    """Topology that the engine reports."""

    tp: int
    """Number of tensor-parallel ranks."""

    cp: int
    """Number of context-parallel ranks."""

    ep: int
    """Number of ranks that the experts are spread over."""

    pp: int
    """Number of stages of the pipeline."""

    message_groups: Mapping[tuple[int, int], Any]
    """Process groups of two ranks for messages, by the stages of sender and receiver.

    A group of other stages is None. A group for several routes would have several communicators, of
    which torch aborts one after another. On a GPU the first abort would wait for the kernels of the
    others, where a stage waits for one that has failed.
    """

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of a stage."""
        return self.topology.world_size // self.pp

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.topology.rank // self.ranks_per_stage

    @property
    def is_first(self) -> bool:
        """True on the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True on the last stage."""
        return self.stage == self.pp - 1

    @property
    def pp_group(self) -> Any:
        """Process group of the ranks with the stages of this rank's documents, or None.

        It is for collectives alone.
        """
        return self.dims.get_mesh("pp").get_group() if self.pp > 1 else None

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage of this rank's documents."""
        return self.topology.rank % self.ranks_per_stage + stage * self.ranks_per_stage

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh that ``fully_shard`` shards over, ``(fsdp,)``, or ``(dp_replicate, fsdp)``.

        Context-parallel ranks shard the weights together with the data-parallel ones.
        """
        names = ["dp_replicate", "fsdp"] if self.dims.dp_replicate_enabled else ["fsdp"]
        return self.dims.get_mesh(names)

    @property
    def tp_group(self) -> Any:
        """Process group of tensor parallelism, or None without it."""
        return self.dims.get_mesh("tp").get_group() if self.tp > 1 else None

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh that ``fully_shard`` shards experts over, or None where they are not spread."""
        if self.ep == 1:
            return None
        names = ["dp_replicate", "efsdp"] if self.dims.dp_replicate_enabled else ["efsdp"]
        return self.dims.get_mesh(names)

    @property
    def cp_group(self) -> Any:
        """Process group of context parallelism, or None without it."""
        return self.dims.get_mesh("cp").get_group() if self.cp > 1 else None

    @property
    def cp_rank(self) -> int:
        """This rank's index in the group of context parallelism."""
        return self.topology.rank // self.tp % self.cp


# Meshes, and the groups for messages of a pipeline, by default group, device and sizes. DTensor
# keeps the first of several equal meshes in its caches, so a mesh's groups cannot be destroyed
# while the process goes on. Reused, they do not pile up with each engine.
_DIMS: dict[tuple[Any, ...], tuple[ParallelDims, Mapping[tuple[int, int], Any]]] = {}


def _build_dims(
    device_type: str, sizes: dict[str, Any]
) -> tuple[ParallelDims, Mapping[tuple[int, int], Any]]:
    """Return torchtitan's meshes of these sizes and the groups for messages of a pipeline.

    They are the same ones at each call.
    """
    key = (dist.group.WORLD, device_type, *sizes.items())
    # The meshes of a default group that has been destroyed are of no use.
    for stale in [one for one in _DIMS if one[0] is not dist.group.WORLD]:
        del _DIMS[stale]
    if key not in _DIMS:
        dims = ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend=SPMD_BACKEND)
        with building_meshes_for(device_type):
            dims.build_mesh()
        _DIMS[key] = dims, _build_message_groups(sizes["pp"])
    return _DIMS[key]


def list_routes(stages: int) -> list[tuple[int, int]]:
    """Return the stages of sender and receiver of each route of a pipeline's messages.

    Hidden states go to the next stage, and gradients to the one before. The first stage and the
    last one may hold one weight, whose gradients they add.
    """
    last = stages - 1
    pairs = [*((stage, stage + 1) for stage in range(last)), *([(0, last)] if last > 1 else [])]
    return [route for one, other in pairs for route in ((one, other), (other, one))]


def _build_message_groups(stages: int) -> dict[tuple[int, int], Any]:
    """Return the process groups for messages by their route. All ranks call it.

    torch lets all ranks take part in making each group: 1,024 of them on 512 ranks in four stages.
    """
    ranks = torch.arange(dist.get_world_size()).view(stages, -1)
    return {
        route: dist.new_subgroups_by_enumeration(ranks[list(route)].T.tolist())[0]
        for route in list_routes(stages)
    }


def build_layout(parallelism: Parallelism, device_type: str) -> Layout:
    """Build the layout for the current world.

    Tensor-parallel ranks are neighbours, which have the fastest links, and context-parallel ranks
    are the next. The ranks of a stage follow each other, and those that share one copy of its
    weights are the ones that experts are spread over.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks, or ``ep`` does not divide
            the ranks of a copy of the weights.
    """
    world = dist.get_world_size()
    rank = dist.get_rank()
    tp = parallelism.tp
    cp = parallelism.cp
    pp = parallelism.pp
    replicate = parallelism.dp_replicate
    shard = find_shard_size(parallelism, world, "tp", "cp", "pp")
    per_stage = world // pp
    sizes: dict[str, Any] = {
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
        "ep": parallelism.ep,
    }
    _refuse_experts(parallelism.ep, shard * cp * tp)
    topology = Topology(
        rank=rank,
        world_size=world,
        dp_rank=rank % per_stage // (tp * cp),
        dp_size=replicate * shard,
        # The losses are known on the last stage.
        is_primary=rank >= world - per_stage and rank % (tp * cp) == 0,
        sizes=sizes,
    )
    dims, message_groups = _build_dims(device_type, sizes)
    return Layout(
        dims=dims,
        topology=topology,
        tp=tp,
        cp=cp,
        ep=parallelism.ep,
        pp=pp,
        message_groups=message_groups,
    )


def limit_groups(layout: Layout, device_type: str, timeout_s: int) -> None:
    """Set the engine's timeout on the meshes' groups."""
    experts = [] if layout.expert_mesh is None else [layout.expert_mesh]
    meshes = [layout.mesh, *experts, *layout.dims.get_all_one_dimensional_meshes().values()]
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    set_timeouts([*groups, *layout.message_groups.values()], device_type, timeout_s)


def connect_stages(layout: Layout, device: torch.device) -> None:
    """Send a first message along each route of a pipeline's messages. All ranks call it.

    On a GPU ranks wait for each other at their first message, and nothing can abort that. In a step
    a stage would wait in vain there for one that has failed.
    """
    if layout.pp == 1:
        return
    for (sender, receiver), group in layout.message_groups.items():
        message = torch.zeros(1, device=device)
        if layout.stage == sender:
            dist.send(message, layout.rank_of(receiver), group)
        elif layout.stage == receiver:
            dist.recv(message, layout.rank_of(sender), group)
    # Outputs and exported weights are broadcast.
    dist.broadcast(torch.zeros(1, device=device), layout.rank_of(layout.pp - 1), layout.pp_group)


def _refuse_experts(ep: int, ranks: int) -> None:
    """Raise ``ConfigError`` unless ``ep`` divides the ranks that share one copy of the weights."""
    if ranks % ep:
        raise ConfigError(
            "parallelism.ep",
            f"expected a divisor of dp_shard x cp x tp = {ranks}, got {ep}",
            why="experts are spread over the ranks that share one copy of the weights",
            remedy="choose a divisor of it",
        )
