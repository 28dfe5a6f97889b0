"""The contract of a rollout, which generates completions from the engine's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from engine_api.codec import register
from engine_api.weights import WeightExport

if TYPE_CHECKING:
    import torch

    from engine_api.contract import Engine
    from engine_api.media import Media

FinishReason = Literal["stop", "length", "abort"]


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling settings of a generation."""

    n: int = 1
    """Number of completions per prompt."""

    max_new_tokens: int = 256
    """Largest number of tokens of a completion."""

    temperature: float = 1.0
    """Divisor of the logits, where 0 is greedy decoding."""

    top_p: float = 1.0
    """Probability mass that nucleus sampling keeps, in (0, 1], where 1 keeps all tokens."""

    top_k: int = 0
    """Number of most likely tokens that are kept, where 0 keeps all tokens."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion."""

    seed: int | None = None
    """Seed of the draws, or None to leave it to the rollout."""


@register
@dataclass(frozen=True, kw_only=True, eq=False)  # tensors have no truth value to compare by
class PromptImages:
    """The images of one prompt, in both forms in which rollouts take them (since contract 1.4).

    A rollout computes with ``media``, or gives ``pictures`` and ``placeholders`` to a server that
    processes and expands them itself.

    Attributes:
        media: the images as the model's processor made them, which stand for the image tokens of
            the prompt. It is one document.
        placeholders: ids of the prompt with one placeholder for each image, from which a server
            must arrive at the ids of the prompt.
        pictures: the images before processing, each ``[height, width, 3]`` uint8 in RGB, or the
            frames of a video ``[n, height, width, 3]``.
    """

    media: Media
    placeholders: list[int]
    pictures: tuple[torch.Tensor, ...]


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        prompt_index: index of its prompt.
        tokens: generated ids, the stop token included.
        log_probs: one value per token, of the sampled token under the distribution that it was
            drawn from (temperature applied; before top-p and top-k truncation, and before tokens of
            images are left out).
        weight_versions: one value per token, the version of the weights that generated it.
        finish_reason: ``stop`` at a stop token, ``length`` at ``max_new_tokens``, ``abort`` after
            an abort.
        routed_experts: ``[P + T, L, k]`` signed integers, for the P tokens of the prompt and the T
            of ``tokens`` by decoder layer the experts that served the token as an input, -1 where
            they are not known, as at the last token; None where the rollout does not record them
            (since contract 1.4).
        passes: number of forward passes that generated the tokens, fewer than tokens with
            speculative decoding; 0 where the rollout does not count them (since contract 1.4).
    """

    prompt_index: int
    tokens: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    routed_experts: torch.Tensor | None = field(default=None, repr=False, compare=False)
    passes: int = field(default=0, repr=False, compare=False)


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """The result of one weight sync.

    Attributes:
        version: version of the weights that are served from now on.
        num_tensors: number of Hugging Face tensors that were installed.
        num_quantized: number of those in FP8.
        num_bytes: size in bytes of those tensors as they were installed, scales included.
        seconds: duration of each phase: ``gather``, ``quantize``, ``transfer``, ``install``,
            ``audit``; ``paused`` is the time for which running generations waited (since contract
            1.4). A phase that a rollout does not have is absent. Phases may overlap, so their sum
            is not the duration of the sync.
        audited: True if the served weights were compared with the export.
        wire_bytes: bytes that the rollout's process received from the engine's, scales and padding
            included; 0 where both are the same process. The carrier sets it, not the rollout (since
            contract 1.2).
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
    """A converter of an engine's weights into a rollout's form, on every rank of the engine.

    A rollout plug-in may bring its own (``EnginePlugin.exporter``), which for example quantizes
    before it gathers. Without one the engine's own export is installed.
    """

    def export(self, engine: Engine) -> WeightExport:
        """Return the stream of one sync.

        All ranks of the engine call it and exhaust it, including those without a rollout.
        """
        ...

    def close(self) -> None:
        """Free everything.

        A second call does nothing.
        """
        ...


class WholeExporter:
    """An exporter of whole tensors in ``dtype``, from the engine's own export.

    None is the stored dtype.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def export(self, engine: Engine) -> WeightExport:
        """Return ``engine.get_per_tensor_param`` in the exporter's dtype."""
        return engine.get_per_tensor_param(dtype=self._dtype)

    def close(self) -> None:
        """Do nothing, because the exporter holds nothing."""


class WeightSender(Protocol):
    """The engine's end of a ``WeightWire``, on the engine's first rank."""

    @property
    def address(self) -> str:
        """The address for the receivers of the next ``send`` only.

        It may change each time. A process that knows it may take part. It is given to the receivers
        and never logged.
        """
        ...

    def send(self, export: WeightExport) -> int:
        """Carry one export to every receiver, and return the number of bytes sent to each.

        Raises the errors of the export, and ``RolloutError`` when a receiver fails, is gone or
        falls silent. Then the sync fails at all receivers, and the export may be left unfinished:
        the caller runs it to its end.
        """
        ...


