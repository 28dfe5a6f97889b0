"""What the members of an engine return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """Per-token results of one batch, in its token order; by the alignment rule 0 at first tokens.

    Attributes:
        log_probs: ``[T]`` float32, ``log p(token t | its document before t)`` at the call's temperature.
        entropy: ``[T]`` float32, entropy in nats of the same distribution.
        values: ``[T]`` float32, a value model's estimate from the document before t.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss function returns: sums over the tokens that it was given, never means."""

    loss: torch.Tensor  # scalar, differentiable
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardOutput:
    """The global result of one ``forward_backward``, the same on all ranks."""

    loss: float  # sum over all tokens of all ranks, divided by denominator
    metrics: Mapping[str, float]  # sums over all tokens of all ranks
    denominator: float
    num_tokens: int  # over all data-parallel ranks
    num_micro_batches: int  # on each rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The result of one ``optimizer_step``, the same on all ranks."""

    grad_norm: float  # global 2-norm, before clipping
    lr: float  # the rate of this step (of the one that would have been, when skipped)
    weight_version: int  # after the step
    skipped: str | None = (
        None  # why the step was not applied; weights and optimizer are then as before
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutput:
    """The result of one ``train_batch``, the same on all ranks."""

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
    """What was saved or loaded."""

    path: Path
    step: int
    extra: Mapping[str, Any]  # what the caller gave to save_checkpoint
    num_bytes: int


class CheckpointHandle(Protocol):
    """A save that may still be running."""

    def done(self) -> bool:
        """Whether the checkpoint stands under its final name (or failed)."""
        ...

    def result(self) -> CheckpointInfo:
        """Wait; then what was saved. Raises what the save raised (``CheckpointWriteError``, …)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Where this rank stands.

    Ranks with the same ``dp_rank`` work on the same documents and must be given the same batch;
    ``is_primary`` is true on exactly one of them.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    is_primary: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])  # tp, pp, cp, ep, ulysses, …
