"""Every row of a configuration's training data, with its tokens or the reason that it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine_api.errors import ConfigError
from engine_trainer.config import Config, KTOConfig, RewardModelConfig, RLConfig, SFTConfig
from engine_trainer.config.sections import token_budget
from engine_trainer.data import (
    ChatTokenizer,
    Document,
    Prompt,
    load_tokenizer,
    longest_prompt,
    positions_of,
)
from engine_trainer.data.datasets import (
    CHUNK,
    PATCHES_REMEDY,
    Bound,
    tokenize_documents,
    tokenize_prompts,
)
from engine_trainer.data.gym import gym_examples
from engine_trainer.data.labelled import Labelled, tokenize_labelled
from engine_trainer.data.layouts import converter
from engine_trainer.data.preferences import Pair, score_token, tokenize_pairs
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError, ImageError
from engine_trainer.preferences.classifier import padding_token

Fate = Literal["kept", "cut", "dropped", "refused"]
Item = Document | Prompt | Pair | Labelled


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tokens of a document or prompt of a row."""

    title: str
    """``document``, ``prompt``, ``chosen``, ``rejected``, ``desirable`` or ``undesirable``."""
    tokens: Sequence[int]
    learned: Sequence[bool]
    """True for tokens that carry loss.

    A reward model has one, the token that is scored.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRow:
    """One row of the training data."""

    file: str
    number: int
    """1-based line or row in ``file``."""
    fate: Fate
    """``refused`` for a row that ends a run before it begins."""
    reason: str = ""
    """The reason for a fate other than ``kept``."""
    error: DataError | None = None
    """The error of a refused row, which would end a run."""
    length: int = 0
    """Number of tokens before a cut, in pairs of the longer document.

    0 if the row has none.
    """
    parts: Sequence[Part] = ()
    """Tokens of the row, after a cut."""
    answer: str | None = None
    """Ground truth of a prompt."""

    @property
    def learned(self) -> int:
        """Number of tokens that carry loss."""
        return sum(sum(part.learned) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The training data of a configuration."""

    task: str
    rows: list[PreviewRow]
    bound: Bound
    tokenizer: ChatTokenizer
    unknown_context: str = ""
    """The reason why the model's context is not known.

    It is empty if the context is known, or has no limit.
    """


def collect(config: Config, task: str) -> Preview:
    """Read and tokenize the training data of ``config`` as its task does.

    Only the tokenizer and the model's ``config.json`` are loaded.

    Raises ``ConfigError`` and ``DataError`` where no row can be read.
    """
    tokenizer = load_tokenizer(config.data, config.engine.model)
    unknown = ""
    padding = tokenizer.pad_token_id
    context: int | None = None
    try:
        context = positions_of(config.engine.model)
        padding = padding_token(tokenizer, config.engine.model)
    except ConfigError as error:
        unknown = error.what
    if isinstance(config, RLConfig) and not unknown:
        context = longest_prompt(config.engine.model, config.rollout)
    prompts = isinstance(config, RLConfig)
    bound = Bound.of(
        config.data,
        context,
        prompts=prompts,
        budget=None if prompts else token_budget(config.engine.memory, config.data.max_length),
        spare=1 if isinstance(config, RewardModelConfig) else 0,
    )
    judge = _Judge(config, bound, padding)
    read = _preferences if task in ("dpo", "kto", "rm") else _examples
    found = read(config, tokenizer)
    rows = [judge.row(file, number, item) for file, number, item in found]
    return Preview(task=task, rows=rows, bound=bound, tokenizer=tokenizer, unknown_context=unknown)


Found = list[tuple[str, int, Item | DataError]]


def _examples(config: Config, tokenizer: ChatTokenizer) -> Found:
    """Return the document or prompt of every row, or the error that the row raises."""
    section = config.data
    is_sft = isinstance(config, SFTConfig)
    given: Sequence[Any]
    if section.reasoning_gym is not None:
        given = gym_examples(section.reasoning_gym, "train")
        converted = list(given)
    else:
        assert section.source is not None  # DataSection checks it
        given = read_rows(section.source, section.split)
        need = "response" if is_sft else "prompt"
        convert = converter(given, section.columns, need, images=True)
        converted = [_attempt(lambda row=row: convert(row)) for row in given]
    good = [e for e in converted if not isinstance(e, DataError)]
    tokenize = tokenize_documents if is_sft else tokenize_prompts
    items = iter(map(_decoded, _each(good, lambda part: tokenize(part, tokenizer))))
    return [
        (row.file, row.number, e if isinstance(e, DataError) else next(items))
        for row, e in zip(given, converted, strict=True)
    ]


