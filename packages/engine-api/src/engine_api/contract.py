"""What a caller may call on an engine. Nothing else is called from outside.

What every engine owes (each line is a conformance case) is in docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.losses import LossFn
from engine_api.results import (
    CheckpointHandle,
    CheckpointInfo,
    ForwardBackwardOutput,
    StepOutput,
    TokenOutputs,
    Topology,
    TrainOutput,
)
from engine_api.weights import ShardExport, WeightExport

if TYPE_CHECKING:
    import torch

Adapter = Literal["merged", "only", "base"]
"""Which weights are exported where there is an adapter: base and adapter in one (*merged*), the adapter alone under PEFT's
names (*only*), or everything but the adapter, as it is stored (*base*; since contract 1.1)."""


@runtime_checkable
class Engine(Protocol):
    """Trains and evaluates one model on one process group."""

    @property
    def topology(self) -> Topology:
        """Where this rank stands."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this engine can do: what its plug-in declares."""
        ...

    @property
    def weight_version(self) -> int:
        """Optimizer steps applied since the weights were made; carried by exports and rollouts."""
        ...

    def initialize(self) -> None:
        """Build model, optimizer and schedule; load the Hugging Face weights. Once."""
        ...

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        """Zero grad, forward and backward over micro-batches, clip, step, schedule.

        Args:
            batch: this data-parallel rank's documents; may be empty on some ranks.
            loss: a sum over tokens (see ``engine_api.losses``).
            denominator: what the global sum is divided by; default: the sum of ``loss_weight`` over all
                data-parallel ranks.
            temperature: logits are divided by it before log-probs and entropy.

        Raises:
            BatchError: on every rank together; the engine stays usable.
        """
        ...

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> ForwardBackwardOutput:
        """The first half of ``train_batch``; gradients add up until ``optimizer_step``."""
        ...

    def optimizer_step(self) -> StepOutput:
        """The second half: clip, step, schedule, zero grad. A non-finite gradient skips the step."""
        ...

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        """Per-token log-probs (and entropy, or values), detached, on the engine's device; changes nothing.

        ``adapter=False`` computes with the LoRA adapter off, as a reference model.
        """
        ...

    def save_checkpoint(
        self, directory: Path | str, *, extra: Mapping[str, Any] | None = None
    ) -> CheckpointHandle:
        """Write the whole training state to ``directory``; atomic. ``extra`` is the caller's own JSON."""
        ...

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        """Restore from a checkpoint, or from the latest of a folder of checkpoints; all or nothing."""
        ...

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Write a model that ``transformers.from_pretrained`` loads (adapters merged)."""
        ...

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """(Hugging Face name, whole tensor), tied weights once, one order on all ranks, layer by layer.

        All ranks must exhaust it. ``dtype=None`` is the stored dtype. At most ``bucket_bytes`` of whole
        tensors (or one larger tensor) exist at a time; a tensor is valid until the next one is asked for.
        ``adapter="base"`` has the names and the order of ``merged``; with a LoRA adapter only a load changes its values
        (a value head's apart).

        Raises:
            ConfigError: ``adapter`` is none of ``Adapter``, or not ``merged`` and there is no adapter.
        """
        ...

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """(name, this rank's shard, ``ShardSpec``) in the same order: no gather.

        ``adapter`` (since contract 1.1): as ``get_per_tensor_param``, errors included.
        """
        ...

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parts to ``cpu``, which gives their memory back to the device, or back to the engine's device."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...
