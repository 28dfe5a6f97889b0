"""Preference pairs, each a chosen and a rejected response to one prompt.

| layout | columns |
|---|---|
| prompt and responses | ``prompt`` (text or messages), ``chosen`` and ``rejected`` (same) |
| conversations | ``chosen`` and ``rejected``: whole conversations |
| ShareGPT | ``conversations`` (the prompt), ``chosen`` and ``rejected``: a {from, value} each |

In the first layout the messages of ``chosen`` and ``rejected`` are those that follow the prompt.
The second layout is that of UltraFeedback and of TRL's implicit prompt; ``prompt`` is not read.
``data.columns.prompt`` names another prompt column. Messages have the forms that
``engine_trainer.data.layouts`` lists.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data.chat import ChatTokenizer
from engine_trainer.data.datasets import Bound, Document, refuse_media_tokens
from engine_trainer.data.layouts import (
    CONVERSATIONS,
    PROMPTS,
    SHAREGPT_ROLES,
    TOOLS,
    Example,
    Need,
    is_sharegpt,
    to_examples,
)
from engine_trainer.data.readers import Row, read_rows
from engine_trainer.errors import DataError

log = logging.getLogger("engine_trainer")
ANSWER_COLUMNS = ("chosen", "rejected")


class Preference(Protocol):
    """A pair or a labelled row, whose documents are kept whole."""

    @property
    def documents(self) -> Sequence[Document]:
        """The documents."""
        ...


T = TypeVar("T", bound=Preference)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The documents of a chosen and a rejected response to one prompt.

    In both, the assistant's tokens carry loss, up to and including the one that ends the turn.
    """

    chosen: Document
    rejected: Document
    margin: float = 0.0
    """The distance that the data asks for between the scores of a reward model."""

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def documents(self) -> tuple[Document, Document]:
        """The chosen and the rejected document, in this order."""
        return self.chosen, self.rejected


class PairDataset:
    """Tokenized pairs, with the count ``dropped`` of those in which a document was too long."""

    def __init__(self, pairs: Sequence[Pair], dropped: int = 0) -> None:
        self.pairs, self.dropped = list(pairs), dropped

    @staticmethod
    def read(
        source: str | Sequence[str],
        split: str | None,
        tokenizer: ChatTokenizer,
        section: DataSection,
        *,
        limit: int | None = None,
        context: int | None = None,
        budget: int | None = None,
        spare: int = 0,
        name: str = "",
        margin: str | None = None,
    ) -> PairDataset:
        """Read and tokenize the rows of ``source``.

        Args:
            source: file, folder or hub name, or several (``readers.read_rows``).
            split: split to read from a folder; None: all of it.
            tokenizer: the tokenizer with its chat template.
            section: the ``data`` section.
            limit: largest number of rows; None: all.
            context: tokens of the model's context (``context.positions_of``); None: unknown.
            budget: tokens of a micro-batch (``engine.memory.max_tokens``); None: any number.
            spare: tokens of the context and of the budget that no document may take.
            name: name of the held-out set in messages; empty for training rows.
            margin: column with the margin of each pair; None: all are 0.

        Raises:
            DataError: a row cannot be read; the error names file, row and column.
        """
        bound = Bound.of(section, context, spare=spare, budget=budget)
        rows = read_rows(source, split)[:limit]
        pairs = tokenize_pairs(rows, tokenizer, section.columns)
        if margin is not None:
            pairs = [
                replace(pair, margin=_margin(row, margin))
                for row, pair in zip(rows, pairs, strict=True)
            ]
        kept = keep_fitting(
            rows,
            pairs,
            section,
            bound,
            noun="pairs" + (f" of {name}" if name else ""),
            document="longer answer's document",
        )
        return PairDataset(kept, len(pairs) - len(kept))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]


def tokenize_pairs(
    rows: Sequence[Row], tokenizer: ChatTokenizer, columns: ColumnsSection
) -> list[Pair]:
    """Return the documents of each row. Raises ``DataError`` for a row that is no pair."""
    chosen, rejected = (_documents(rows, column, tokenizer, columns) for column in ANSWER_COLUMNS)
    return [Pair(chosen=c, rejected=r) for c, r in zip(chosen, rejected, strict=True)]


def score_token(tokens: Sequence[int], padding: int) -> int:
    """Return the index of the token at which a reward model scores a document.

    It is the last one that is not the padding token, as in transformers'
    ``AutoModelForSequenceClassification``.
    """
    return next((i for i in reversed(range(len(tokens))) if tokens[i] != padding), 0)


def _margin(row: Row, column: str) -> float:
    value = row.values.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.error(
            f"expected a finite number, got {value!r:.100}",
            column=column,
            why="rm.margin names this column",
            remedy="give every row its margin (0 asks for none), or set rm.margin: null",
        )
    return float(value)


