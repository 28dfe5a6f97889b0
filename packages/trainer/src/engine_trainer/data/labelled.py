"""Completions that are labelled desirable or undesirable, without pairs, for KTO.

| layout | columns |
|---|---|
| prompt and completion | ``prompt`` (text or messages), ``completion`` (same), ``label`` |
| conversation | ``messages``, ``label`` |

Prompts, completions and conversations have the columns and forms that
``engine_trainer.data.layouts`` lists. The completion is what follows the prompt's column; of a
conversation, the document from the first token that carries loss on. The label is true or false
(in text formats also the words), or 1 or 0; ``kto.label`` names another column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data.chat import ChatTokenizer
from engine_trainer.data.datasets import Bound, Document
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.preferences import keep_fitting
from engine_trainer.data.readers import Row, read_rows

_LABELS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """The document of a prompt and its completion, with the label of the completion."""

    document: Document
    desirable: bool

    def __len__(self) -> int:
        return len(self.document)

    @property
    def documents(self) -> tuple[Document]:
        """The document."""
        return (self.document,)

    @property
    def split(self) -> int:
        """Index of the first token that carries loss, before which the prompt ends."""
        return int(np.flatnonzero(self.document.loss_weight)[0])

    def with_completion_of(self, other: Labelled, limit: int | None) -> Document:
        """Return the document of this row's prompt and another row's completion.

        Its end is cut off where it would have more than ``limit`` tokens.
        """
        own, theirs = self.split, other.split
        return Document(
            input_ids=np.concatenate(
                [self.document.input_ids[:own], other.document.input_ids[theirs:]]
            )[:limit],
            loss_weight=np.concatenate(
                [self.document.loss_weight[:own], other.document.loss_weight[theirs:]]
            )[:limit],
        )


class LabelledDataset:
    """Tokenized labelled rows, and the count ``dropped`` of those that were too long.

    ``limit`` is the largest number of tokens of a document, None if there is none.
    """

    def __init__(
        self, rows: Sequence[Labelled], dropped: int = 0, limit: int | None = None
    ) -> None:
        self.rows, self.dropped, self.limit = list(rows), dropped, limit

    @staticmethod
    def read(
        source: str | Sequence[str],
        split: str | None,
        tokenizer: ChatTokenizer,
        section: DataSection,
        *,
        label: str,
        limit: int | None = None,
        context: int | None = None,
        name: str = "",
    ) -> LabelledDataset:
        """Read and tokenize the rows of ``source``.

        Args:
            source: file, folder or hub name, or several (``readers.read_rows``).
            split: split to read from a folder; None: all of it.
            tokenizer: the tokenizer with its chat template.
            section: the ``data`` section.
            label: column with the label of each row.
            limit: largest number of rows; None: all.
            context: tokens of the model's context (``context.positions_of``); None: unknown.
            name: name of the held-out set in messages; empty for training rows.

        Raises:
            DataError: a row cannot be read; the error names file, row and column.
        """
        bound = Bound.of(section, context)
        rows = read_rows(source, split)[:limit]
        found = tokenize_labelled(rows, tokenizer, section.columns, label)
        noun = "rows" + (f" of {name}" if name else "")
        kept = keep_fitting(rows, found, section, bound, noun=noun, document="document")
        return LabelledDataset(kept, len(found) - len(kept), bound.tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Labelled:
        return self.rows[index]

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of desirable and of undesirable rows."""
        desirable = sum(row.desirable for row in self.rows)
        return desirable, len(self.rows) - desirable


def tokenize_labelled(
    rows: Sequence[Row], tokenizer: ChatTokenizer, columns: ColumnsSection, label: str
) -> list[Labelled]:
    """Return the document and the label of each row.

    Raises ``DataError`` for a row without a prompt, a completion or a label. An empty completion is
    one that ended at once.
    """
    labels = [_label(row, label) for row in rows]
    examples = to_examples(rows, columns, "response")
    encoded = tokenizer.encode_documents(
        [tokenizer.document(e, may_be_empty=True) for e in examples]
    )
    found: list[Labelled] = []
    for example, (ids, weights), desirable in zip(examples, encoded, labels, strict=True):
        if not any(weights):
            raise example.error(
                "the completion has no token",
                why="neither text nor the token that ends a turn is left of it",
                remedy="complete the row, or remove it",
            )
        document = Document(
            input_ids=np.asarray(ids, dtype=np.int64),
            loss_weight=np.asarray(weights, dtype=np.float32),
        )
        found.append(Labelled(document=document, desirable=desirable))
    return found


def _label(row: Row, column: str) -> bool:
    value = row.values.get(column)
    if value is None:
        raise row.error(
            "the label is missing or null",
            column=column,
            why=f"this row has: {', '.join(map(str, row.values))}",
            remedy="give every row true (desirable) or false (undesirable), or name the column in "
            "kto.label",
        )
    label = _LABELS.get(str(value).lower())
    if label is None:
        raise row.error(
            f"expected true or false, got {value!r:.100}",
            column=column,
            why="the label says whether the completion is desirable",
            remedy="write true or false (1 or 0); with scores, choose a threshold first",
        )
    return label
