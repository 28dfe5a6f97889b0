"""Batches of packed documents, without padding, with one tensor per field.

``input_ids [T]`` int64 holds the documents one after another; ``cu_seqlens [D+1]`` (int32 or int64)
holds the positions where they begin (first 0, last T, strictly rising). Every other field has one
value per token. By the alignment rule a value at position t is about predicting token t from its
own document before t, so a document's first token carries no loss.

The field ``routed_experts`` ``[T, L, k]`` has a table for each token: by decoder layer the experts
that served the token when it was the input, or -1 where they are not known. The fields of a teacher
have a row for each token: ``teacher_states`` ``[T, d]``, the final hidden state that predicts it,
``teacher_top_ids`` ``[T, k]``, the most likely tokens in its place, and ``teacher_top_log_probs``
``[T, k + 1]``, their log-probs and that of all other tokens together.

``media`` holds the images of the documents, ragged (``engine_api.media``).
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from engine_api.codec import register
from engine_api.errors import BatchError, kind_of
from engine_api.media import MEDIA, Media
from engine_api.tensors import check_tensor

if TYPE_CHECKING:
    import torch

LOSS_WEIGHT = "loss_weight"
INPUT_IDS = "input_ids"
CU_SEQLENS = "cu_seqlens"
ROUTED_EXPERTS = "routed_experts"
TEACHER_STATES = "teacher_states"
TEACHER_TOP_IDS = "teacher_top_ids"
TEACHER_TOP_LOG_PROBS = "teacher_top_log_probs"


@register
@dataclass(frozen=True, kw_only=True, eq=False)  # tensors have no truth value to compare by
class Batch:
    """Packed documents with per-token fields.

    Attributes:
        input_ids: ``[T]`` int64 token ids.
        cu_seqlens: ``[D+1]`` int32 or int64 document boundaries, ``0 = c0 < c1 < … < cD = T``.
        fields: name → ``[T]`` floating or integer tensor (``loss_weight``, ``advantages``, …). The
            field ``routed_experts`` is ``[T, L, k]``, signed integers, which the engine checks, and
            those of a teacher are ``[T, n]``.
        media: the images of the documents, or None without any. The engine checks that they are
            what the model takes, and that the documents' image tokens are as many as their
            features.

    Raises:
        BatchError: when the parts do not fit each other; it names field and index.
    """

    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    media: Media | None = None

    def __post_init__(self) -> None:
        _check_names(self.fields)
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))
        for name, value in {
            "input_ids": self.input_ids,
            "cu_seqlens": self.cu_seqlens,
            **self.fields,
        }.items():
            check_tensor(name, value)
            _check_device(name, value, self.input_ids)
        _check_ids(self.input_ids)
        _check_boundaries(self.cu_seqlens, self.num_tokens)
        for name, value in self.fields.items():
            _check_field(name, value, self.num_tokens)
        if LOSS_WEIGHT in self.fields:
            _check_loss_weight(self)
        if self.media is not None:
            _check_media(self.media, self.input_ids, self.num_documents)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy does not pickle, and batches travel between processes.
        return (_unpickle, (self.input_ids, self.cu_seqlens, dict(self.fields), self.media))

    @property
    def num_tokens(self) -> int:
        """The number of tokens T."""
        return int(self.input_ids.shape[0])

    @property
    def num_documents(self) -> int:
        """The number of documents D."""
        return int(self.cu_seqlens.shape[0]) - 1

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """``cu_seqlens`` as Python integers (one device sync at most)."""
        rows: list[int] = self.cu_seqlens.tolist()  # pyright: ignore[reportUnknownVariableType]
        return tuple(rows)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each document."""
        return [b - a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)]

    @property
    def loss_weight(self) -> torch.Tensor:
        """The field ``loss_weight`` ``[T]``.

        Raises ``BatchError`` when the batch has none.
        """
        return self[LOSS_WEIGHT]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.fields:
            raise BatchError(
                name,
                "missing field",
                why=f"present: {', '.join(sorted(self.fields)) or 'none'}",
                remedy="add it where the batch is built: Batch(fields={...})",
            )
        return self.fields[name]

    def token_index(self, documents: Sequence[int]) -> torch.Tensor:
        """Return the positions of the tokens of ``documents`` in that order, ``[T']`` int64."""
        import torch

        spans = [torch.arange(self.boundaries[d], self.boundaries[d + 1]) for d in documents]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, documents: Sequence[int]) -> Batch:
        """Return a batch of these documents only, in this order.

        Raises ``BatchError`` for a number that is not that of a document.
        """
        import torch

        for place, document in enumerate(documents):
            if not isinstance(document, numbers.Integral) or not 0 <= document < self.num_documents:
                raise BatchError(
                    "documents",
                    f"expected a document's number below {self.num_documents}, got {document!r}",
                    index=place,
                    remedy="documents are counted from 0",
                )
        index = self.token_index(documents).to(self.input_ids.device)
        ends = torch.tensor([0, *(self.lengths[d] for d in documents)], dtype=torch.int64).cumsum(0)
        picked = {name: value[index] for name, value in self.fields.items()}
        return Batch(
            input_ids=self.input_ids[index],
            cu_seqlens=ends.to(self.cu_seqlens.device),
            fields=picked,
            media=None if self.media is None else self.media.select(documents),
        )

    def to(self, device: Any) -> Batch:
        """Return the same batch on ``device``.

        Raises ``BatchError`` if ``device`` is not a device that holds values.
        """
        from engine_api.devices import move_tensor

        _check_target(device)
        moved = {name: move_tensor(value, device) for name, value in self.fields.items()}
        copy = self.with_computed(**moved)
        object.__setattr__(copy, "input_ids", move_tensor(self.input_ids, device))
        object.__setattr__(copy, "cu_seqlens", move_tensor(self.cu_seqlens, device))
        if self.media is not None:
            object.__setattr__(copy, "media", self.media.to(device))
        return copy

    def with_fields(self, **extra: torch.Tensor) -> Batch:
        """Return the same documents with additional (or replaced) fields."""
        return Batch(
            input_ids=self.input_ids,
            cu_seqlens=self.cu_seqlens,
            fields={**self.fields, **extra},
            media=self.media,
        )

    def keep_fields(self, *names: str) -> Batch:
        """Return the same documents, with their images and these fields alone.

        Raises ``BatchError`` for a field that the batch does not have.
        """
        return Batch(
            input_ids=self.input_ids,
            cu_seqlens=self.cu_seqlens,
            fields={name: self[name] for name in names},
            media=self.media,
        )

    def no_media(self) -> Media:
        """Return the media of as many documents without images."""
        return Media.none(self.num_documents, self.input_ids.device)

    def with_media(self, media: Media | None) -> Batch:
        """Return the same documents with these images, or without any (None)."""
        if media is not None:
            _check_media(media, self.input_ids, self.num_documents)
        copy = self.with_computed()
        object.__setattr__(copy, "media", media)
        return copy

    def with_computed(self, **extra: torch.Tensor) -> Batch:
        """Return the same documents with additional fields that a loss has computed.

        Unlike ``with_fields`` it does not check their values, so that nothing waits for a device.
        """
        # The constructor is not called, because the batch is already validated.
        copy = object.__new__(Batch)
        object.__setattr__(copy, "input_ids", self.input_ids)
        object.__setattr__(copy, "cu_seqlens", self.cu_seqlens)
        object.__setattr__(copy, "fields", MappingProxyType({**self.fields, **extra}))
        object.__setattr__(copy, "media", self.media)
        copy.__dict__["boundaries"] = self.boundaries
        return copy

    def without_teacher(self) -> Batch:
        """Return the same documents without the fields of a teacher, which no loss reads."""
        copy = self.with_computed()
        kept = {name: value for name, value in self.fields.items() if name not in _ROWS}
        object.__setattr__(copy, "fields", MappingProxyType(kept))
        return copy

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``BatchError`` for a token id outside ``[0, vocab_size)``."""
        bad = ((self.input_ids < 0) | (self.input_ids >= vocab_size)).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise BatchError(
                "input_ids",
                f"token id {int(self.input_ids[at])} is outside the vocabulary of {vocab_size}",
                index=at,
                remedy="use the tokenizer that belongs to this model",
            )

    @staticmethod
    def pack(documents: Sequence[Mapping[str, Any]]) -> Batch:
        """Pack documents given as mappings of per-token sequences, one of them ``input_ids``.

        ``media`` of a document, which may be left out, has its images (``Media.pack``).

        Raises ``BatchError`` when a field is missing in some documents or has a different length.
        """
        import torch

        _check_sequence(documents, Mapping, "mappings of per-token values")
        if not documents:
            return Batch(
                input_ids=torch.zeros(0, dtype=torch.int64),
                cu_seqlens=torch.zeros(1, dtype=torch.int64),
            )
        media = Media.pack([document.get(MEDIA) for document in documents])
        documents = [{n: x for n, x in one.items() if n != MEDIA} for one in documents]
        names = list(documents[0])
        rows = [_columns_of(index, document, names) for index, document in enumerate(documents)]
        _check_same_layers([row.get(ROUTED_EXPERTS) for row in rows])
        _check_same_widths(rows)
        columns = {name: torch.cat([row[name] for row in rows]) for name in names}
        lengths = [len(row[INPUT_IDS]) for row in rows]
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        ids = columns.pop(INPUT_IDS)
        return Batch(input_ids=ids, cu_seqlens=ends.to(ids.device), fields=columns, media=media)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return all documents of ``batches`` in order.

        Their fields must be the same. Some may have no media.
        """
        import torch

        _check_sequence(batches, Batch, "batches")
        if not batches:
            return Batch.pack([])
        names = set(batches[0].fields)
        for index, batch in enumerate(batches):
            if set(batch.fields) != names:
                raise BatchError(
                    "fields",
                    f"{sorted(batch.fields)} differ from {sorted(names)}",
                    index=index,
                    remedy="give all batches the same fields",
                )
            _check_device("input_ids", batch.input_ids, batches[0].input_ids)
        _check_same_layers([batch.fields.get(ROUTED_EXPERTS) for batch in batches])
        _check_same_widths([batch.fields for batch in batches])
        lengths = [length for batch in batches for length in batch.lengths]
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return Batch(
            input_ids=torch.cat([b.input_ids for b in batches]),
            cu_seqlens=ends.to(batches[0].cu_seqlens.device),
            fields={n: torch.cat([b[n] for b in batches]) for n in batches[0].fields},
            media=_concat_media(batches),
        )