@runtime_checkable
class WatchedSender(WeightSender, Protocol):
    """A sender that its caller may interrupt (since contract 1.4, optional).

    Only the caller may know that a receiver's process has ended before it connected. Without this
    method the sender waits for such a receiver until its deadline.
    """

    def send_watched(self, export: WeightExport, watch: Callable[[], None]) -> int:
        """Do what ``send`` does, and call ``watch`` at least once a second while nothing arrives.

        An error of ``watch`` ends the sync as a receiver's does, and is raised.
        """
        ...


@runtime_checkable
class WeightWire(Protocol):
    """A carrier of exports to rollouts in processes of their own (since contract 1.2).

    A rollout plug-in may bring its own (``EnginePlugin.wire``), for the tensors that its exporter
    makes and its rollout installs. It is constructed with the arguments ``resolution`` and
    ``timeout_s``, the deadline of each step of a sync in seconds. Without one, and for an engine
    that does not declare ``export_shards``, the caller carries the engine's whole tensors.
    """

    def serve(self, host: str, receivers: int) -> WeightSender:
        """Return the engine's end.

        ``host`` is the address at which the ``receivers`` processes reach this process.
        """
        ...

    def receive(self, address: str, rank: int) -> AbstractContextManager[WeightExport]:
        """Return a rollout's end as a context with one export, for ``update_weights``.

        ``rank`` counts the receivers from 0. The sender is informed that everything is installed
        when the block ends, and that the sync failed when it raises. Raises ``RolloutError`` if the
        sender cannot be reached, failed, fell silent, or carries a sync other than that of
        ``address``.
        """
        ...

    def close(self) -> None:
        """Free everything that either end keeps between syncs.

        A second call does nothing.
        """
        ...


class Generation(Protocol):
    """The completions of one prompt, which may still be running."""

    def done(self) -> bool:
        """Return whether ``result`` would return at once."""
        ...

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all ``sampling.n`` completions and return them, with ``prompt_index`` 0.

        Raises ``RolloutError`` when the rollout failed, and ``TimeoutError`` after ``timeout_s``
        seconds (None: no limit).
        """
        ...

    def abort(self) -> None:
        """Stop the generation.

        The tokens generated so far become completions that end with ``abort``.
        """
        ...


@runtime_checkable
class Rollout(Protocol):
    """The members of a rollout that the trainer calls.

    Nothing else is called from outside.
    """

    weight_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        """Return ``sampling.n`` completions per prompt, grouped by prompt.

        Raises ``RolloutError`` if the generation fails.
        """
        ...

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """Install a whole export as the weights of ``version``.

        If it fails it raises ``RolloutError``, and the rollout refuses to generate until an update
        succeeds.
        """
        ...

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Free the memory of weights and of caches, or of one of them."""
        ...

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Allocate the memory again that ``sleep`` freed.

        Weights that slept must be updated before the next ``generate``.
        """
        ...

    def close(self) -> None:
        """Free everything.

        A second call does nothing.
        """
        ...


@runtime_checkable
class VisionRollout(Rollout, Protocol):
    """A rollout that declares ``vision``, and takes prompts with images (since contract 1.4)."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """Return ``sampling.n`` completions per prompt (see ``Rollout.generate``).

        Args:
            prompts: token ids, in which each image is a run of as many image tokens as it has
                features. They are the ids that the completions are trained behind.
            sampling: the sampling settings.
            images: for each prompt its images, or None without any. None: no prompt has any.

        No completion has a token of an image or a video. Raises ``RolloutError`` also for images
        that are not those of their prompt, and where a server finds other ids than the prompt's.
        """
        ...


@runtime_checkable
class AsyncRollout(Rollout, Protocol):
    """A rollout that also generates in the background."""

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        """Start a generation in the background and return it.

        Each token carries the version of the weights that generated it. Raises ``RolloutError``.
        """
        ...


class InFlightRollout(AsyncRollout, Protocol):
    """A rollout whose weights change while it generates (since contract 1.4).

    Its descriptor has ``in_flight``, and it was made with the argument ``in_flight=True``. It
    refuses the argument with an ``UnsupportedCapability`` that names ``in_flight`` together with
    any other argument that it cannot serve so.
    """

    kv_cache_in_flight: Literal["recompute", "keep"]
    """What becomes of the keys and values of unfinished generations at an update.

    With ``recompute`` the new weights compute them again, with ``keep`` they stay those of the old
    weights.
    """

    @property
    def tokens_generated(self) -> int:
        """Number of tokens of all generations so far, also of unfinished ones.

        While it grows, a caller knows that the rollout works, however long its completions are.
        """
        ...

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """Install a whole export between two tokens of the generations that run.

        They pause, and go on once the weights are installed. Tokens made before carry the old
        version, tokens made after it the new one. A generation that had no token yet is made by
        the new weights alone. If the update fails, so do all of these generations, with
        ``RolloutError``. ``SyncResult.seconds`` has their pause as ``paused``.
        """
        ...
