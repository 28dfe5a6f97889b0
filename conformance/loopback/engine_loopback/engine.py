"""The engine class, which builds its parts and defines the order of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine_api.batch import Batch
from engine_api.comm import Comm, SingleComm, TorchComm, together
from engine_api.config import EngineConfig, build_options
from engine_api.distillation import OutputHead, Teaching
from engine_api.errors import ConfigError
from engine_api.optimizers import TrainedWeight, set_rate
from engine_api.process_groups import world_and_rank
from engine_api.registry import Resolution
from engine_api.results import TokenOutputs
from engine_loopback import lora
from engine_loopback.export import ExportEngine
from engine_loopback.model import Model, Taught
from engine_loopback.optimizer import build_optimizer, clip_factor, move_state
from engine_loopback.options import LoopbackOptions
from engine_loopback.parallel import DTYPES, Layout
from engine_loopback.shape import Kind, read_config, shape_of, weight_shapes
from engine_loopback.weights import Partition, Weight, fill


class LoopbackEngine(ExportEngine):
    """Common part of the language and the value engine (see ``engine_api.contract.Engine``)."""

    kind: ClassVar[Kind]
    model_type: ClassVar[type[Model]] = Model
    partition_type: ClassVar[type[Partition]] = Partition
    layout_type: ClassVar[type[Layout]] = Layout

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        self.options: LoopbackOptions = build_options(config.options, LoopbackOptions)
        if config.model.attention not in ("auto", "plain"):
            raise ConfigError(
                "model.attention",
                f"unknown kernel {config.model.attention!r}",
                remedy="auto or plain",
            )

    # --- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        # Everything that can be refused from the configuration alone comes before any group.
        world, rank = world_and_rank()
        self.raw_config = read_config(self.config.model)
        self.shape = shape_of(self.raw_config, self.kind)
        self.vocab_size = self.shape.vocab_size
        if self.config.router_replay:
            self.routing = self.shape.routing(self._name)
        self.layout = self.layout_type(self.config.parallelism, world, rank)
        self.topology = self.layout.topology
        self.partition = self.partition_type(self.shape, self.layout)
        self.partition.check()
        if self.config.lora is not None and self.config.lora.dropout and self.layout.tensor > 1:
            raise ConfigError(
                "lora.dropout",
                "not with tp",
                why="its ranks would drop different inputs",
                remedy="set 0",
            )
        if self.config.memory.share_prefixes and self.layout.sequence > 1:
            raise ConfigError(
                "memory.share_prefixes",
                "not with ulysses or cp",
                why="a rank has a part of the tokens, and its hidden states predict others",
                remedy="set false",
            )
        self._build_groups(timedelta(seconds=self.options.timeout_s))
        try:
            self._build_model()
        # Also on Ctrl-C: no groups are kept for an engine that was not built.
        except BaseException:
            self._close_groups()
            raise

    def _choices(self) -> dict[str, str]:
        return {"model.attention": "plain"}

    def _build_groups(self, timeout: timedelta) -> None:
        self._use_process_group(timeout)
        cpu = self.device_type == "cpu"
        self.device = torch.device("cpu" if cpu else f"cuda:{torch.cuda.current_device()}")
        several = self.layout.world > 1
        self.comm: Comm = TorchComm(timeout) if several else SingleComm()
        self._save_comm: Comm = self.comm
        if several and self.config.checkpoint.async_save:
            self._save_comm = TorchComm(timeout)
        self.layout.build_groups(timeout)

    def _build_model(self) -> None:
        config = self.config
        self.weights = self.weight_table()
        # A file may be damaged on one machine only.
        together(self.comm, lambda: fill(self.weights, self.files(), config.seed, self.shape.std))
        for weight in self.weights.values():
            if weight.adapter and weight.param is not None:
                weight.local.copy_(lora.first_value(weight, config.seed))
        self.model = self.model_type(config, self.shape, self.weights, self.layout, self.device)
        self.optimizer = None
        if config.optimizer is not None:
            self.optimizer = build_optimizer(config.optimizer, self.describe_trained(), self.adamw)

    def weight_table(self) -> dict[str, Weight]:
        """Return the model's weights in order, then the adapters, each with this rank's box."""
        base = dict(weight_shapes(self.shape))
        adapters: dict[str, tuple[int, ...]] = {}
        if self.config.lora is not None:
            adapters = lora.adapter_shapes(self.config.lora, base)
        return {
            name: self.make_weight(name, shape, name in adapters)
            for name, shape in (base | adapters).items()
        }

    def make_weight(self, name: str, shape: tuple[int, ...], adapter: bool) -> Weight:
        """Return a weight with memory for this rank's box.

        With adapters, only these and a value head are trained.
        """
        box = self.partition.own_box(name, shape)
        trainable = self.config.optimizer is not None and (
            self.config.lora is None or adapter or "score." in name
        )
        home = torch.device("cpu") if self.config.memory.offload_params else self.device
        dtype = DTYPES[self.config.precision.master]
        value = torch.empty(box.shape, dtype=dtype, device=home)
        param = None if box.is_empty else nn.Parameter(value, requires_grad=trainable)
        return Weight(
            name=name,
            shape=shape,
            box=box,
            dtype=dtype,
            param=param,
            adapter=adapter,
            trainable=trainable,
        )

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters of this rank that the optimizer updates."""
        return [weight.held for weight in self.held_and_trained()]

    def describe_trained(self) -> list[TrainedWeight]:
        """Return the weights of this rank that the optimizer updates, as it groups them."""
        return [self.describe(weight) for weight in self.held_and_trained()]

    def describe(self, weight: Weight) -> TrainedWeight:
        """Return a weight as the optimizer groups it."""
        return TrainedWeight(tensor=weight.held, name=weight.name, dims=len(weight.shape))

    def held_and_trained(self) -> list[Weight]:
        """Return the weights of this rank that the optimizer updates."""
        return [
            weight
            for weight in self.weights.values()
            if weight.trainable and weight.param is not None
        ]

    # --- running -------------------------------------------------------------------------------

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Implement ``BaseEngine.forward_step``.

        ``coefficients`` are not used.
        """
        del coefficients
        return self.model.outputs(batch, needs, temperature)

    def taught_step(
        self, batch: Batch, *, needs: Sequence[str], temperature: float, teaching: Teaching
    ) -> TokenOutputs:
        """Implement ``EngineDefaults.taught_step``."""
        taught = Taught.of(batch, teaching, self._teacher_head)
        return self.model.outputs(batch, needs, temperature, taught)

    def states_step(self, batch: Batch) -> Tensor:
        """Implement ``EngineDefaults.states_step``."""
        return self.model.states(batch)

    def _whole_head(self) -> OutputHead:
        weight = self.weights[self.model.head_name]
        whole = self.assembled(weight, self.shard(weight, self.model.dtype))
        return OutputHead(weight=whole.clone())

    def _place_head(self, head: OutputHead) -> OutputHead:
        return head.to(self.device)

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        # Gradients are this rank's own until the step.
        del last
        self.model.training = True
        try:
            yield
        finally:
            self.model.training = False

    @contextmanager
    def _inference(self, adapter: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if not adapter:
                stack.enter_context(self.model.without_adapter())
            yield

    # --- the step ------------------------------------------------------------------------------

    def _clip_gradients(self, max_norm: float | None) -> float:
        for weight in self.held_and_trained():
            weight.held.grad = self.reduce_gradient(weight, self.own_gradient(weight))
        norm = self.gradient_norm()
        self.clip(norm, max_norm)
        return norm

    def own_gradient(self, weight: Weight) -> Tensor:
        """Return this rank's gradient, or zeros if no token reached the weight."""
        return torch.zeros_like(weight.held) if weight.held.grad is None else weight.held.grad

    def reduce_gradient(self, weight: Weight, grad: Tensor) -> Tensor:
        """Return the sum over ranks with different tokens, heads or uses of the weight."""
        dtype = grad.dtype
        grad = self.sum_over_copies(weight, grad.to(DTYPES[self.config.precision.reduce]))
        if self.partition.is_partial(weight.name):
            grad = self.sum_over_tensor(grad)
        if len(self.partition.stages(weight.name)) > 1:
            grad = self.sum_over_ends(grad)
        return grad.to(dtype)

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        """Sum over data- and sequence-parallel ranks.

        An expert's gradient already covers the tokens of its whole expert-parallel group.
        """
        dense = self.partition.expert_rank(weight.name) is None
        return self.layout.all_reduce(grad, "copies" if dense else "expert_copies")

    def sum_over_tensor(self, grad: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks, each of which has its own heads' part."""
        return self.layout.all_reduce(grad, "tensor")

    def sum_over_ends(self, grad: Tensor) -> Tensor:
        """Sum a tied embedding's gradients as embedding (first stage) and as head (last stage)."""
        return self.layout.all_reduce(grad, "ends")

    def gradient_norm(self) -> float:
        """Return the 2-norm of the whole gradient."""
        return math.sqrt(float(self.layout.all_reduce(self.own_squares(), "world")))

    def own_squares(self) -> Tensor:
        """Return the sum of squares of the gradients that this rank counts."""
        grads = [
            weight.held.grad.double().flatten().to(self.device)
            for weight in self.held_and_trained()
            if self.counts(weight) and weight.held.grad is not None
        ]
        if self.options.flat_norm:
            grads = [torch.cat(grads)] if grads else []
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for grad in grads:
            squares += grad.square().sum()
        return squares

    def counts(self, weight: Weight) -> bool:
        """Return whether this rank's box enters the norm, so that each box counts once."""
        return weight.box.replica == 0

    def clip(self, norm: float, max_norm: float | None) -> None:
        """Scale the gradients to ``max_norm``."""
        factor = clip_factor(norm, max_norm)
        for param in self.trained():
            if factor < 1.0 and param.grad is not None:
                param.grad.mul_(factor)

    def _apply_optimizer(self, lr: float) -> None:
        assert self.optimizer is not None
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, None)
        set_rate(self.optimizer, lr)
        self.optimizer.step()
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, torch.device("cpu"))

    def _zero_grad(self) -> None:
        for weight in self.weights.values():
            if weight.param is not None:
                weight.param.grad = None

    # --- moving and closing --------------------------------------------------------------------

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Implement ``Engine.to``.

        Gradients are on their weights' device and move with them.
        """
        away = self._check_move(device, model=model, optimizer=optimizer, grad=grad)
        if model and not self.config.memory.offload_params:
            self.move_weights(torch.device("cpu") if away else self.device)
            self._mark("model", away)
        if optimizer and self.optimizer is not None and not self.config.memory.offload_optimizer:
            move_state(self.optimizer, torch.device("cpu") if away else self.device)
            self._mark("optimizer", away)

    def move_weights(self, device: torch.device) -> None:
        """Move weights and gradients.

        The optimizer keeps its references to the parameters.
        """
        for weight in self.weights.values():
            if weight.param is not None:
                grad = weight.param.grad
                weight.param.grad = None
                weight.param.data = weight.param.data.to(device)
                weight.param.grad = None if grad is None else grad.to(device)

    def _release(self) -> None:
        self.optimizer = None
        self.weights.clear()
        del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._close_groups()

    def _close_groups(self) -> None:
        self.layout.close()
        self.comm.close()
        if self._save_comm is not self.comm:
            self._save_comm.close()

    @property
    def _checkpoint_comm(self) -> Comm:
        return self._save_comm


class LoopbackEngineWithLMHead(LoopbackEngine):
    """Engine that returns log-probs and entropy of a causal language model."""

    kind = "language_model"


class LoopbackEngineWithValueHead(LoopbackEngine):
    """Engine that returns a scalar per token, from a linear head on the last hidden states."""

    kind = "value_model"
    gives = ("values",)
