"""The training state as boxes under canonical keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from engine_api.base import BaseEngine
from engine_api.errors import CheckpointMismatch, ConfigError
from engine_api.manifest import Entry
from engine_api.optimizers import check_shapes, has_scalars_on_device
from engine_api.weights import ShardSpec
from engine_loopback.optimizer import AdamW, state_fields
from engine_loopback.weights import Partition, Weight


class CheckpointEngine(BaseEngine):
    """Saving and restoring of the training state.

    Keys are ``model.<name>``, ``adapter.<name>`` and ``optim.<name>.<field>``.
    """

    adamw: type[AdamW] = AdamW
    weights: dict[str, Weight]
    partition: Partition
    optimizer: torch.optim.Optimizer | None
    device: torch.device

    def key_of(self, weight: Weight) -> str:
        """Return the canonical key of a weight."""
        return f"{'adapter' if weight.adapter else 'model'}.{weight.name}"

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Implement ``BaseEngine.state_shards``."""
        state = {
            self.key_of(weight): (weight.local, weight.box) for weight in self.weights.values()
        }
        for weight, field, value in self.optimizer_state():
            state[f"optim.{weight.name}.{field}"] = (value, self.state_box(weight, value))
        return state

    def optimizer_state(self) -> Iterator[tuple[Weight, str, Tensor]]:
        """Yield (weight, field, live tensor) of the optimizer's state.

        Raises:
            ConfigError: if a field is no tensor of its weight's shape.
        """
        states = self.optimizer.state if self.optimizer is not None else {}
        for weight in (weight for weight in self.weights.values() if weight.param is not None):
            for field, value in states.get(weight.held, {}).items():
                fits = isinstance(value, Tensor) and value.shape in ((), weight.box.shape)
                if not fits:
                    raise ConfigError(
                        "optimizer.name",
                        f"its state {field!r} is no tensor of its weight's shape",
                        remedy="this optimizer cannot be saved; use adamw",
                    )
                yield weight, field, value

    def state_box(self, weight: Weight, value: Tensor) -> ShardSpec:
        """Return the box of a state tensor.

        A moment has its weight's box; a step count is whole on every rank with part of the weight.
        """
        if value.dim():
            return weight.box
        return ShardSpec.whole((), replica=self.partition.holder_index(weight.name))

    def _optimizer_fields(self) -> Collection[str]:
        if self.config.optimizer is None:
            return ()
        return state_fields(self.config.optimizer, self.adamw)

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        wanted = {
            self.key_of(weight): (weight.box, weight.dtype) for weight in self.weights.values()
        }
        return wanted | (self.optimizer_layout(entries) if self.optimizer else {})

    def optimizer_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        """Return the boxes and dtypes of saved optimizer state that this rank needs, by key.

        A weight that this rank does not hold has none.
        """
        saved = {
            key: key.removeprefix("optim.").rpartition(".")
            for key in entries
            if key.startswith("optim.")
        }
        self.same_optimizer({field for _, _, field in saved.values()})
        if saved and self.optimizer is not None:
            check_shapes(self.optimizer, entries)
        layout: dict[str, tuple[ShardSpec, torch.dtype]] = {}
        for key, (name, _, _) in saved.items():
            if self.is_trained(name):
                weight = self.weights[name]
                # Moments have the dtype of this engine's weights, whatever the writer's had.
                if entries[key].shape:
                    layout[key] = (weight.box, weight.dtype)
                else:
                    layout[key] = (ShardSpec.whole(()), getattr(torch, entries[key].dtype))
        return layout

    def is_trained(self, name: str) -> bool:
        """Return whether the optimizer updates this weight, on any rank."""
        return name in self.weights and self.weights[name].trainable

    def same_optimizer(self, fields: set[str]) -> None:
        """Raise ``CheckpointMismatch`` unless ``fields`` are those of this engine's optimizer."""
        assert self.config.optimizer is not None
        own = state_fields(self.config.optimizer, self.adamw)
        if fields and fields != own:
            raise CheckpointMismatch(
                "the checkpoint is of another optimizer",
                where=self.config.optimizer.name,
                why=(
                    f"it keeps {', '.join(sorted(own)) or 'nothing'}, "
                    f"saved is {', '.join(sorted(fields))}"
                ),
                remedy="load it with the optimizer that it was saved with",
            )

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        for weight in self.weights.values():
            weight.local.copy_(tensors[self.key_of(weight)])
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for key in (key for key in tensors if key.startswith("optim.")):
                name, _, field = key.removeprefix("optim.").rpartition(".")
                if self.weights[name].param is not None:
                    self.restore_state(self.optimizer, self.weights[name], field, tensors[key])

    def restore_state(
        self, optimizer: torch.optim.Optimizer, weight: Weight, field: str, value: Tensor
    ) -> None:
        """Put a loaded tensor where the optimizer expects it.

        Step counts are mostly on the CPU.
        """
        away = self.config.memory.offload_optimizer
        stays = away if value.dim() else not has_scalars_on_device(optimizer)
        optimizer.state[weight.held][field] = value.to(
            "cpu" if stays else weight.held.device, copy=True
        )
