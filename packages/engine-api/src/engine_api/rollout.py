"""The contract of a rollout: it generates completions from the engine's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from engine_api.codec import register
from engine_api.weights import WeightExport

if TYPE_CHECKING:
    import torch

    from engine_api.contract import Engine

FinishReason = Literal["stop", "length", "abort"]


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are drawn."""

    n: int = 1  # completions a prompt
    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which prompt it answers.
        tokens: generated ids, the stop token included.
        log_probs: one a token, of the sampled token under the distribution that it was drawn from
            (temperature applied; before top-p and top-k truncation).
        weight_versions: one a token, the version of the weights that made it.
        finish_reason: ``stop`` at a stop token, ``length`` at ``max_new_tokens``, ``abort``.
    """

    prompt_index: int
    tokens: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """What one weight sync did.

    Attributes:
        version: of the weights that are served from now on.
        num_tensors: Hugging Face tensors that were installed; ``num_quantized`` of them in FP8.
        num_bytes: of those tensors as they were installed, scales included.
        seconds: a phase each: ``gather``, ``quantize``, ``transfer``, ``install``, ``audit``; a phase that a rollout
            has not is absent. Phases may overlap: their sum is not the time of the sync.
        audited: whether the served weights were compared with the export.
        wire_bytes: that came to the rollout's process from the engine's, scales and padding included; 0 where both are one.
            Whoever carries them says it, not the rollout (since contract 1.2).
    """

    version: int
    num_tensors: int = 0
    num_quantized: int = 0
    num_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    audited: bool = False
    wire_bytes: int = 0


@runtime_checkable
class WeightExporter(Protocol):
    """Turns an engine's weights into what a rollout installs, on every rank of the engine.

    A rollout plug-in may bring its own (``EnginePlugin.exporter``), which quantizes before it gathers, say; without
    one the engine's own export is installed.
    """

    def export(self, engine: Engine) -> WeightExport:
        """One sync's stream. All ranks of the engine call it and exhaust it, also those without a rollout."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class WholeExporter:
    """The engine's own export, whole tensors in ``dtype`` (None: as stored)."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def export(self, engine: Engine) -> WeightExport:
        """``engine.get_per_tensor_param``."""
        return engine.get_per_tensor_param(dtype=self._dtype)

    def close(self) -> None:
        """Nothing to give back."""


class WeightSender(Protocol):
    """The engine's end of a ``WeightWire``, on the engine's first rank."""

    @property
    def address(self) -> str:
        """For the receivers of the next ``send`` alone, which may be another one each time.

        Whoever knows it may take part: it goes to the receivers, into no log.
        """
        ...

    def send(self, export: WeightExport) -> int:
        """Carry one export to every receiver; the bytes that each was sent.

        Raises what the export raises; ``RolloutError`` when a receiver fails, is gone or falls silent. Then it fails at
        all of them, and the export may be left unfinished: the caller runs it to its end.
        """
        ...


@runtime_checkable
class WeightWire(Protocol):
    """Brings exports to rollouts in processes of their own (since contract 1.2).

    A rollout plug-in may bring its own (``EnginePlugin.wire``), for what its exporter makes and its rollout installs. It is
    made with the arguments ``resolution`` and ``timeout_s``, of each step of a sync. Without one, and for an engine that does
    not declare ``export_shards``, the caller carries the engine's whole tensors.
    """

    def serve(self, host: str, receivers: int) -> WeightSender:
        """The engine's end. ``host``: where the ``receivers`` processes reach this one."""
        ...

    def receive(self, address: str, rank: int) -> AbstractContextManager[WeightExport]:
        """A rollout's end: one export, for ``update_weights``; ``rank`` from 0.

        When the block ends the sender hears that all is installed, when it raises that it failed. Raises ``RolloutError``:
        the sender cannot be reached, failed, fell silent, or carries another sync than that of ``address``.
        """
        ...

    def close(self) -> None:
        """Give back what either end keeps between syncs; idempotent."""
        ...


class Generation(Protocol):
    """Completions of one prompt that may still be running."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        ...

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all ``sampling.n`` completions; ``prompt_index`` is 0.

        Raises ``RolloutError`` when the rollout failed, ``TimeoutError`` after ``timeout_s``.
        """
        ...

    def abort(self) -> None:
        """Stop here: what was generated so far comes as completions that end with ``abort``."""
        ...


@runtime_checkable
class Rollout(Protocol):
    """What the trainer calls. Nothing else is called from outside."""

    weight_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        """``sampling.n`` completions a prompt, grouped by prompt. Raises ``RolloutError``."""
        ...

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """Install a whole export. Raises ``RolloutError`` and refuses to generate until a good one."""
        ...

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Give back the memory of weights and of caches, or of one of them."""
        ...

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Take it again; after the weights slept they must be updated before the next ``generate``."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


@runtime_checkable
class AsyncRollout(Rollout, Protocol):
    """A rollout that also generates in the background."""

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        """Begin to generate. Tokens carry the weight version that made them. Raises ``RolloutError``."""
        ...
