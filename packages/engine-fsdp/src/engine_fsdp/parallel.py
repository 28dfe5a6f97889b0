"""Process group, device mesh, fully_shard, and the collectives of Ulysses sequence parallelism."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from engine_api.results import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ensure_process_group(device_type: str, timeout_s: int) -> bool:
    """Join the process group that the launcher describes, or make one of a single rank.

    Returns whether it was made here (and is this engine's to destroy).
    """
    device = device_of(device_type)
    device.adopt_local_rank()
    if dist.is_initialized():
        return False
    backend = device.process_groups
    timeout = device.group_timeout(timedelta(seconds=timeout_s))
    if (
        "RANK" in os.environ and "MASTER_ADDR" in os.environ
    ):  # torchrun, or a launcher that speaks its variables
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=torch.distributed.HashStore(), rank=0, world_size=1
        )  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported
    return True


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh and this rank's place in it."""

    mesh: DeviceMesh  # what fully_shard shards over: (shard,), or (replicate, shard) for HSDP
    topology: Topology
    ulysses_group: Any  # None without sequence parallelism
    ulysses: int
    ulysses_rank: int
    shard_group: Any
    shard_rank: int
    shard_size: int
    replica: int  # which copy of the weights this rank belongs to


# Meshes by default group, device and sizes. DTensor keeps the first of several equal meshes in its caches, so the groups of
# a mesh cannot be destroyed while the process goes on; made once, they do not pile up with every engine either.
_MESHES: dict[tuple[Any, ...], tuple[DeviceMesh, DeviceMesh]] = {}


def forget_meshes() -> None:
    """To be called when the default process group is destroyed, and theirs with it."""
    _MESHES.clear()


def _meshes(device_type: str, sizes: tuple[int, int, int]) -> tuple[DeviceMesh, DeviceMesh]:
    """(replicate, dp, ulysses), and the last two as one dimension."""
    key = (dist.group.WORLD, device_type, sizes)
    if key not in _MESHES:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "dp", "ulysses"))
        # Flattening registers the dimension under its name, so that HSDP can take it together with "replicate".
        flat = mesh["dp", "ulysses"]._flatten("shard")  # noqa: SLF001 - there is no public name for it in torch 2.11
        _MESHES[key] = (mesh, flat)
    return _MESHES[key]


