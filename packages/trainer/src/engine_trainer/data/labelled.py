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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data.chat import ChatTokenizer
from engine_trainer.data.datasets import Bound, Document, refuse_media_tokens
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.preferences import keep_fitting
from engine_trainer.data.readers import Row, read_rows
from engine_trainer.errors import DataError

_LABELS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """The document of a prompt and its completion, with the label of the completion."""

    document: Document
    desirable: bool
    file: str = ""
    number: int = 0

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
        # Equal prompts have equal numbers, and so have equal completions.
        prompts = _number(row.document.input_ids[: row.split].tobytes() for row in self.rows)
        completions = _number(row.document.input_ids[row.split :].tobytes() for row in self.rows)
        self._parts = list(zip(prompts, completions, strict=True))

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
        budget: int | None = None,
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
            budget: tokens of a micro-batch (``engine.memory.max_tokens``); None: any number.
            name: name of the held-out set in messages; empty for training rows.

        Raises:
            DataError: a row cannot be read; the error names file, row and column.
        """
        bound = Bound.of(section, context, budget=budget)
        rows = read_rows(source, split)[:limit]
        found = tokenize_labelled(rows, tokenizer, section.columns, label)
        noun = "rows" + (f" of {name}" if name else "")
        kept = keep_fitting(rows, found, section, bound, noun=noun, document="document")
        return LabelledDataset(kept, len(found) - len(kept), bound.tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Labelled:
        return self.rows[index]

    def mismatched(self, indices: Sequence[int]) -> list[int]:
        """Return for each row of a step the row whose completion goes with its prompt.

        It is the nearest row before it in the step, before the first of which is the last, that
        has a different prompt and a different completion. Where the step has none, it is the
        nearest such row before it in the data.
        """
        count = len(indices)
        size = len(self.rows)
        found: list[int] = []
        for at, row in enumerate(indices):
            near = (indices[at - back] for back in range(1, count))
            far = ((row - back) % size for back in range(1, size))
            found.append(next(one for one in chain(near, far) if self._differ(row, one)))
        return found

    def check_mismatches(self) -> None:
        """Raise ``DataError`` for a row that ``mismatched`` can find no other row for."""
        prompts = Counter(prompt for prompt, _ in self._parts)
        completions = Counter(completion for _, completion in self._parts)
        equal = Counter(self._parts)
        for row, part in zip(self.rows, self._parts, strict=True):
            alike = prompts[part[0]] + completions[part[1]] - equal[part]
            if alike == len(self.rows):
                raise DataError(
                    f"none of the other {alike - 1} rows has both a different prompt and a "
                    "different completion",
                    file=row.file,
                    row=row.number or None,
                    why="the baseline of KTO is measured on prompts with completions that answer "
                    "others",
                    remedy="give more different rows, or set kto.loss: apo_zero_unpaired, which "
                    "has no baseline",
                )

    def _differ(self, row: int, other: int) -> bool:
        """Return whether both the prompts and the completions of two rows differ."""
        return all(a != b for a, b in zip(self._parts[row], self._parts[other], strict=True))

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
        refuse_media_tokens(example, ids, tokenizer)
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
        found.append(
            Labelled(
                document=document, desirable=desirable, file=example.file, number=example.number
            )
        )
    return found


def _number(values: Iterable[bytes]) -> list[int]:
    """Return a number for each value, equal ones for equal values."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(value, len(seen)) for value in values]


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