def _preferences(config: Config, tokenizer: ChatTokenizer) -> Found:
    """Return the pair or the labelled document of every row, or the error that the row raises."""
    section = config.data
    assert section.source is not None  # the configurations check it
    rows = read_rows(section.source, section.split)
    if isinstance(config, KTOConfig):
        label = config.kto.label
        items = _each(rows, lambda p: tokenize_labelled(p, tokenizer, section.columns, label))
    else:
        items = _each(rows, lambda part: tokenize_pairs(part, tokenizer, section.columns))
    return [(row.file, row.number, item) for row, item in zip(rows, items, strict=True)]


def _each(given: Sequence[Any], tokenize: Callable[[Any], list[Any]]) -> list[Any]:
    """Return the item of each row, or its error.

    Rows are tokenized one by one where one of a chunk has an error.
    """
    items: list[Any] = []
    for start in range(0, len(given), CHUNK):
        part = given[start : start + CHUNK]
        found = _attempt(lambda part=part: tokenize(part))
        if isinstance(found, DataError):
            found = [_attempt(lambda one=one: tokenize([one])[0]) for one in part]
        items += found
    return items


def _decoded(item: Any) -> Any:
    """Return the item, or the error of an image of it that cannot be decoded."""
    if not isinstance(item, Document | Prompt) or item.images is None:
        return item
    found = _attempt(item.images.make_media)
    return found if isinstance(found, DataError) else item


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the ``DataError`` that it raises."""
    try:
        return call()
    except DataError as error:
        return error


class _Judge:
    """The fate of rows: trained on, cut, dropped, or refused."""

    def __init__(self, config: Config, bound: Bound, padding: int) -> None:
        self._on_too_long = config.data.on_too_long
        self._on_bad_image = config.data.on_bad_image
        self._bound = bound
        self._patches = config.engine.memory.max_patches
        # A reward model learns from one token of each document.
        self._padding = padding if isinstance(config, RewardModelConfig) else None

    def row(self, file: str, number: int, item: Item | DataError) -> PreviewRow:
        """Return the row of an item, or of the error that the row raises."""
        if isinstance(item, DataError):
            column = f", column {item.column!r}" if item.column else ""
            drops = isinstance(item, ImageError) and self._on_bad_image == "drop"
            return PreviewRow(
                file=file,
                number=number,
                fate="dropped" if drops else "refused",
                reason=f"{item.what}{column}",
                error=None if drops else item,
            )
        length = max(map(len, item.documents)) if isinstance(item, Pair) else len(item)
        fate, reason, remedy, kept = self._fit(item, length)
        error = None
        if fate == "refused":
            error = DataError(reason, file=file, row=number, remedy=remedy)
        return PreviewRow(
            file=file,
            number=number,
            fate=fate,
            reason=reason,
            error=error,
            length=length,
            parts=self._parts(kept),
            answer=item.answer if isinstance(item, Prompt) else None,
        )

    def _fit(self, item: Item, length: int) -> tuple[Fate, str, str, Item]:
        """Return the fate of an item with its reason and remedy, and the item after a cut."""
        most = self._patches
        if isinstance(item, Document) and most is not None and item.rows > most:
            fate: Fate = "refused" if self._on_too_long == "error" else "dropped"
            return fate, f"more than {most} patches", PATCHES_REMEDY, item
        limit = self._bound.tokens
        if limit is None or length <= limit:
            return "kept", "", "", item
        reason = f"longer than {limit} tokens"
        if self._on_too_long == "drop":
            return "dropped", reason, "", item
        if self._on_too_long == "error" or isinstance(item, Pair | Labelled):
            return "refused", reason, self._bound.remedy, item
        shorter = item.cut(limit)
        if shorter is None:
            return "dropped", reason, "", item
        return "cut", reason, "", shorter

    def _parts(self, item: Item) -> list[Part]:
        if isinstance(item, Prompt):
            return [Part(title="prompt", tokens=item.tokens, learned=[False] * len(item))]
        if isinstance(item, Document):
            return [self._part("document", item)]
        if isinstance(item, Labelled):
            title = "desirable" if item.desirable else "undesirable"
            return [self._part(title, item.document)]
        return [self._part("chosen", item.chosen), self._part("rejected", item.rejected)]

    def _part(self, title: str, document: Document) -> Part:
        tokens = document.input_ids.tolist()
        if self._padding is None:
            learned = (document.loss_weight > 0).tolist()
        else:
            at = score_token(tokens, self._padding)
            learned = [i == at for i in range(len(tokens))]
        return Part(title=title, tokens=tokens, learned=learned)
