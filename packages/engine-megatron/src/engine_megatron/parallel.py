"""The grid of ranks, Megatron's process groups, and this engine's own collectives.

Ranks are numbered as Megatron does: tensor fastest, then context, then data, then pipeline stages.
The ranks of a stage are divided a second time for experts: parts of an expert fastest, then
expert-parallel ranks, then copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.results import Topology
from engine_megatron import te

# float8 is a precision of matrix products, whose inputs and outputs are bfloat16.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
# Integer dtypes by size in bytes; NCCL does not add 16-bit integers.
_INTEGERS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's coordinates in the grid of ranks."""

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
        experts: number of ranks that the experts of a layer are spread over.
        expert_tensor: number of ranks that an expert's matrices are split over.
        virtual: number of model chunks on each rank; chunk c of stage s is the
            ``c * stages + s``-th part of the layers.
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
        """The number of ranks of each kind of parallelism."""
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
        """True if experts are divided among ranks differently from all other weights."""
        return self.experts > 1 or self.expert_tensor != self.tensor

    def place(self, rank: int) -> Place:
        """Return the coordinates of ``rank``."""
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
        """Return the rank at ``place``, the inverse of `place`."""
        replica = place.stage * self.data + place.data
        return (replica * self.context + place.context) * self.tensor + place.tensor

    @property
    def here(self) -> Place:
        """This rank's coordinates."""
        return self.place(self.rank)

    @property
    def is_first(self) -> bool:
        """True if this rank is on the first pipeline stage."""
        return self.here.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this rank is on the last pipeline stage."""
        return self.here.stage == self.stages - 1

    @property
    def topology(self) -> Topology:
        """The contract's description of this rank.

        The loss is known on the last stage, so one of its ranks is the primary one.
        """
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
    """Return the layout for a world of ``world`` ranks, without making a process group.

    ``expert_tensor`` 0 means as many as ``tp``. Raises ``ConfigError`` when the sizes do not fit
    the world.
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
            why=f"experts are spread over the ranks of tp {parallelism.tp} x cp {parallelism.cp} "
            f"x dp {data}",
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


class ModelParallel:
    """The process groups of model parallelism.

    Megatron keeps its groups in global variables, so engines that exist at the same time share
    them. A dense model does not use the experts' groups, so its engine can share groups made with
    any experts' sizes. Megatron's choice of attention kernels is as global: it stands in the
    environment, where Transformer Engine reads it at each forward pass.
    """

    _users = 0
    # The sizes that the groups were made with.
    _sizes: ClassVar[dict[str, int]] = {}
    # The choice of attention kernels before the first engine, restored with the last.
    _variables: ClassVar[dict[str, str | None]] = {}

    @classmethod
    def check(cls, layout: Layout, *, has_experts: bool) -> None:
        """Raise ``ConfigError`` when this process holds groups of a different layout."""
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
                remedy="close the other engine first, give both the same sizes, or if these differ "
                "in ep and etp alone build the engine with experts before the dense one",
            )
        if not cls._users and parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "parallelism",
                "Megatron's process groups were initialized outside this engine",
                remedy="call megatron.core.parallel_state.destroy_model_parallel() first",
            )

    @classmethod
    def join(cls, layout: Layout, timeout: timedelta) -> None:
        """Make the groups out of the default group, or share the existing ones.

        All ranks call it together, after `check`.
        """
        from megatron.core import parallel_state

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
            # Ctrl-C included: an incomplete set of groups is of no use.
            except BaseException:
                cls._destroy()
                raise
            cls._sizes = layout.sizes
            cls._variables = te.attention_variables()
        cls._users += 1

    @classmethod
    def leave(cls) -> None:
        """Destroy the groups with the last engine that uses them, and restore the environment."""
        cls._users -= 1
        if not cls._users:
            te.restore_attention_variables(cls._variables)
            cls._destroy()

    @classmethod
    def _destroy(cls) -> None:
        from megatron.core import parallel_state

        # Megatron forgets its groups without destroying them: every engine would leave some twenty.
        groups = [
            group
            for group in parallel_state._global_process_group_list or ()  # noqa: SLF001
            if group is not None
        ]
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)


def wrap_chunks(chunks: nn.ModuleList, *, distributed_optimizer: bool) -> list[Any]:
    """Return the model chunks with Megatron's buffers of gradients around them.

    Without overlap, gradients are reduced once a step, after all micro-batches and all calls have
    added to them.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return [
        DistributedDataParallel(config=chunk.config, ddp_config=buffers, module=chunk)  # type: ignore[arg-type]
        for chunk in chunks
    ]


def tensor_group() -> Any:
    """Return the group of the ranks that split each matrix with this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def context_group() -> Any:
    """Return the group of the ranks that hold the tokens of the same documents."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def is_spread_expert(param: Tensor) -> bool:
    """Return True if an expert with this parameter is divided differently from other weights.

    It reads Megatron's mark on the parameter.
    """
    return not getattr(param, "allreduce", True)


def holders_group(param: Tensor) -> Any:
    """Return the group of the ranks that hold the same part of ``param`` as this rank."""
    from megatron.core import parallel_state

    if is_spread_expert(param):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def model_group(param: Tensor) -> Any:
    """Return the ranks of one whole model, with all weights divided as ``param`` is."""
    from megatron.core import parallel_state

    if is_spread_expert(param):
        return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return parallel_state.get_model_parallel_group()


def experts_group() -> Any:
    """Return the group of the ranks of this rank's stage that together hold all experts once."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_and_model_parallel_group()


def pipeline_group() -> Any:
    """Return the group of the ranks that hold the stages of this rank's model."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


def add_bits(x: Tensor, group: Any) -> Tensor:
    """Sum ``x`` over ranks in place without changing a bit, not even the sign of a zero.

    At most one rank may hold anything but zeros at each index. Returns ``x``.
    """
    bits = x.view(_INTEGERS.get(x.element_size(), torch.uint8))
    dist.all_reduce(bits, group=group)
    return x
