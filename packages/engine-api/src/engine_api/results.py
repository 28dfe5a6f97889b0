"""The return types of an engine's members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """Per-token results of one batch, in its token order.

    By the alignment rule they are 0 at first tokens. None stands for an output that was not
    computed.

    Attributes:
        log_probs: ``[T]`` float32, ``log p(token t | its document before t)`` at the call's
            temperature.
        entropy: ``[T]`` float32, entropy in nats of the same distribution.
        values: ``[T]`` float32, a value model's estimate from the document before t.
        divergence: ``[T]`` float32, the divergence of the distribution that token t is drawn from
            to a teacher's, in nats (``engine_api.distillation``; since contract 1.4).
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    divergence: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the outputs that were computed."""
        known = (self.log_probs, self.entropy, self.values, self.divergence)
        return [t for t in known if t is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The result of a loss function: sums over the tokens that it received, never means."""

    loss: torch.Tensor
    """The loss as a differentiable scalar."""

    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict[str, Any])
    """Further sums by name, which the engine adds up over micro-batches and ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardOutput:
    """The global result of one ``forward_backward``, the same on all ranks."""

    loss: float
    """Sum of the loss over all tokens of all ranks, divided by ``denominator``."""

    metrics: Mapping[str, float]
    """Sums of the loss function's metrics over all tokens of all ranks, not divided.

    An engine's option may add a metric of its own, as ``balance_loss`` does.
    """

    denominator: float
    """Divisor of the loss, or 0 where no token carries loss."""

    num_tokens: int
    """Number of tokens over all data-parallel ranks."""

    num_micro_batches: int
    """Number of micro-batches computed on each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The result of one ``optimizer_step``, the same on all ranks."""

    grad_norm: float
    """Global 2-norm of the gradient before clipping."""

    lr: float
    """Learning rate of this step, or the rate that a skipped step would have had."""

    weight_version: int
    """Number of applied steps after this call."""

    skipped: str | None = None
    """Reason why the step was not applied (weights and optimizer are unchanged then), or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutput:
    """The result of one ``train_batch``, the same on all ranks.

    Its fields are those of ``ForwardBackwardOutput`` and ``StepOutput``.
    """

    loss: float
    metrics: Mapping[str, float]
    denominator: float
    num_tokens: int
    num_micro_batches: int
    grad_norm: float
    lr: float
    weight_version: int
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """The description of a checkpoint that was saved or loaded."""

    path: Path
    """Folder of the checkpoint."""

    step: int
    """Number of optimizer steps applied to its weights."""

    extra: Mapping[str, Any]
    """The JSON that the caller passed to ``save_checkpoint``."""

    num_bytes: int
    """Size of its files in bytes."""


class CheckpointHandle(Protocol):
    """A save that may still be running."""

    def done(self) -> bool:
        """Return whether the save has ended: the checkpoint has its final name, or failed."""
        ...

    def result(self) -> CheckpointInfo:
        """Wait for the save and return its description.

        Raises the error of the save (``CheckpointWriteError``, …).
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The position of this rank in the world and in each kind of parallelism.

    Ranks with the same ``dp_rank`` work on the same documents and must be given the same batch;
    ``is_primary`` is true on exactly one of them.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    is_primary: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of the kinds of parallelism by name: tp, pp, cp, ep, ulysses, …"""