def build_layout(parallelism: Parallelism, device_type: str) -> Layout:
    """The layout for the current world; raises ``ConfigError`` when the sizes do not fit it.

    Ulysses ranks are neighbours (the fastest links) and shard the weights together with the data-parallel ones.
    """
    world = dist.get_world_size()
    replicate, ulysses = parallelism.dp_replicate, parallelism.ulysses
    shard = _shard_size(parallelism, world)
    mesh, flat = _meshes(device_type, (replicate, shard // ulysses, ulysses))
    replica, dp, sp = mesh.get_coordinate() or (0, 0, 0)
    topology = Topology(
        rank=dist.get_rank(),
        world_size=world,
        dp_rank=replica * (shard // ulysses) + dp,
        dp_size=replicate * shard // ulysses,
        is_primary=sp == 0,
        sizes={"dp_replicate": replicate, "dp_shard": shard // ulysses, "ulysses": ulysses},
    )
    return Layout(
        mesh=mesh["replicate", "shard"] if replicate > 1 else flat,
        topology=topology,
        ulysses_group=mesh["ulysses"].get_group() if ulysses > 1 else None,
        ulysses=ulysses,
        ulysses_rank=sp,
        shard_group=flat.get_group(),
        shard_rank=flat.get_local_rank(),
        shard_size=shard,
        replica=replica,
    )


def limit_groups(layout: Layout, device_type: str, timeout_s: int) -> None:
    """Give the mesh's groups the engine's timeout: torch makes them with its own default, whatever the default group has."""
    timeout = device_of(device_type).group_timeout(timedelta(seconds=timeout_s))
    groups = [*layout.mesh.get_all_groups(), layout.shard_group, layout.ulysses_group]
    for group in groups:
        if group is not None:
            c10d._set_pg_timeout(timeout, group)  # noqa: SLF001 - there is no public name for it in torch 2.11


def _shard_size(parallelism: Parallelism, world: int) -> int:
    fixed = parallelism.dp_replicate * parallelism.ulysses
    dp_shard = parallelism.dp_shard
    if dp_shard == -1:
        dp_shard = world // fixed
    if dp_shard < 1 or dp_shard * fixed != world:
        raise ConfigError(
            "parallelism",
            f"dp_replicate {parallelism.dp_replicate} x dp_shard {parallelism.dp_shard} x ulysses "
            f"{parallelism.ulysses} does not make a world of {world}",
            remedy="choose sizes whose product is the number of ranks, or dp_shard: -1",
        )
    return dp_shard * parallelism.ulysses


def shard_model(
    root: nn.Module, blocks: list[nn.Module], config: EngineConfig, layout: Layout, prefetch: int
) -> None:
    """``fully_shard`` each block and the root; gradients are reduced as sums.

    One rank in one dtype has nothing to shard, reduce or cast, and stays a plain module: FSDP would still copy every
    weight and gradient through its buffers.
    """
    precision = config.precision
    one_dtype = precision.master == precision.compute == precision.reduce
    if layout.topology.world_size == 1 and one_dtype and not config.memory.offload_params:
        return
    dtypes: dict[str, Any] = {
        "param_dtype": DTYPES[config.precision.compute],
        "reduce_dtype": DTYPES[config.precision.reduce],
    }
    pins = device_of(layout.mesh.device_type).pins_memory
    arguments: dict[str, Any] = {
        "mesh": layout.mesh,
        "offload_policy": _offload_policy(config, pins),
    }
    for block in blocks:
        fully_shard(
            block,
            mp_policy=MixedPrecisionPolicy(**dtypes),
            reshard_after_forward=config.memory.reshard_after_forward,
            **arguments,
        )
    # The root's inputs are ids, and per-token figures that must stay float32.
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    fully_shard(root, mp_policy=policy, reshard_after_forward=False, **arguments)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global denominator: ranks only ever add.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(blocks, prefetch)


def _offload_policy(config: EngineConfig, pins: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=pins) if config.memory.offload_params else OffloadPolicy()


def _prefetch(blocks: list[nn.Module], count: int) -> None:
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + count])  # type: ignore[arg-type]
        block.set_modules_to_backward_prefetch(blocks[max(0, index - count) : index][::-1])  # type: ignore[arg-type]


def reset_after_failure(root: nn.Module) -> None:
    """Bring FSDP back to its state between iterations after an exception left one half way."""
    if not isinstance(root, FSDPModule):
        return
    if hasattr(root, "reset_iter_state"):  # torch 2.13 and later
        root.reset_iter_state()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            # Gradients kept between micro-batches must go too: reset_iter_state leaves them, and there is no public way.
            group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
            for param in group.fsdp_params if group is not None else ():
                param.unsharded_accumulated_grad = None
                if hasattr(
                    param, "_unsharded_param"
                ):  # where they have the reduction's dtype, they stay here
                    param._unsharded_param.grad = None  # noqa: SLF001


class _AllToAll(torch.autograd.Function):
    """Scatter one dimension over the group and gather another; its own inverse is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        return _all_to_all(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.gather, ctx.scatter), None, None, None


def _all_to_all(x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
    size = dist.get_world_size(group)
    send = torch.stack(x.chunk(size, dim=scatter)).contiguous()
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    return torch.cat(receive.unbind(0), dim=gather)


def heads_to_sequence(x: Tensor, group: Any) -> Tensor:
    """``[1, H, T/n, d]`` of this rank's tokens → ``[1, H/n, T, d]`` of all tokens (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    result: Tensor = _AllToAll.apply(x, group, 1, 2)  # type: ignore[no-untyped-call]
    return result


def sequence_to_heads(x: Tensor, group: Any) -> Tensor:
    """``[1, H/n, T, d]`` → ``[1, H, T/n, d]``: the inverse."""
    result: Tensor = _AllToAll.apply(x, group, 2, 1)  # type: ignore[no-untyped-call]
    return result


class _GatherTokens(torch.autograd.Function):
    """``[T/n] → [T]`` over the group.

    Every rank computes the same loss on the whole, so the gradient is this rank's slice, counted once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grads[0].chunk(size)[rank].contiguous(), None


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """Per-token values of this rank's slice ``[T/n]`` → of all tokens ``[T]``, with gradient."""
    result: Tensor = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return result