def _unpickle(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    extra: dict[str, torch.Tensor],
    media: Media | None = None,
) -> Batch:
    return Batch(input_ids=input_ids, cu_seqlens=cu_seqlens, fields=extra, media=media)


def _concat_media(batches: Sequence[Batch]) -> Media | None:
    """Return the images of all batches, or None where none has media."""
    if all(batch.media is None for batch in batches):
        return None
    return Media.concat([batch.media or batch.no_media() for batch in batches])


def _check_media(media: object, ids: torch.Tensor, documents: int) -> None:
    """Raise ``BatchError`` unless ``media`` are the images of this number of documents."""
    if not isinstance(media, Media):
        raise BatchError(
            MEDIA,
            f"expected engine_api.media.Media or None, got {kind_of(media)}",
            remedy="give the images to Batch.pack, by document",
        )
    if len(media.bounds) - 1 != documents:
        raise BatchError(
            "media.cu_images",
            f"expected the images of {documents} documents, got those of {len(media.bounds) - 1}",
            remedy="give 0 images for a document without any",
        )
    for name, value in media.tensors.items():
        _check_device(f"media.{name}", value, ids)


def _check_sequence(parts: object, kind: type, said: str) -> None:
    """Raise ``BatchError`` unless ``parts`` is a sequence of ``kind``."""
    if not _is_list(parts):
        raise BatchError("documents", f"expected a list of {said}, got {kind_of(parts)}")
    for index, part in enumerate(cast("Sequence[object]", parts)):
        if not isinstance(part, kind):
            raise BatchError(
                "documents", f"expected a list of {said}, got {kind_of(part)}", index=index
            )


