"""The inputs of one micro-batch: documents packed, padded, and divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_api.balance import Balance
from engine_api.batch import (
    ROUTED_EXPERTS,
    TEACHER_STATES,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    Batch,
)
from engine_api.devices import move_tensor
from engine_api.distillation import OutputHead, Teaching
from engine_api.hf_vision import Positions, Vision
from engine_torch.attention import (
    Packing,
    build_context_packing,
    build_packing,
    build_tree_packing,
)
from engine_torch.divergence import Taught
from engine_torch.prefixes import build_tree, take_rows
from engine_torch.ulysses import gather_tokens
from engine_torch.vision import PackedImages, pack_images

__all__ = ["PackedInputs", "pack_inputs", "pack_tree"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """One micro-batch on the device, padded to what the engine needs.

    T is the number of tokens, T' that with padding, and n the number of ranks that share them
    (Ulysses or context parallelism). Tensors of T'/n tokens hold this rank's slice.

    Attributes:
        input_ids: ``[1, T'/n]`` int64.
        position_ids: ``[1, T'/n]`` int64, each token's position in its document. Where documents
            have images whose tokens have positions in three dimensions ``[4, 1, T'/n]``: the
            position in the document, then in time, height and width.
        targets: ``[T'/n]`` int64, the token that follows each token.
        first: ``[T']`` bool, true at the first token of each document.
        packing: the documents, for attention.
        size: T.
        coefficients: ``[T'/n]`` float32, the loss's derivative by the log-prob of each target up to
            a factor, or None where it is not known.
        parents: ``[T']`` int64, the token before each in its documents, where documents share their
            beginnings, or None. T' then counts the tokens of the tree
            (``engine_torch.prefixes``), and ``targets`` are the tokens themselves.
        rows: ``[T]`` int64, the token of the tree for each token of the documents, or None.
        experts: ``[T'/n, L, k]`` signed integers, the experts that serve each token by layer, -1
            where the router selects them, or None where it selects all of them.
        balance: the balance loss of this micro-batch, which the routers add, or None for none.
        images: the images of the documents, or None where no rank has any.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    first: Tensor
    packing: Packing
    size: int
    coefficients: Tensor | None = None
    parents: Tensor | None = None
    rows: Tensor | None = None
    experts: Tensor | None = None
    balance: Balance | None = None
    taught: Taught | None = None
    images: PackedImages | None = None

    def predicting(self, hidden: Tensor) -> Tensor:
        """Return the hidden states ``[T'/n, d]`` that predict ``targets``."""
        return hidden if self.parents is None else take_rows(hidden, self.parents)

    def align(self, per_target: Tensor, group: Any) -> Tensor:
        """Return values ``[T'/n, …]`` of targets as the contract's values ``[T, …]`` of tokens."""
        first = self.first.view(-1, *(1,) * (per_target.dim() - 1))
        # A copy, because FSDP registers its backward hook on the output, which a view would lose.
        if self.rows is not None:
            return take_rows(per_target.masked_fill(first, 0.0), self.rows).clone()
        whole = per_target if group is None else gather_tokens(per_target, group)
        return whole.roll(1, 0).masked_fill(first, 0.0)[: self.size].clone()


def pack_inputs(
    batch: Batch,
    *,
    group: Any,
    parts: int,
    part: int,
    kernel: str,
    multiple: int,
    device: torch.device,
    coefficients: Tensor | None = None,
    teaching: Teaching | None = None,
    teacher: OutputHead | None = None,
    gathers_keys: bool = False,
    vision: Vision | None = None,
    positions_of: Positions | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedInputs:
    """Pad a batch to a multiple of ``multiple`` and of ``parts``, and move it to the device.

    The padding is a document of its own at the end. An empty batch becomes one document of padding.

    Args:
        batch: the documents, the same on every rank of the group.
        group: process group of the ranks that share the tokens, or None.
        parts: number of ranks in the group.
        part: this rank's index in the group.
        kernel: name of the kernel of attention (``engine_torch.attention.choose_kernel``).
        multiple: number of tokens of which each part is a multiple.
        device: device of the tensors.
        coefficients: ``[T]`` the loss's derivative by the log-prob of each token up to a factor, or
            None where it is not known.
        teaching: what the loss asks for of its teacher, whose fields the batch has; None without.
        teacher: the teacher's head where ``teaching`` reads states.
        gathers_keys: true where the group is of context parallelism, whose ranks gather keys and
            values, and false where it is of Ulysses.
        vision: the images that the model takes, or None.
        positions_of: positions of a document with images, or None where they are as without.
        dtype: dtype of the computation, for pixels.
    """
    step = multiple * parts
    padding = -batch.num_tokens % step if batch.num_tokens else step
    lengths = list(batch.lengths)
    if padding:
        lengths.append(padding)
    ids = torch.cat([batch.input_ids.cpu(), torch.zeros(padding, dtype=torch.int64)])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(len(ids)) - torch.repeat_interleave(ends[:-1], torch.tensor(lengths))
    mine = torch.arange(len(ids)).chunk(parts)[part]
    first = positions == 0
    images = None if vision is None else pack_images(batch, vision, mine, device, dtype)
    blocks = None
    if vision is not None and vision.bidirectional and images is not None:
        blocks = torch.cat([vision.number_image_tokens(batch), torch.full((padding,), -1)])
    if positions_of is not None and images is not None:
        positions = _position_images(batch, positions, positions_of)
    if coefficients is not None:
        coefficients = move_tensor(_shift_to_targets(coefficients, padding, mine), device)
    return PackedInputs(
        input_ids=move_tensor(ids[mine][None], device),
        position_ids=move_tensor(positions[..., None, mine], device),
        targets=move_tensor(ids.roll(-1)[mine], device),
        first=move_tensor(first, device),
        packing=_build_packing(lengths, kernel, device, group, parts, part, gathers_keys, blocks),
        size=batch.num_tokens,
        coefficients=coefficients,
        experts=_pad_experts(batch, padding, mine, device),
        taught=_place_teacher(batch, teaching, teacher, padding, mine, device),
        images=images,
    )


def _position_images(batch: Batch, positions: Tensor, positions_of: Positions) -> Tensor:
    """Return positions ``[4, T']`` of a padded batch whose documents may have images.

    Each document's are computed from its own tokens and images, never from those of the pack.

    Args:
        batch: the documents.
        positions: ``[T']`` int64, each token's position in its document.
        positions_of: positions of a document with images.
    """
    whole = positions[None].repeat(4, 1)
    media = batch.media
    if media is None or not media.num_images:
        return whole
    ids = batch.input_ids.cpu()
    grid = media.grid.cpu()
    seconds = None if media.seconds is None else media.seconds.cpu()
    for document, (start, end) in enumerate(
        zip(batch.boundaries, batch.boundaries[1:], strict=False)
    ):
        own = media.images_of(document)
        if own:
            shown = slice(own.start, own.stop)
            times = None if seconds is None else seconds[shown]
            whole[1:, start:end] = positions_of(ids[start:end], grid[shown], times)
    return whole


def pack_tree(
    batch: Batch,
    *,
    kernel: str,
    multiple: int,
    device: torch.device,
    coefficients: Tensor | None = None,
) -> PackedInputs:
    """Put the documents that begin alike into a tree, pad it, and move it to the device.

    Args:
        batch: the documents.
        kernel: name of the kernel of attention, ``sdpa`` or ``flex``.
        multiple: number of tokens of which the tree with its padding is a multiple.
        device: device of the tensors.
        coefficients: ``[T]`` the loss's derivative by the log-prob of each token up to a factor, or
            None where it is not known.
    """
    tree = build_tree(batch)
    size = len(tree.tokens)
    padding = torch.arange(-size % multiple if size else multiple)
    positions = torch.cat([tree.positions, padding])
    parents = torch.cat([tree.parents, size + (padding - 1).clamp(min=0)])
    ends = torch.cat([tree.ends, torch.full_like(padding, size + len(padding))])
    ids = torch.cat([batch.input_ids.cpu()[tree.tokens], torch.zeros_like(padding)])
    if coefficients is not None:
        # A token that documents share has the sum of their derivatives.
        summed = torch.zeros(len(ids)).index_add(0, tree.rows, coefficients.cpu().float())
        coefficients = move_tensor(summed, device)
    ids = move_tensor(ids, device)
    return PackedInputs(
        input_ids=ids[None],
        position_ids=move_tensor(positions[None], device),
        targets=ids,
        first=move_tensor(positions == 0, device),
        packing=build_tree_packing(ends, kernel, device),
        size=batch.num_tokens,
        coefficients=coefficients,
        parents=move_tensor(parents, device),
        rows=move_tensor(tree.rows, device),
    )


def _place_teacher(
    batch: Batch,
    teaching: Teaching | None,
    teacher: OutputHead | None,
    padding: int,
    mine: Tensor,
    device: torch.device,
) -> Taught | None:
    """Return the teacher's rows of the targets ``mine``, which teach nothing at padding."""
    if teaching is None:
        return None

    def rows(name: str, width: int, dtype: torch.dtype, fill: int) -> Tensor:
        # An empty batch may come without fields.
        given = batch.fields.get(name, torch.empty(0, width, dtype=dtype)).cpu()
        whole = torch.cat([given, given.new_full((padding, given.shape[1]), fill)])
        return move_tensor(whole.roll(-1, 0)[mine], device)

    if teaching.top:
        ids = rows(TEACHER_TOP_IDS, 0, torch.int64, -1).long()
        log_probs = rows(TEACHER_TOP_LOG_PROBS, 1, torch.float32, 0).float()
        return Taught(teaching=teaching, ids=ids, log_probs=log_probs)
    assert teacher is not None, "the batch was checked with it"
    states = rows(TEACHER_STATES, teacher.weight.shape[1], teacher.weight.dtype, 0)
    return Taught(teaching=teaching, head=teacher, states=states)


def _pad_experts(batch: Batch, padding: int, mine: Tensor, device: torch.device) -> Tensor | None:
    """Return the batch's experts of the tokens ``mine``, with -1 at padding, or None."""
    if ROUTED_EXPERTS not in batch.fields:
        return None
    given = batch[ROUTED_EXPERTS].cpu()
    whole = torch.cat([given, given.new_full((padding, *given.shape[1:]), -1)])
    return move_tensor(whole[mine], device)


def _build_packing(
    lengths: list[int],
    kernel: str,
    device: torch.device,
    group: Any,
    parts: int,
    part: int,
    gathers_keys: bool,
    blocks: Tensor | None,
) -> Packing:
    """Build the packing of documents of these lengths (see ``pack_inputs``)."""
    if group is None or not gathers_keys:
        return build_packing(lengths, kernel, device, group, blocks)
    return build_context_packing(lengths, kernel, device, group=group, parts=parts, part=part)


def _shift_to_targets(values: Tensor, padding: int, mine: Tensor) -> Tensor:
    """Return values ``[T]`` of tokens as float32 ``[T'/n]`` of targets, zero at padding."""
    return torch.cat([values.cpu().float(), torch.zeros(padding)]).roll(-1)[mine]
