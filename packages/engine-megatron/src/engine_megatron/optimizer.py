"""Megatron's gradient buffers and optimizers, clipping, and the optimizer's state parameter by parameter.

``adamw`` runs in Megatron's distributed optimizer: each data-parallel rank holds the masters and moments of one flat range
of all weights, which knows nothing of where a parameter begins. Other optimizers are kept whole on every rank.
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronConfig
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from engine_api.comm import Comm
from engine_api.config import OptimizerConfig
from engine_api.errors import ConfigError
from engine_api.optimizers import build_optimizer
from engine_megatron.masters import Masters, Shard, whole_masters
from engine_megatron.parallel import Layout, holders_group, is_spread_expert, model_group


class Part:
    """Parameters that the same ranks hold, and the optimizer of torch over this rank's shards of them."""

    def __init__(
        self, params: list[nn.Parameter], config: OptimizerConfig, dtype: torch.dtype
    ) -> None:
        self.params, self.dtype = params, dtype
        self.masters = whole_masters(params, dtype)
        self.inner = build_optimizer(
            config, [self.masters.shards[param].tensor for param in params]
        )
        self.statistics_group: Any = model_group(
            params[0]
        )  # ranks that hold other parts of the model's gradient

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and with them the parameters, as far as they are this rank's to update."""
        self.inner.step()
        self.masters.publish()


