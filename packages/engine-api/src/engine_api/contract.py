"""The members of an engine that a caller may call.

Nothing else is called from outside. The obligations of every engine (each line is a conformance
case) are in docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.distillation import OutputHead
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
"""Selection of the exported weights of a model with an adapter.

*merged* exports base and adapter in one, *only* the adapter alone under PEFT's names, and *base*
everything but the adapter, as it is stored (since contract 1.1).
"""


@runtime_checkable
class Engine(Protocol):
    """An engine that trains and evaluates one model on one process group."""

    @property
    def topology(self) -> Topology:
        """The position of this rank in the world and in each kind of parallelism."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of this engine, as its plug-in declares them."""
        ...

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps applied since the weights were made.

        Exports and rollouts carry it.
        """
        ...

    def initialize(self) -> None:
        """Build model, optimizer and schedule, and load the Hugging Face weights.

        It is called once.
        """
        ...

    def resolved(self) -> Mapping[str, Any]:
        """Return what the engine does of what was asked (since contract 1.3).

        The keys are the fields of ``EngineConfig`` in the sections ``parallelism``, ``precision``,
        ``memory`` and ``checkpoint``, with dots, and ``model.attention``. A value that the
        configuration left to the engine (``auto``, -1) is the one that it chose; all others are
        carried out as they were asked for, or the engine has refused them.
        """
        ...

    def train_batch(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> TrainOutput:
        """Apply one optimizer step to the loss of a batch.

        The order is: drop the gradients of earlier calls, forward and backward over micro-batches,
        clip, step, schedule.

        Args:
            batch: this data-parallel rank's documents; may be empty on some ranks. A field
                ``routed_experts`` selects the experts of each token (since contract 1.4).
            loss: a sum over tokens (see ``engine_api.losses``). One that needs ``divergence`` has
                an attribute ``teaching``, and fields of a teacher in the batch, which it is not
                given itself (since contract 1.4).
            denominator: divisor of the global sum; None is the sum of ``loss_weight`` over all
                data-parallel ranks.
            temperature: divisor of the logits before log-probs and entropy.

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
        """Run the first half of ``train_batch``, without dropping earlier gradients.

        Gradients add up until ``optimizer_step``, each call's divided by its own denominator. A
        load, an error of a loss, and ``train_batch`` drop them; a bad batch, inference, an export
        and a save do not.
        """
        ...

    def optimizer_step(self) -> StepOutput:
        """Run the second half of ``train_batch``: clip, step, schedule, zero the gradients.

        A gradient that is not finite, or a loss of any of the calls since the last step, skips the
        step.

        Raises:
            EngineStateError: there was no ``forward_backward`` since the last step or load.
        """
        ...

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        """Return per-token log-probs (and entropy, or values), detached, on the engine's device.

        The call changes nothing. ``adapter=False`` computes with the LoRA adapter off, as a
        reference model.
        """
        ...

    def infer_states(self, batch: Batch) -> torch.Tensor:
        """Return the final hidden states ``[T, d]`` from which tokens are predicted.

        It is part of the capability ``distillation`` (since contract 1.4). Row t is about token t,
        as a log-prob is: the state after the token before it, and 0 at first tokens. The result is
        detached, on the CPU, in the dtype of the computation. ``output_head`` turns it into logits.
        The call changes nothing.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return a copy of the whole output head, in the dtype of the computation.

        It is part of the capability ``distillation`` (since contract 1.4). All ranks must call it,
        and each gets the whole head on its device. No later step changes it.
        """
        ...

    def set_teacher(self, head: OutputHead | None) -> None:
        """Keep a teacher's output head for losses that need ``divergence``, or drop it.

        It is part of the capability ``distillation`` (since contract 1.4). The teacher may be of
        another size, another engine, or this engine itself. Every rank is given the same head. See
        ``engine_api.distillation``.
        """
        ...

    def save_checkpoint(
        self, directory: Path | str, *, extra: Mapping[str, Any] | None = None
    ) -> CheckpointHandle:
        """Write the whole training state to ``directory`` atomically.

        ``extra`` is the caller's own JSON.
        """
        ...

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        """Restore from a checkpoint, or from the latest of a folder of checkpoints.

        A load that fails changes nothing.
        """
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
        """Yield each weight as (Hugging Face name, whole tensor), layer by layer.

        Tied weights come once, and the order is the same on all ranks. All ranks must exhaust the
        iterator. ``dtype=None`` is the stored dtype. At most ``bucket_bytes`` of whole tensors (or
        one larger tensor) exist at a time; a tensor is valid until the next one is asked for.
        ``adapter="base"`` has the names and the order of ``merged``; with a LoRA adapter only a
        load changes its values (except those of a value head).

        Raises:
            ConfigError: ``adapter`` is not one of ``Adapter``, or it is not ``merged`` and there is
                no adapter.
        """
        ...

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """Yield each weight as (name, this rank's shard, ``ShardSpec``) without a gather.

        The order is that of ``get_per_tensor_param``. ``adapter`` (since contract 1.1) has the
        meaning and the errors that it has there.
        """
        ...

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the chosen parts to ``cpu`` or back to the engine's device.

        A move to ``cpu`` frees the device memory of the parts.
        """
        ...

    def close(self) -> None:
        """Free everything that the engine holds.

        A second call does nothing.
        """
        ...
