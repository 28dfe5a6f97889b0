"""The meshes, and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.results import Topology
from engine_torch.parallel import find_shard_size, make_mesh, set_timeouts

__all__ = ["Layout", "build_layout", "limit_groups"]

# The names of Automodel's own meshes, by which its functions find their dimensions.
_REPLICATE = "dp_replicate"
_SHARD = "dp_shard_cp"
_TP = "tp"
_CP = "cp"
_EP = "ep"
_EP_SHARD = "ep_shard"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The meshes, and this rank's place in them."""

    root: DeviceMesh
    """Mesh ``(dp_replicate, dp_shard_cp, tp)`` of all ranks.

    Context-parallel ranks shard the weights together with the data-parallel ones.
    """

    contexts: DeviceMesh | None
    """Mesh ``(dp, cp, tp)`` of all ranks, or None without context parallelism."""

    experts: DeviceMesh | None
    """Mesh ``(dp_replicate, ep_shard, ep)`` of all ranks, or None where experts are not spread."""

    topology: Topology
    """Topology that the engine reports."""

    tp: int
    """Number of tensor-parallel ranks."""

    cp: int
    """Number of context-parallel ranks."""

    ep: int
    """Number of ranks that the experts are spread over."""

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of ``fully_shard``: ``(shard,)``, or ``(replicate, shard)`` for HSDP."""
        return self._select(self.root, _SHARD)

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh that ``fully_shard`` shards experts over, or None where they are not spread."""
        return None if self.experts is None else self._select(self.experts, _EP_SHARD)

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """Mesh that experts are spread over, or None where they are not spread."""
        return None if self.experts is None else self.experts[_EP]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """Mesh of tensor parallelism."""
        return self.root[_TP]

    @property
    def tp_rank(self) -> int:
        """This rank's index in the group of tensor parallelism."""
        return self.topology.rank % self.tp

    @property
    def cp_group(self) -> Any:
        """Process group of context parallelism, or None without it."""
        return None if self.contexts is None else self.contexts[_CP].get_group()

    @property
    def cp_rank(self) -> int:
        """This rank's index in the group of context parallelism."""
        return self.topology.rank // self.tp % self.cp

    def _select(self, mesh: DeviceMesh, shard: str) -> DeviceMesh:
        copies = self.topology.sizes["dp_replicate"]
        return mesh[_REPLICATE, shard] if copies > 1 else mesh[shard]


def build_layout(parallelism: Parallelism, device_type: str) -> Layout:
    """Build the layout for the current world.

    Tensor-parallel ranks are neighbours, which have the fastest links, and context-parallel ranks
    are the next. The ranks that share one copy of the weights are the ones that experts are spread
    over.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks, or ``ep`` cannot spread
            experts over the ranks of a copy of the weights.
    """
    rank = dist.get_rank()
    tp = parallelism.tp
    cp = parallelism.cp
    ep = parallelism.ep
    copies = parallelism.dp_replicate
    shard = find_shard_size(parallelism, dist.get_world_size(), "tp", "cp")
    _refuse_experts(ep, shard * cp, tp)
    topology = Topology(
        rank=rank,
        world_size=dist.get_world_size(),
        dp_rank=rank // (tp * cp),
        dp_size=copies * shard,
        is_primary=rank % (tp * cp) == 0,
        sizes={_REPLICATE: copies, "dp_shard": shard, _CP: cp, _TP: tp, _EP: ep},
    )
    root = {_REPLICATE: copies, _SHARD: shard * cp, _TP: tp}
    contexts = {"dp": copies * shard, _CP: cp, _TP: tp}
    experts = {_REPLICATE: copies, _EP_SHARD: shard * cp // ep, _EP: ep}
    return Layout(
        root=make_mesh(device_type, root),
        contexts=make_mesh(device_type, contexts) if cp > 1 else None,
        experts=make_mesh(device_type, experts) if ep > 1 else None,
        topology=topology,
        tp=tp,
        cp=cp,
        ep=ep,
    )


def limit_groups(layout: Layout, device_type: str, timeout_s: int) -> None:
    """Set the engine's timeout on the meshes' groups."""
    meshes = (layout.root, layout.contexts, layout.experts)
    groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
    set_timeouts(groups, device_type, timeout_s)


def _refuse_experts(ep: int, ranks: int, tp: int) -> None:
    """Raise ``ConfigError`` unless experts can be spread over ``ep`` ranks."""
    if ep > 1 and tp > 1:
        raise ConfigError(
            "parallelism.ep",
            f"expected 1 with parallelism.tp {tp}, got {ep}",
            why="tensor-parallel ranks have the same tokens, and would send each one several times",
            remedy="use one of the two",
        )
    if ranks % ep:
        raise ConfigError(
            "parallelism.ep",
            f"expected a divisor of dp_shard x cp = {ranks}, got {ep}",
            why="experts are spread over the ranks that share one copy of the weights",
            remedy="choose a divisor of it",
        )
