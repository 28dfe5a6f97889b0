"""Megatron's gradient buffers and optimizers, clipping, and the optimizer's state parameter by parameter.

``adamw`` runs in Megatron's distributed optimizer: each data-parallel rank holds the moments of one flat range of all
weights, which knows nothing of where a parameter begins. Other optimizers are kept whole on every rank.
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronConfig
from torch import Tensor, nn

from engine_api.comm import Comm
from engine_api.config import OptimizerConfig
from engine_api.errors import ConfigError
from engine_api.optimizers import build_optimizer
from engine_megatron.parallel import Layout, add_bits, data_group, tensor_group


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What the optimizer updates of a parameter on this rank: ``parameter.view(-1)[start : start + numel]``."""

    tensor: Tensor
    start: int


class Trainer:
    """Gradient buffers and the optimizer of this rank's stage."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, layout: Layout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm
        distributed = config.name == "adamw"
        # No overlap: gradients are reduced once a step, when all micro-batches and all calls have added to them.
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.ddp = DistributedDataParallel(config=model.config, ddp_config=buffers, module=model)  # type: ignore[arg-type]
        inner = build_optimizer(config, model.parameters())
        settings = MegatronConfig(optimizer="adam" if distributed else "sgd", lr=config.lr, clip_grad=0.0,
                                  use_distributed_optimizer=distributed)  # fmt: skip
        self.optimizer: Any = self._distributed(inner, settings) if distributed else self._whole(inner, settings)
        self.optimizer.tp_group = tensor_group()
        self.shards: dict[nn.Parameter, Shard] = dict(self._shards())

    def _distributed(self, inner: torch.optim.Optimizer, settings: MegatronConfig) -> DistributedOptimizer:
        optimizer: Any = DistributedOptimizer  # its annotations forget None
        made: DistributedOptimizer = optimizer(
            optimizer=inner, config=settings, grad_scaler=None, init_state_fn=None, model_chunks=[self.ddp],
            per_model_buffers={0: self.ddp.buffers}, data_parallel_group=data_group(), data_parallel_group_gloo=None,
            data_parallel_group_idx=0, distributed_optimizer_instance_id=0,
        )  # type: ignore[arg-type] # fmt: skip
        made.grad_stats_parallel_group = dist.group.WORLD  # each rank's range is its own
        return made

    def _whole(self, inner: torch.optim.Optimizer, settings: MegatronConfig) -> FP32Optimizer:
        return FP32Optimizer(inner, settings, init_state_fn=lambda *_: None)

    def _shards(self) -> Iterator[tuple[nn.Parameter, Shard]]:
        if isinstance(self.optimizer, FP32Optimizer):
            yield from ((param, Shard(tensor=param, start=0)) for param in self.ddp.module.parameters())
            return
        for params, shards in zip(self.optimizer.model_fp32_groups, self.optimizer.shard_fp32_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                # Megatron has no public name for where a shard begins.
                ranges = self.optimizer._get_model_param_range_map(param)  # noqa: SLF001
                yield param, Shard(tensor=shard, start=ranges["param"].start)

    # --- a step --------------------------------------------------------------------------------

    def clip(self, max_norm: float | None) -> float:
        """Sum the gradients over the ranks that must, scale them to ``max_norm``; the global norm before that."""
        finalize_model_grads([self.ddp], None)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if max_norm is not None and math.isfinite(norm):
            clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), max_norm, norm)
        return norm

    def step(self, lr: float) -> None:
        """One update at rate ``lr``; every rank then has all new weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.ddp.zero_grad_buffer()
        for shard in self.shards.values():
            shard.tensor.grad = None

    # --- state ---------------------------------------------------------------------------------

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of torch inside, over this rank's shards."""
        result: torch.optim.Optimizer = self.optimizer.optimizer
        return result

    def fields(self) -> list[str]:
        """What the optimizer keeps of a weight now; nothing before the first step. All ranks together."""
        own = {name for state in self.inner.state.values() for name in state}
        return sorted({name for row in self.comm.all_gather(sorted(own)) for name in row})

    def whole_state(self) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """(parameter, field, value): a scalar, or a tensor of the parameter's shape; all data-parallel ranks together.

        One gathered tensor lives at a time, unless it is kept. Raises ``ConfigError`` for state that is no such tensor.
        """
        for field in self.fields():
            for param in self.ddp.module.parameters():
                yield param, field, self._whole_value(param, field)

    def _whole_value(self, param: nn.Parameter, field: str) -> Tensor:
        shard = self.shards.get(param)
        value = None if shard is None else self.inner.state[shard.tensor].get(field)
        if value is not None and not (isinstance(value, Tensor) and value.shape in ((), shard.tensor.shape)):  # type: ignore[union-attr]
            raise ConfigError("optimizer.name", f"its state {field!r} is no tensor of its weight's shape",
                              remedy="this optimizer cannot be saved; use adamw")  # fmt: skip
        if isinstance(self.optimizer, FP32Optimizer):
            assert value is not None
            return value
        return self._gathered(param, shard, value)

    def _gathered(self, param: nn.Parameter, shard: Shard | None, value: Tensor | None) -> Tensor:
        """From flat ranges to the whole; where no rank can know whether a field is a scalar, its name says so."""
        scalar = torch.full((2,), -math.inf, device=param.device)
        if value is not None:
            scalar[0] = float(value) if not value.dim() else -math.inf
            scalar[1] = float(value.dim())
        dist.all_reduce(scalar, op=dist.ReduceOp.MAX, group=data_group())
        if scalar[1] == 0:
            return scalar[0].clone()
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if shard is not None and value is not None:
            whole[shard.start : shard.start + value.numel()] = value
        return add_bits(whole, data_group()).view(param.shape)

    def install(self, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Replace the whole state by scalars and tensors of the parameters' shapes."""
        self.inner.state.clear()
        on_device = self.inner.defaults.get("fused") or self.inner.defaults.get("capturable")
        for param, values in state.items():
            if (shard := self.shards.get(param)) is None:
                continue
            for field, value in values.items():
                if value.dim():
                    part = value.reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
                    kept = part.to(param.device, copy=True).view(shard.tensor.shape)
                else:
                    kept = value.to(param.device if on_device else "cpu", copy=True)
                self.inner.state[shard.tensor][field] = kept
