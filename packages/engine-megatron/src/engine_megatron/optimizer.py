"""Megatron's gradient buffers and optimizers, clipping, and the optimizer's state per parameter.

``adamw`` runs in Megatron's distributed optimizer: each data-parallel rank holds the masters and
moments of one flat range of all weights, and a range may begin or end inside a parameter. All
optimizers except ``adamw`` are kept whole on every rank.
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronConfig
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from engine_api.comm import Comm
from engine_api.config import OptimizerConfig
from engine_api.errors import ConfigError
from engine_api.optimizers import (
    TrainedWeight,
    build_optimizer,
    group_weights,
    has_scalars_on_device,
    set_rate,
)
from engine_megatron.masters import Masters, Shard, frozen_masters, whole_masters
from engine_megatron.parallel import (
    Layout,
    holders_group,
    is_spread_expert,
    model_group,
    wrap_chunks,
)

Describe = Callable[[nn.Parameter, Tensor], TrainedWeight]
"""A function of a parameter and of the tensor of it that an optimizer updates."""


class ParameterGroup:
    """Parameters held by the same ranks, and the torch optimizer over this rank's shards."""

    def __init__(
        self,
        params: list[nn.Parameter],
        config: OptimizerConfig,
        dtype: torch.dtype,
        describe: Describe,
    ) -> None:
        self.params = params
        self.dtype = dtype
        self.masters = whole_masters(params, dtype)
        shards = self.masters.shards
        weights = [describe(param, shards[param].tensor) for param in params]
        self.inner = build_optimizer(config, group_weights(config, weights))
        # The ranks that hold the rest of the model's gradient.
        self.statistics_group: Any = model_group(params[0])

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters and parameters that this rank is responsible for."""
        self.inner.step()
        self.masters.publish()


class DistributedParameterGroup(ParameterGroup):
    """A parameter group under Megatron's distributed optimizer.

    The optimizer works on flat ranges of ``buffers``, the gradient buffers of each chunk, which
    hold ``params``.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        config: OptimizerConfig,
        dtype: torch.dtype,
        describe: Describe,
        *,
        chunks: list[Any],
        buffers: list[Any],
    ) -> None:
        self.params = params
        self.dtype = dtype
        # No range is on two ranks.
        self.statistics_group = dist.group.WORLD
        settings = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=params[0].dtype == torch.bfloat16,
        )
        # Megatron's annotations do not allow the None arguments that its code accepts.
        optimizer: Any = DistributedOptimizer
        self.optimizer: Any = optimizer(
            optimizer=build_optimizer(
                config, group_weights(config, [describe(param, param) for param in params])
            ),
            config=settings,
            grad_scaler=None,
            init_state_fn=None,
            model_chunks=chunks,
            per_model_buffers=dict(enumerate(buffers)),
            data_parallel_group=holders_group(params[0]),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        if dtype != torch.float32:
            self._drop_float32_copies()
        self.inner = self.optimizer.optimizer
        self.masters = Masters(dict(self._shards()), dtype, spread=True)

    def _drop_float32_copies(self) -> None:
        """Replace Megatron's float32 copies of 16-bit parameters by the parameters themselves."""
        optimizer = self.optimizer
        optimizer.shard_fp32_from_float16_groups = optimizer.shard_float16_groups
        for group, shards in zip(
            optimizer.optimizer.param_groups, optimizer.shard_float16_groups, strict=True
        ):
            group["params"] = list(shards)
        for params, shards in zip(
            optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True
        ):
            for param, shard in zip(params, shards, strict=True):
                param.main_param = shard

    def _shards(self) -> Iterator[tuple[nn.Parameter, Shard]]:
        """Yield each parameter that has a range on this rank, with that range."""
        optimizer = self.optimizer
        for groups, masters in (
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        ):
            for params, shards in zip(groups, masters, strict=True):
                for param, shard in zip(params, shards, strict=True):
                    # Megatron has no public name for the start of a shard.
                    ranges = optimizer._get_model_param_range_map(param)  # noqa: SLF001
                    yield param, Shard(tensor=shard, start=ranges["param"].start)

    def step(self) -> None:
        """Update this rank's ranges, without fetching the ranges of other ranks.

        The caller fetches those for all groups at once.
        """
        optimizer: DistributedOptimizer = self.optimizer
        super(DistributedOptimizer, optimizer).step_with_ready_grads()


class StageOptimizer:
    """Gradient buffers and the optimizer of this rank's pipeline stage."""

    def __init__(
        self,
        chunks: nn.ModuleList,
        config: OptimizerConfig,
        layout: Layout,
        comm: Comm,
        dtype: torch.dtype,
        describe: Describe,
    ) -> None:
        self.layout = layout
        self.comm = comm
        self.distributed = config.name == "adamw"
        self.chunks = wrap_chunks(chunks, distributed_optimizer=self.distributed)
        self.params = [param for param in chunks.parameters() if param.requires_grad]
        self.groups = list(self._build_groups(config, dtype, describe))
        self.frozen = [param for param in chunks.parameters() if not param.requires_grad]
        shards = frozen_masters(self.frozen, dtype, spread=self.distributed)
        for group in self.groups:
            shards |= group.masters.shards
        self.masters = Masters(shards, dtype, spread=self.distributed)
        self._inner = {param: group.inner for group in self.groups for param in group.params}

    def _build_groups(
        self, config: OptimizerConfig, dtype: torch.dtype, describe: Describe
    ) -> Iterator[ParameterGroup]:
        """Yield one group for the spread experts and one for all other weights, if not empty.

        Spread experts are divided among ranks that hold the same part of all other weights.
        """
        for experts, kind in ((False, "buffers"), (True, "expert_parallel_buffers")):
            params = [param for param in self.params if is_spread_expert(param) == experts]
            if params and self.distributed:
                buffers = [getattr(chunk, kind) for chunk in self.chunks]
                yield DistributedParameterGroup(
                    params, config, dtype, describe, chunks=self.chunks, buffers=buffers
                )
            elif params:
                yield ParameterGroup(params, config, dtype, describe)

    # --- a step --------------------------------------------------------------------------------

    def clip(self, max_norm: float | None) -> float:
        """Reduce the gradients over ranks, scale them to ``max_norm`` and return their global norm.

        The returned norm is the one before scaling. None leaves the gradients unscaled.
        """
        finalize_model_grads(self.chunks, None)
        norm = math.hypot(*(self._norm(group) for group in self.groups))
        if max_norm is not None and math.isfinite(norm):
            shards = [shard.tensor for shard in self.masters.shards.values()]
            total = torch.tensor(norm, device=self.params[0].device)
            torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total)
        return norm

    def _norm(self, group: ParameterGroup) -> float:
        """Return the norm of a group's float32 gradients over all ranks.

        Each shard also receives its own gradient, in the dtype of the masters.
        """
        counted: list[Tensor] = []
        for param, shard in group.masters.shards.items():
            grad = shard.part_of(param.main_grad)  # type: ignore[arg-type] - Megatron's buffer
            shard.tensor.grad = grad.to(group.dtype)
            if self._counts(param):
                counted.append(grad)
        return float(get_grad_norm_fp32(counted, grad_stats_parallel_group=group.statistics_group))

    def _counts(self, param: nn.Parameter) -> bool:
        """Return True if this rank's copy of a parameter enters the norm.

        Of a weight that several model-parallel ranks hold, only one copy does.
        """
        here = self.layout.here
        first = (here.expert_tensor if is_spread_expert(param) else here.tensor) == 0
        is_split = bool(param.tensor_model_parallel)  # type: ignore[attr-defined]
        return param_is_not_shared(param) and (first or is_split)

    def step(self, lr: float) -> None:
        """Apply one update at the rate ``lr``, and give every rank all new weights."""
        for group in self.groups:
            set_rate(group.inner, lr)
            group.step()
        self._fetch()

    def publish(self) -> None:
        """Round new masters into the weights, and give every rank all new weights."""
        self.masters.publish()
        for param in self.frozen:
            if self.masters.divides(param):
                param.detach().copy_(self.masters.read(param))
        self._fetch()

    def _fetch(self) -> None:
        if self.distributed:
            for chunk in self.chunks:
                chunk.start_param_sync()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for shard in self.masters.shards.values():
            shard.tensor.grad = None

    # --- state ---------------------------------------------------------------------------------

    def fields(self) -> list[str]:
        """Return the names of the optimizer's state fields, sorted.

        All ranks call it together. The list is empty before the first step.
        """
        states = [state for group in self.groups for state in group.inner.state.values()]
        own = {name for state in states for name in state}
        return sorted({name for names in self.comm.all_gather(sorted(own)) for name in names})

    def whole_state(self) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """Yield (parameter, field, value) for the whole state.

        All holders call it together. A value is a scalar or a tensor of the parameter's shape. One
        gathered tensor exists at a time, unless the caller keeps it. Raises ``ConfigError`` for
        state of any other shape.
        """
        for field in self.fields():
            for param in self.params:
                yield param, field, self._whole_value(param, field)

    def own_state(self, param: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the optimizer's live state of this rank's range of a parameter, by field.

        Values are scalars and tensors of the range's shape. Raises ``ConfigError`` for any other
        kind of state.
        """
        if (shard := self.masters.shards.get(param)) is None:
            return {}
        if param not in self._inner:
            return {}
        state: dict[str, Any] = self._inner[param].state.get(shard.tensor, {})
        for field, value in state.items():
            if not (isinstance(value, Tensor) and value.shape in ((), shard.tensor.shape)):
                raise ConfigError(
                    "optimizer.name",
                    f"its state {field!r} is no tensor of its weight's shape",
                    remedy="this optimizer cannot be saved; use adamw",
                )
        return state

    def _whole_value(self, param: nn.Parameter, field: str) -> Tensor:
        shard = self.masters.shards.get(param)
        value = self.own_state(param).get(field)
        if self.distributed and (scalar := self.masters.gather_scalar(param, value)) is not None:
            return scalar
        return self.masters.gather(param, shard, value)

    def install(self, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Replace the whole state by scalars and tensors of the parameters' shapes."""
        own: dict[nn.Parameter, dict[str, Tensor]] = {}
        for param, values in state.items():
            if (shard := self.masters.shards.get(param)) is not None:
                own[param] = {
                    field: shard.part_of(value) if value.dim() else value
                    for field, value in values.items()
                }
        self.install_own(own)

    def install_own(self, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Replace the whole state by scalars and tensors of the size of this rank's ranges."""
        for group in self.groups:
            group.inner.state.clear()
        for param, values in state.items():
            shard = self.masters.shards[param]
            inner = self._inner[param]
            on_device = has_scalars_on_device(inner)
            for field, value in values.items():
                shape = shard.tensor.shape if value.dim() else ()
                device = param.device if value.dim() or on_device else "cpu"
                inner.state[shard.tensor][field] = value.view(shape).to(device, copy=True)
