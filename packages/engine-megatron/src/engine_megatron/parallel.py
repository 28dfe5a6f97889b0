"""Where each rank stands, Megatron's process groups, and the few collectives of our own.

Ranks are numbered as Megatron does: tensor fastest, then context, then data, then pipeline stages. The ranks of a stage are
divided a second time for experts: parts of an expert fastest, then expert-parallel ranks, then copies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.config import Parallelism
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_api.results import Topology

# float8 is a precision of matrix products: what goes in and comes out is bfloat16.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
_INTEGERS = {4: torch.int32, 8: torch.int64}  # NCCL adds no 16-bit integers


def world_and_rank() -> tuple[int, int]:
    """Ranks of this run and this one's number, before any process group is made."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return (int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])) if launched else (1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's coordinates."""

    stage: int
    data: int
    tensor: int
    context: int = 0
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The grid of ranks and this rank's place in it.

    Attributes:
        experts: ranks that the experts of a layer are spread over.
        expert_tensor: ranks that an expert's matrices are split over.
        virtual: model chunks on each rank; chunk c of stage s is the ``c * stages + s``-th part of the layers.
    """

    world: int
    rank: int
    tensor: int
    data: int
    stages: int
    context: int = 1
    experts: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks each kind of parallelism has."""
        return {
            "pp": self.stages,
            "dp": self.data,
            "cp": self.context,
            "tp": self.tensor,
            "ep": self.experts,
            "etp": self.expert_tensor,
        }

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are divided among other ranks than all other weights."""
        return self.experts > 1 or self.expert_tensor != self.tensor

    def place(self, rank: int) -> Place:
        """The coordinates of ``rank``."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        stage, data = divmod(rest, self.data)
        rest, expert_tensor = divmod(rank % (self.world // self.stages), self.expert_tensor)
        return Place(
            stage=stage,
            data=data,
            tensor=tensor,
            context=context,
            expert=rest % self.experts,
            expert_tensor=expert_tensor,
        )

    def rank_of(self, place: Place) -> int:
        """The inverse of `place`."""
        return (
            (place.stage * self.data + place.data) * self.context + place.context
        ) * self.tensor + place.tensor

    @property
    def here(self) -> Place:
        """This rank's coordinates."""
        return self.place(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is the first pipeline stage."""
        return self.here.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last pipeline stage."""
        return self.here.stage == self.stages - 1

    @property
    def topology(self) -> Topology:
        """This rank for the caller. The loss is known on the last stage: one of its ranks is primary."""
        here = self.here
        return Topology(
            rank=self.rank,
            world_size=self.world,
            dp_rank=here.data,
            dp_size=self.data,
            is_primary=self.is_last and here.tensor == here.context == 0,
            sizes=self.sizes,
        )


def build_layout(
    parallelism: Parallelism, expert_tensor: int, virtual: int, world: int, rank: int
) -> Layout:
    """The layout for a world; raises ``ConfigError`` when the sizes do not make it. Makes no process group.

    ``expert_tensor`` 0 means as many as ``tp``.
    """
    model = parallelism.tp * parallelism.cp * parallelism.pp
    data = world // model if parallelism.dp_shard == -1 else parallelism.dp_shard
    if data < 1 or data * model != world:
        raise ConfigError(
            "parallelism",
            f"dp_shard {parallelism.dp_shard} x tp {parallelism.tp} x cp {parallelism.cp} x "
            f"pp {parallelism.pp} does not make a world of {world}",
            remedy="choose sizes whose product is the number of ranks, or dp_shard: -1",
        )
    expert_tensor = expert_tensor or parallelism.tp
    if parallelism.tp % expert_tensor:
        raise ConfigError(
            "options.expert_tensor_parallel",
            f"{expert_tensor} does not divide tp {parallelism.tp}",
            remedy="choose a size that divides it; 0: as tp",
        )
    ranks = parallelism.tp * parallelism.cp * data
    if ranks % (parallelism.ep * expert_tensor):
        raise ConfigError(
            "parallelism.ep",
            f"{parallelism.ep} experts' ranks x {expert_tensor} that split each do not divide "
            f"the {ranks} ranks of a stage",
            why=f"experts are spread over the ranks of tp {parallelism.tp} x cp {parallelism.cp} x dp {data}",
            remedy="choose a size that divides them",
        )
    return Layout(
        world=world,
        rank=rank,
        tensor=parallelism.tp,
        data=data,
        stages=parallelism.pp,
        context=parallelism.cp,
        experts=parallelism.ep,
        expert_tensor=expert_tensor,
        virtual=virtual,
    )


def ensure_process_group(device_type: str, world: int, timeout: timedelta) -> bool:
    """Join the launcher's process group, or make one of a single rank; whether it was made here."""
    device_of(device_type).adopt_local_rank()
    if dist.is_initialized():
        return False
    backend = device_of(device_type).process_groups
    if world > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return True


class ModelParallel:
    """The process groups. Megatron keeps its own in global variables, so engines that live together share them.

    A dense model has no use for the experts' groups, so its engine shares those of any.
    """

    _users = 0
    _owns_world = False  # whether the default group was made here, and goes with the last engine
    _sizes: ClassVar[dict[str, int]] = {}  # that the groups were made with

    @classmethod
    def check(cls, layout: Layout, *, has_experts: bool) -> None:
        """Raise ``ConfigError`` when this process holds groups of another layout."""
        from megatron.core import parallel_state

        wanted = {
            name: size
            for name, size in layout.sizes.items()
            if has_experts or name not in ("ep", "etp")
        }
        if cls._users and not wanted.items() <= cls._sizes.items():
            raise ConfigError(
                "parallelism",
                f"{wanted}, another engine of this process has {cls._sizes}",
                why="Megatron keeps its process groups in global variables",
                remedy="close the other engine first, give both the same sizes, or if these differ in ep and "
                "etp alone build the engine with experts before the dense one",
            )
        if not cls._users and parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "parallelism",
                "Megatron's process groups were initialized outside this engine",
                remedy="call megatron.core.parallel_state.destroy_model_parallel() first",
            )

    @classmethod
    def join(cls, layout: Layout, device_type: str, timeout: timedelta) -> None:
        """Make the groups, or share those that are there; all ranks together, after `check`."""
        from megatron.core import parallel_state

        cls._owns_world |= ensure_process_group(device_type, layout.world, timeout)
        if not cls._users:
            try:
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=layout.tensor,
                    pipeline_model_parallel_size=layout.stages,
                    context_parallel_size=layout.context,
                    expert_model_parallel_size=layout.experts,
                    expert_tensor_parallel_size=layout.expert_tensor,
                    create_gloo_process_groups=False,
                    order="tp-cp-ep-dp-pp",
                    distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
                )
            except BaseException:  # Ctrl-C too: half of the groups are of no use
                cls._destroy()
                raise
            cls._sizes = layout.sizes
        cls._users += 1

    @classmethod
    def leave(cls) -> None:
        """Destroy the groups with the last engine that uses them."""
        cls._users -= 1
        if not cls._users:
            cls._destroy()

    @classmethod
    def _destroy(cls) -> None:
        from megatron.core import parallel_state

        # Megatron forgets its groups without destroying them; every engine would leave some twenty behind.
        groups = [g for g in parallel_state._global_process_group_list or () if g is not None]  # noqa: SLF001
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)
        if cls._owns_world:
            dist.destroy_process_group()
        cls._owns_world = False


def tensor_group() -> Any:
    """The ranks that split each matrix with this one."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def context_group() -> Any:
    """The ranks that hold the other tokens of this one's documents."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def is_spread_expert(param: Tensor) -> bool:
    """Whether a parameter is of an expert that is spread over other ranks than all other weights (Megatron's mark)."""
    return not getattr(param, "allreduce", True)


def holders_group(param: Tensor) -> Any:
    """The ranks that hold the same part of ``param`` as this one."""
    from megatron.core import parallel_state

    if is_spread_expert(param):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def model_group(param: Tensor) -> Any:
    """The ranks that make one whole model, all weights divided as ``param`` is."""
    from megatron.core import parallel_state

    if is_spread_expert(param):
        return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return parallel_state.get_model_parallel_group()


def experts_group() -> Any:
    """The ranks of this one's stage that together hold all experts once."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_and_model_parallel_group()


def pipeline_group() -> Any:
    """The ranks that hold the other stages of this one's model."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


def add_bits(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks of which at most one holds anything but zeros at each place: no bit changes, no sign of a zero."""
    bits = x.view(_INTEGERS.get(x.element_size(), torch.uint8))
    dist.all_reduce(bits, group=group)
    return x