def _check_names(fields: object) -> None:
    if not isinstance(fields, Mapping):
        raise BatchError(
            "fields", f"expected a mapping from names to tensors, got {kind_of(fields)}"
        )
    for name in cast("Mapping[object, object]", fields):
        if not isinstance(name, str) or name in ("", INPUT_IDS, CU_SEQLENS, MEDIA):
            raise BatchError(
                "fields",
                f"{name!r} cannot be the name of a field",
                remedy=f"use a text other than {INPUT_IDS}, {CU_SEQLENS} and {MEDIA}, which are no "
                "fields",
            )


def _check_target(device: Any) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except (TypeError, RuntimeError) as error:
        raise BatchError(
            "device", f"expected a device, got {device!r:.100}", why=str(error).split("\n", 1)[0]
        ) from error
    if kind == "meta":
        raise BatchError(
            "device", "the meta device holds no values", remedy="give one that computes"
        )


def _check_device(name: str, value: torch.Tensor, ids: torch.Tensor) -> None:
    if value.device != ids.device:
        raise BatchError(
            name,
            f"is on {value.device}, input_ids on {ids.device}",
            remedy="put a whole batch on one device, with Batch.to for example",
        )


def _columns_of(
    index: int, document: Mapping[str, Any], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return a document's columns as tensors of one length, or raise ``BatchError``."""
    if set(document) != set(names):
        raise BatchError(
            "documents",
            f"fields {sorted(map(str, document))} differ from document 0's "
            f"{sorted(map(str, names))}",
            index=index,
            remedy="give every document the same fields",
        )
    if INPUT_IDS not in document:
        raise BatchError("documents", f"{INPUT_IDS} is missing", index=index)
    columns = {name: _column(index, name, document[name]) for name in names}
    size = len(columns[INPUT_IDS])
    for name, column in columns.items():
        if len(column) != size:
            raise BatchError(
                name,
                f"{len(column)} values for {size} tokens",
                index=index,
                remedy="give one value a token",
            )
        _check_device(name, column, columns[INPUT_IDS])
    return columns


def _column(index: int, name: str, value: object) -> torch.Tensor:
    """Return one field of document ``index`` as a tensor ``[t]``.

    Token ids are never rounded, and booleans are refused as ids.
    """
    import torch

    ids = name == INPUT_IDS
    expected = "integers" if ids else "numbers"
    rows = cast("Sequence[object]", value) if _is_list(value) else None
    if rows is not None:
        _check_kinds(index, name, rows, numbers.Integral if ids else numbers.Real)
    # Tensors and NumPy arrays have this attribute.
    elif not hasattr(value, "__array__"):
        raise BatchError(
            name,
            f"expected a list, an array or a tensor of {expected}, got {kind_of(value)}",
            index=index,
        )
    own = torch.int64 if ids else torch.float32
    try:
        column = torch.as_tensor(value, dtype=None if rows is None else own)
    # torch has no single error class for this.
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BatchError(
            name, f"expected {expected}, got {kind_of(value)}", index=index, why=str(error)
        ) from error
    check_tensor(name, column)
    if name == ROUTED_EXPERTS:
        _check_experts(column, len(column), index=index)
    elif name in _ROWS:
        _check_rows(name, column, len(column), index=index)
    elif column.dim() != 1:
        raise BatchError(
            name, f"expected one value a token, got the shape {tuple(column.shape)}", index=index
        )
    if ids and (column.is_floating_point() or column.dtype == torch.bool):
        raise BatchError(
            name,
            f"expected integers, got {column.dtype}",
            index=index,
            remedy="convert with .long()",
        )
    return column if isinstance(value, torch.Tensor) else column.to(own)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_kinds(index: int, name: str, values: Sequence[object], wanted: type) -> None:
    """Raise ``BatchError`` for a list element that is not of the wanted kind of number.

    Booleans are refused as token ids.
    """
    for found in set(map(type, values)):
        if not issubclass(found, wanted) or (name == INPUT_IDS and found is bool):
            raise BatchError(
                name,
                f"expected a list of {wanted.__name__} numbers, got a {found.__name__} in it",
                index=index,
            )


def _check_ids(ids: torch.Tensor) -> None:
    import torch

    if ids.dim() != 1:
        raise BatchError(
            "input_ids",
            f"shape {tuple(ids.shape)}, not [T]",
            remedy="pack the documents, without padding",
        )
    if ids.dtype != torch.int64:
        raise BatchError(
            "input_ids", f"dtype {ids.dtype}, not torch.int64", remedy="convert with .long()"
        )


def _check_boundaries(cu: torch.Tensor, tokens: int) -> None:
    import torch

    if cu.dim() != 1 or cu.shape[0] < 1 or cu.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            "cu_seqlens",
            f"shape {tuple(cu.shape)}, dtype {cu.dtype}",
            remedy="give [D+1] int32 or int64",
        )
    if int(cu[0]) != 0:
        raise BatchError(
            "cu_seqlens",
            f"starts at {int(cu[0])}, not 0",
            index=0,
            remedy="begin with 0: [0, n0, n0+n1, …]",
        )
    falls = (cu[1:] <= cu[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        raise BatchError(
            "cu_seqlens",
            f"{int(cu[at])} does not rise above {int(cu[at - 1])}",
            index=at,
            why="documents would be empty, overlap or be out of order",
            remedy="give sorted, distinct boundaries",
        )
    if int(cu[-1]) != tokens:
        raise BatchError(
            "cu_seqlens",
            f"ends at {int(cu[-1])}, but input_ids has {tokens} tokens",
            index=len(cu) - 1,
            remedy="end with the number of tokens; nothing may stand outside a document",
        )


def _check_experts(value: torch.Tensor, tokens: int, *, index: int | None = None) -> None:
    """Raise ``BatchError`` unless ``value`` is ``[tokens, L, k]`` of signed integers."""
    if value.dim() != 3 or value.shape[0] != tokens:
        raise BatchError(
            ROUTED_EXPERTS,
            f"shape {tuple(value.shape)}, not [{tokens}, layers, experts per token]",
            index=index,
            remedy="give each token the experts of every decoder layer, and -1 where a layer has "
            "none or they are not known",
        )
    if str(value.dtype).removeprefix("torch.") not in ("int8", "int16", "int32", "int64"):
        raise BatchError(
            ROUTED_EXPERTS,
            f"dtype {value.dtype} is no signed integer",
            index=index,
            remedy="convert with .to(torch.int16)",
        )


def _check_same_layers(parts: Sequence[torch.Tensor | None]) -> None:
    """Raise ``BatchError`` for experts of different layers, or of different numbers of experts."""
    given = [(i, tuple(part.shape[1:])) for i, part in enumerate(parts) if part is not None]
    for index, shape in given:
        if shape != given[0][1]:
            raise BatchError(
                ROUTED_EXPERTS,
                f"layers and experts per token are {shape}, and {given[0][1]} before",
                index=index,
                remedy="record all of them with the same model",
            )


_ROWS: Mapping[str, bool] = {
    TEACHER_STATES: True,
    TEACHER_TOP_IDS: False,
    TEACHER_TOP_LOG_PROBS: True,
}
"""Fields of a teacher, by name true for floating numbers and false for signed integers."""


def _check_rows(name: str, value: torch.Tensor, tokens: int, *, index: int | None = None) -> None:
    """Raise ``BatchError`` unless ``value`` is ``[tokens, n]``, of the kind of its field."""
    if value.dim() != 2 or value.shape[0] != tokens:
        raise BatchError(
            name,
            f"expected the shape [{tokens}, n], got {tuple(value.shape)}",
            index=index,
            remedy="give a row for each token, of zeros (or -1 for ids) where there is none",
        )
    floating = _ROWS[name]
    signed = str(value.dtype).removeprefix("torch.") in ("int8", "int16", "int32", "int64")
    if floating != value.is_floating_point() or not (floating or signed):
        raise BatchError(
            name,
            f"expected a {'floating' if floating else 'signed integer'} dtype, got {value.dtype}",
            index=index,
            remedy=f"convert with {'.float()' if floating else '.to(torch.int32)'}",
        )


def _check_same_widths(parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raise ``BatchError`` for rows of different lengths in one field."""
    for name in _ROWS:
        widths = [(i, part[name].shape[1]) for i, part in enumerate(parts) if name in part]
        for index, width in widths:
            if width != widths[0][1]:
                raise BatchError(
                    name,
                    f"expected rows of {widths[0][1]} numbers as before, got {width}",
                    index=index,
                    remedy="give all documents the rows of the same teacher",
                )


def _check_field(name: str, value: torch.Tensor, tokens: int) -> None:
    if name == ROUTED_EXPERTS:
        _check_experts(value, tokens)
        return
    if name in _ROWS:
        _check_rows(name, value, tokens)
    elif tuple(value.shape) != (tokens,):
        raise BatchError(
            name, f"shape {tuple(value.shape)}, not [{tokens}]", remedy="give one value a token"
        )
    if value.is_floating_point() and not bool(value.isfinite().all()):
        at = (~value.isfinite()).nonzero()[0]
        raise BatchError(
            name,
            f"{float(value[tuple(at)])} is not finite",
            index=int(at[0]),
            remedy="look where this field is computed",
        )


def _check_loss_weight(batch: Batch) -> None:
    weight = batch.loss_weight
    if not weight.is_floating_point():
        raise BatchError(
            LOSS_WEIGHT, f"dtype {weight.dtype} is not floating", remedy="convert with .float()"
        )
    negative = (weight < 0).nonzero()
    if negative.numel():
        at = int(negative[0])
        raise BatchError(
            LOSS_WEIGHT,
            f"{float(weight[at])} is negative",
            index=at,
            remedy="put the sign into the loss or the advantages",
        )
    if not batch.num_tokens:
        return
    starts = batch.cu_seqlens[:-1]
    first = starts[weight[starts] != 0]
    if first.numel():
        raise BatchError(
            LOSS_WEIGHT,
            "a document's first token carries loss",
            index=int(first[0]),
            why="nothing comes before it, so it has no prediction",
            remedy="set it to 0",
        )
