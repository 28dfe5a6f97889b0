"""The split of one rank's batch into micro-batches on whose number all ranks agree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_api.batch import LOSS_WEIGHT, Batch
from engine_api.codec import register
from engine_api.comm import Comm, together
from engine_api.errors import BatchError
from engine_api.microbatch import PixelBudget, least_bins, split_micro_batches
from engine_api.prefixes import least_shared_bins, order_by_prefix, split_shared_micro_batches
from engine_api.results import TokenOutputs, Topology

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """A batch split into micro-batches.

    Every rank has the same number of them, and some may be empty.
    """

    batch: Batch
    """The whole batch of this rank."""

    parts: list[Batch]
    """The micro-batches.

    One whose media are not None has images on some rank, though perhaps none on this one. They are
    the last ones, so that as few as possible have images on some ranks only.
    """

    documents: list[list[int]]
    """Indices into the batch of the documents of each part."""

    loss_weight: float | None
    """Sum of ``loss_weight`` over all data-parallel ranks (float64), or None if no batch has it."""

    num_tokens: int
    """Number of tokens over all data-parallel ranks."""

    def merge(self, outputs: Sequence[TokenOutputs]) -> TokenOutputs:
        """Return the parts' outputs in the batch's token order, detached."""
        merged = {
            name: self._scatter([getattr(output, name) for output in outputs])
            for name in ("log_probs", "entropy", "values")
        }
        return TokenOutputs(**merged)

    def merge_states(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parts' hidden states ``[T, d]`` in the batch's token order."""
        whole = self._scatter(parts)
        assert whole is not None, "there is at least one micro-batch"
        return whole

    def _scatter(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        given = [v for v in values if v is not None]
        if not given:
            return None
        whole = given[0].new_zeros(self.batch.num_tokens, *given[0].shape[1:], requires_grad=False)
        for documents, value in zip(self.documents, given, strict=True):
            index = self.batch.token_index(documents)
            whole[index.to(whole.device)] = value[: len(index)].detach()
        return whole


@register
@dataclass(frozen=True, slots=True)
class _Row:
    dp_rank: int
    primary: bool
    count: int
    loss_weight: float | None
    num_tokens: int
    images: int
    digest: str


def prepare(
    batch: Batch,
    *,
    comm: Comm,
    topology: Topology,
    max_tokens: int,
    vocab_size: int,
    needs_weight: bool,
    max_patches: int | None = None,
    share_prefixes: bool = False,
    check: Callable[[Batch], None] | None = None,
) -> MicroBatches:
    """Validate on every rank, and agree on the number of micro-batches and on the denominator.

    With ``share_prefixes`` documents that begin alike come into the same micro-batch, and
    ``max_tokens`` counts the tokens that differ. Ranks also agree on which micro-batches have
    images on any of them, because a tower whose weights are sharded is computed by all ranks
    together. ``check`` is an engine's own check of its batch, which raises ``BatchError``.

    Raises ``BatchError`` (``RankFailure`` on ranks whose own batch is fine) on all ranks together.
    """
    pixels = None
    if batch.media is not None and max_patches is not None:
        pixels = PixelBudget(rows=batch.media.rows_by_document, most=max_patches)

    def examine() -> _Row:
        if check is not None:
            check(batch)
        return _examine(
            batch, topology, max_tokens, pixels, vocab_size, needs_weight, share_prefixes
        )

    rows = together(comm, examine)
    together(comm, lambda: _same_inside_data_parallel_rank(rows))
    primary = [row for row in rows if row.primary]
    count = max(1, *(row.count for row in rows))
    if share_prefixes:
        documents = split_shared_micro_batches(order_by_prefix(batch), max_tokens, count)
    else:
        documents = split_micro_batches(batch.lengths, max_tokens, count, pixels)
    parts = [batch.select(d) for d in documents]
    if any(row.images for row in rows):
        # Stable, so that the order is otherwise as without images.
        order = sorted(range(count), key=lambda i: _has_images(parts[i]))
        documents = [documents[i] for i in order]
        parts = _agree_on_images([parts[i] for i in order], comm)
    elif batch.media is not None:
        parts = [part.with_media(None) for part in parts]
    return MicroBatches(
        batch=batch,
        parts=parts,
        documents=documents,
        loss_weight=_total([row.loss_weight for row in primary]),
        num_tokens=sum(row.num_tokens for row in primary),
    )


def _has_images(part: Batch) -> bool:
    return part.media is not None and part.media.num_images > 0


def _agree_on_images(parts: list[Batch], comm: Comm) -> list[Batch]:
    """Return the micro-batches with media in those that have images on any rank.

    On each rank the ones with images are the last ones.
    """
    own = sum(map(_has_images, parts))
    first = len(parts) - max(comm.all_gather(own))
    return [
        part.with_media((part.media or part.no_media()) if i >= first else None)
        for i, part in enumerate(parts)
    ]


def _examine(
    batch: Batch,
    topology: Topology,
    max_tokens: int,
    pixels: PixelBudget | None,
    vocab_size: int,
    needs_weight: bool,
    share_prefixes: bool,
) -> _Row:
    batch.check_vocabulary(vocab_size)
    if share_prefixes:
        count = len(least_shared_bins(order_by_prefix(batch), max_tokens))
    else:
        count = len(least_bins(batch.lengths, max_tokens, pixels))
    if needs_weight and batch.num_tokens:
        batch.loss_weight  # noqa: B018 - raises the error that names the field
    weight = float(batch.loss_weight.double().sum()) if LOSS_WEIGHT in batch.fields else None
    return _Row(
        topology.dp_rank,
        topology.is_primary,
        count,
        weight,
        batch.num_tokens,
        0 if batch.media is None else batch.media.num_images,
        _digest(batch, topology),
    )


def _total(weights: Sequence[float | None]) -> float | None:
    # An empty rank may come without the field.
    given = [weight for weight in weights if weight is not None]
    return math.fsum(given) if given else None


def _digest(batch: Batch, topology: Topology) -> str:
    # No other rank has these documents.
    if topology.dp_size == topology.world_size:
        return ""
    digest = hashlib.sha1(
        repr((batch.boundaries, sorted(batch.fields))).encode(), usedforsecurity=False
    )
    for _, tensor in sorted({**batch.fields, "input_ids": batch.input_ids}.items()):
        digest.update(_bytes(tensor))
    if batch.media is not None:
        for tensor in batch.media.tensors.values():
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    # NumPy has no bfloat16.
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _same_inside_data_parallel_rank(rows: Sequence[_Row]) -> None:
    first: dict[int, tuple[int, str]] = {}
    for rank, row in enumerate(rows):
        other, digest = first.setdefault(row.dp_rank, (rank, row.digest))
        if digest != row.digest:
            raise BatchError(
                "input_ids",
                f"ranks {other} and {rank} were given different documents or fields",
                why=f"both belong to data-parallel rank {row.dp_rank}",
                remedy="give the same batch to every rank with the same topology.dp_rank",
            )