class DistributedPart(Part):
    """The same with Megatron's distributed optimizer, over flat ranges of ``buffers``, those of each chunk, which hold ``params``."""

    def __init__(
        self,
        params: list[nn.Parameter],
        config: OptimizerConfig,
        dtype: torch.dtype,
        *,
        chunks: list[Any],
        buffers: list[Any],
    ) -> None:
        self.params, self.dtype = params, dtype
        self.statistics_group = dist.group.WORLD  # each rank's range is its own
        settings = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=params[0].dtype == torch.bfloat16,
        )
        optimizer: Any = DistributedOptimizer  # its annotations forget None
        self.optimizer: Any = optimizer(
            optimizer=build_optimizer(config, params),
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
            self._forget_copies()
        self.inner = self.optimizer.optimizer
        self.masters = Masters(dict(self._shards()), dtype, spread=True)

    def _forget_copies(self) -> None:
        """Megatron makes float32 copies of 16-bit parameters; the masters here are the parameters."""
        own = self.optimizer
        own.shard_fp32_from_float16_groups = own.shard_float16_groups
        for group, shards in zip(own.optimizer.param_groups, own.shard_float16_groups, strict=True):
            group["params"] = list(shards)
        for params, shards in zip(own.model_float16_groups, own.shard_float16_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                param.main_param = shard

    def _shards(self) -> Iterator[tuple[nn.Parameter, Shard]]:
        own = self.optimizer
        for groups, masters in (
            (own.model_fp32_groups, own.shard_fp32_groups),
            (own.model_float16_groups, own.shard_fp32_from_float16_groups),
        ):
            for params, shards in zip(groups, masters, strict=True):
                for param, shard in zip(params, shards, strict=True):
                    # Megatron has no public name for where a shard begins.
                    ranges = own._get_model_param_range_map(param)  # noqa: SLF001
                    yield param, Shard(tensor=shard, start=ranges["param"].start)

    def step(self) -> None:
        """Update this rank's ranges; the other ranks' are fetched by the caller, for all parts at once."""
        own: DistributedOptimizer = self.optimizer
        super(DistributedOptimizer, own).step_with_ready_grads()


class Trainer:
    """Gradient buffers and the optimizer of this rank's stage."""

    def __init__(
        self,
        chunks: nn.ModuleList,
        config: OptimizerConfig,
        layout: Layout,
        comm: Comm,
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.comm = layout, comm
        self.distributed = config.name == "adamw"
        # No overlap: gradients are reduced once a step, when all micro-batches and all calls have added to them.
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.distributed
        )
        self.chunks: list[Any] = [
            DistributedDataParallel(config=chunk.config, ddp_config=buffers, module=chunk)  # type: ignore[arg-type]
            for chunk in chunks
        ]
        self.params = list(chunks.parameters())
        self.parts = list(self._parts(config, dtype))
        shards = {
            param: shard for part in self.parts for param, shard in part.masters.shards.items()
        }
        self.masters = Masters(shards, dtype, spread=self.distributed)
        self._inner = {param: part.inner for part in self.parts for param in part.params}

    def _parts(self, config: OptimizerConfig, dtype: torch.dtype) -> Iterator[Part]:
        """One for experts that are spread over ranks which share all other weights, one for the rest."""
        for experts, kind in ((False, "buffers"), (True, "expert_parallel_buffers")):
            params = [param for param in self.params if is_spread_expert(param) == experts]
            if params and self.distributed:
                buffers = [getattr(chunk, kind) for chunk in self.chunks]
                yield DistributedPart(params, config, dtype, chunks=self.chunks, buffers=buffers)
            elif params:
                yield Part(params, config, dtype)

    # --- a step --------------------------------------------------------------------------------

    def clip(self, max_norm: float | None) -> float:
        """Sum the gradients over the ranks that must, scale them to ``max_norm``; the global norm before that."""
        finalize_model_grads(self.chunks, None)
        norm = math.hypot(*(self._norm(part) for part in self.parts))
        if max_norm is not None and math.isfinite(norm):
            shards = [shard.tensor for shard in self.masters.shards.values()]
            total = torch.tensor(norm, device=self.params[0].device)
            torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total)
        return norm

    def _norm(self, part: Part) -> float:
        """The norm of a part's float32 gradients over all ranks; each shard gets its own, in its dtype."""
        counted: list[Tensor] = []
        for param, shard in part.masters.shards.items():
            grad = shard.part_of(param.main_grad)  # type: ignore[arg-type] - Megatron's buffer
            shard.tensor.grad = grad.to(part.dtype)
            if self._counts(param):
                counted.append(grad)
        return float(get_grad_norm_fp32(counted, grad_stats_parallel_group=part.statistics_group))

    def _counts(self, param: nn.Parameter) -> bool:
        """Whether this rank's copy of a weight that several model-parallel ranks hold enters the norm."""
        here = self.layout.here
        first = (here.expert_tensor if is_spread_expert(param) else here.tensor) == 0
        return param_is_not_shared(param) and (first or bool(param.tensor_model_parallel))  # type: ignore[attr-defined]

    def step(self, lr: float) -> None:
        """One update at rate ``lr``; every rank then has all new weights."""
        for part in self.parts:
            for group in part.inner.param_groups:
                group["lr"] = lr
            part.step()
        self._fetch()

    def publish(self) -> None:
        """After masters were set: every rank then has all new weights."""
        self.masters.publish()
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
        """What the optimizer keeps of a weight now; nothing before the first step. All ranks together."""
        own = {name for part in self.parts for state in part.inner.state.values() for name in state}
        return sorted({name for row in self.comm.all_gather(sorted(own)) for name in row})

    def whole_state(self) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """(parameter, field, value): a scalar, or a tensor of the parameter's shape; all ranks that hold it together.

        One gathered tensor lives at a time, unless it is kept. Raises ``ConfigError`` for state that is no such tensor.
        """
        for field in self.fields():
            for param in self.params:
                yield param, field, self._whole_value(param, field)

    def own_state(self, param: nn.Parameter) -> Mapping[str, Tensor]:
        """What the optimizer keeps here of a parameter's range: scalars, and tensors of the range's shape; live.

        Raises ``ConfigError`` for state that is neither.
        """
        if (shard := self.masters.shards.get(param)) is None:
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
        shards = self.masters.shards
        self.install_own(
            {
                param: {
                    field: shards[param].part_of(value) if value.dim() else value
                    for field, value in values.items()
                }
                for param, values in state.items()
                if param in shards
            }
        )

    def install_own(self, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Replace the whole state by scalars and tensors of the size of this rank's ranges."""
        for part in self.parts:
            part.inner.state.clear()
        for param, values in state.items():
            shard, inner = self.masters.shards[param], self._inner[param]
            on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
            for field, value in values.items():
                shape, device = ((), param.device if on_device else "cpu")
                if value.dim():
                    shape, device = shard.tensor.shape, param.device
                inner.state[shard.tensor][field] = value.view(shape).to(device, copy=True)