def _documents(
    rows: Sequence[Row], name: str, tokenizer: ChatTokenizer, columns: ColumnsSection
) -> list[Document]:
    examples = [_example(row, name, columns) for row in rows]
    encoded = tokenizer.encode_documents(
        [tokenizer.document(e, may_be_empty=True) for e in examples]
    )
    for example, (ids, _) in zip(examples, encoded, strict=True):
        refuse_media_tokens(example, ids, tokenizer)
    return [
        _document(e, name, ids, weights)
        for e, (ids, weights) in zip(examples, encoded, strict=True)
    ]


def _example(row: Row, name: str, columns: ColumnsSection) -> Example:
    """Return the conversation that ends with the response in column ``name``."""
    answer = row.values.get(name)
    if isinstance(answer, Mapping):
        answer = [answer]
    if answer is None:
        raise row.error(
            "the column is missing or null",
            column=name,
            why=f"this row has: {', '.join(map(str, row.values))}",
            remedy="give every row prompt, chosen and rejected; "
            "see engine_trainer.data.preferences",
        )
    if not isinstance(answer, str | list) or not answer:
        raise row.error(
            "neither a text nor a list of messages",
            column=name,
            remedy="write the answer's text, or [{role, content}, …]",
        )
    if isinstance(answer, list) and _is_whole(answer):
        return _conversation(row, name, answer)
    known = (*PROMPTS, *CONVERSATIONS)
    prompt = columns.prompt or next((p for p in known if row.values.get(p) is not None), None)
    if prompt is None:
        raise row.error(
            "no prompt column",
            column="prompt",
            why="the answers are not whole conversations",
            remedy="name it with data.columns.prompt",
        )
    if isinstance(answer, str):
        return _read(row, row.values, ColumnsSection(prompt=prompt, response=name))
    opening = _read(row, row.values, ColumnsSection(prompt=prompt), need="prompt").messages
    return _conversation(row, name, [*opening, *answer])


def _is_whole(answer: list[Any]) -> bool:
    """Return whether messages begin with another turn than the assistant's."""
    first = answer[0]
    if is_sharegpt(first):
        return SHAREGPT_ROLES.get(str(first["from"])) != "assistant"
    return isinstance(first, dict) and first.get("role") != "assistant"


def _conversation(row: Row, name: str, turns: list[Any]) -> Example:
    return _read(row, {name: turns, TOOLS: row.values.get(TOOLS)}, ColumnsSection(messages=name))


def _read(
    row: Row, values: Mapping[str, Any], columns: ColumnsSection, need: Need = "response"
) -> Example:
    (example,) = to_examples([Row(values=values, file=row.file, number=row.number)], columns, need)
    return example


def _document(example: Example, name: str, ids: list[int], weights: list[float]) -> Document:
    if example.messages[-1]["role"] != "assistant" or not any(weights):
        raise DataError(
            "the conversation does not end with an answer",
            file=example.file,
            row=example.number,
            column=name,
            remedy="end it with the assistant's turn",
        )
    return Document(
        input_ids=np.asarray(ids, dtype=np.int64), loss_weight=np.asarray(weights, dtype=np.float32)
    )


def keep_fitting(
    rows: Sequence[Row],
    items: Sequence[T],
    section: DataSection,
    bound: Bound,
    *,
    noun: str,
    document: str,
) -> list[T]:
    """Return the items of which all documents fit.

    Documents are never cut, because a response without its end is not the one that was labelled
    or ranked.

    Args:
        rows: the rows of the items.
        items: the items.
        section: the ``data`` section.
        bound: the limit of a document.
        noun: name of several items in messages.
        document: name of an item's longest document in messages.

    Raises ``DataError`` for an item that is too long, unless ``data.on_too_long`` drops it, and if
    all of them are.
    """
    sizes = [max(map(len, item.documents)) for item in items]
    long = [i for i, size in enumerate(sizes) if bound.tokens is not None and size > bound.tokens]
    if long and section.on_too_long != "drop":
        raise rows[long[0]].error(
            f"{sizes[long[0]]} tokens in the {document}, but {bound.reason}",
            why=f"{len(long)} of {len(items)} {noun} are too long, this is the first",
            remedy=f"{bound.remedy}, or set data.on_too_long=drop",
        )
    if len(long) == len(items):
        raise DataError(
            f"all {len(items)} {noun} are too long: {bound.reason}", remedy=bound.remedy
        )
    if long:
        log.warning(
            "%d of %d %s are too long and were dropped: %s",
            len(long),
            len(items),
            noun,
            bound.reason,
        )
    left_out = set(long)
    return [item for i, item in enumerate(items) if i not in left_out]
