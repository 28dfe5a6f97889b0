"""Data sets in memory, with documents for SFT and prompts for RL."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_api.capabilities import Capability
from engine_api.errors import UnsupportedCapability
from engine_api.rollout import PromptImages
from engine_trainer.config.sections import DataSection
from engine_trainer.data.chat import ChatTokenizer, Segment
from engine_trainer.data.gym import gym_examples
from engine_trainer.data.images import ImageProcessor, PlannedImage
from engine_trainer.data.layouts import Example, Messages, Need, text_of, to_examples
from engine_trainer.data.order import SampleOrder
from engine_trainer.data.readers import read_rows
from engine_trainer.data.sources import say_count
from engine_trainer.errors import DataError, ImageError
from engine_trainer.utils.cores import choose_threads, count_cores

T = TypeVar("T", "Document", "Prompt")
# Number of examples tokenized in one call.
CHUNK = 1024
PATCHES_REMEDY = (
    "raise engine.memory.max_patches, give the processor a smaller size (data.processor_kwargs), "
    "or set data.on_too_long=drop"
)
log = logging.getLogger("engine_trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One tokenized SFT document, with ``input_ids [t]`` int64 and ``loss_weight [t]`` float32."""

    input_ids: NDArray[np.int64]
    loss_weight: NDArray[np.float32]
    images: DocumentImages | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def rows(self) -> int:
        """Number of rows of pixels (patches, or whole tiles) of the document's images."""
        return 0 if self.images is None else self.images.rows

    def cut(self, length: int) -> Document | None:
        """Return the document's first ``length`` tokens, or None if none of them is learned.

        A document is not cut before the end of its last image, and None is returned.
        """
        shorter = replace(
            self, input_ids=self.input_ids[:length], loss_weight=self.loss_weight[:length]
        )
        if self.images is not None and self.images.is_in(self.input_ids[length:]):
            return None
        return shorter if shorter.loss_weight.any() else None

    def fields(self) -> dict[str, Any]:
        """Return the document as a mapping in the form that ``Batch.pack`` takes.

        Raises ``ImageError`` for an image that cannot be decoded.
        """
        found: dict[str, Any] = {
            "input_ids": self.input_ids.tolist(),
            "loss_weight": self.loss_weight.tolist(),
        }
        if self.images is not None:
            found["media"] = self.images.make_media()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentImages:
    """The images of a document or a prompt, whose pixels are made where they are needed."""

    planned: Sequence[PlannedImage]
    processor: ImageProcessor

    @property
    def rows(self) -> int:
        """Number of rows of pixels (patches, or whole tiles)."""
        return sum(image.rows for image in self.planned)

    def make_media(self) -> dict[str, Any]:
        """Return the images in the form that ``Batch.pack`` takes.

        Raises ``ImageError`` for an image that cannot be decoded.
        """
        return self.processor.make_media(self.planned)

    def is_in(self, ids: Sequence[int] | NDArray[np.int64]) -> bool:
        """Return whether ids have a token that stands for an image or a video."""
        return bool(np.isin(ids, self.processor.vision.tokens).any())

    @property
    def has_videos(self) -> bool:
        """True where there is a video."""
        return any(one.is_video for one in self.planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One RL problem, with the tokens that a rollout continues and the data that a reward needs."""

    tokens: list[int]
    rendered: str
    """The text that the tokens encode, chat template included.

    An image is one placeholder in it.
    """
    text: str
    """The last user turn, as it stands in the data."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation as messages, with the system prompt and the prompt template applied."""
    answer: str | None
    """The ground truth that a reward compares with, or None."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The row's other columns.

    ``metadata["entry"]`` is reasoning-gym's record.
    """
    file: str = ""
    number: int = 0
    teacher_tokens: list[int] | None = None
    """The tokens that a teacher sees in place of ``tokens``; None: the same."""
    images: DocumentImages | None = None
    placeholders: Sequence[int] = ()
    """The tokens with one placeholder for each image; empty without images."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """Number of rows of pixels (patches, or whole tiles) of the prompt's images."""
        return 0 if self.images is None else self.images.rows

    @property
    def image_names(self) -> list[str]:
        """The paths of the images as the row has them, or the digests of their bytes."""
        return [] if self.images is None else [one.source.name for one in self.images.planned]

    @property
    def key(self) -> tuple[int | str, ...]:
        """Tokens and images, which are equal for two prompts that a model cannot tell apart."""
        images = () if self.images is None else self.images.planned
        return (*self.tokens, *(one.source.key for one in images))

    def cut(self, length: int) -> Prompt | None:
        """Return the prompt with only its last ``length`` tokens, which ask for the answer.

        ``rendered``, ``text`` and ``teacher_tokens`` stay whole. A prompt is not cut behind the
        beginning of its first image, and None is returned.
        """
        lost = len(self.tokens) - length
        if self.images is not None and self.images.is_in(self.tokens[:lost]):
            return None
        return replace(self, tokens=self.tokens[-length:], placeholders=self.placeholders[lost:])


class _Dataset(Generic[T]):
    """Tokenized rows, with counts of those that were left out or cut.

    These were too long (dropped or truncated), or had images that cannot be used.
    """

    def __init__(
        self, items: Sequence[T], dropped: int = 0, truncated: int = 0, bad_images: int = 0
    ) -> None:
        self._items = list(items)
        self.dropped = dropped
        self.truncated = truncated
        self.bad_images = bad_images

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> T:
        return self._items[index]

    def figures(self) -> dict[str, float]:
        """Return ``data/…``, the counts of rows that were left out or cut, if there are any."""
        figures: dict[str, float] = {}
        if self.dropped or self.truncated:
            figures["data/dropped"] = float(self.dropped)
            figures["data/truncated"] = float(self.truncated)
        if self.bad_images:
            figures["data/bad_images"] = float(self.bad_images)
        return figures


class SFTDataset(_Dataset[Document]):
    """Tokenized documents, with counts of those that were left out or cut."""

    @property
    def documents(self) -> list[Document]:
        """The documents that are left."""
        return self._items

    @staticmethod
    def build(
        examples: Sequence[Example],
        tokenizer: ChatTokenizer,
        section: DataSection,
        context: int | None = None,
        name: str = "",
        *,
        budget: int | None = None,
        patches: int | None = None,
    ) -> SFTDataset:
        """Tokenize the examples.

        Args:
            examples: the rows.
            tokenizer: the tokenizer with its chat template.
            section: the ``data`` section.
            context: tokens of the model's context (``context.positions_of``); None: unknown.
            name: name of the held-out set in messages; empty for training rows.
            budget: tokens of a micro-batch (``engine.memory.max_tokens``); None: any number.
            patches: rows of pixels that a micro-batch takes (``engine.memory.max_patches``); None:
                any number.

        Raises:
            DataError: a row has nothing to learn, is too long, or has images that cannot be used.
        """
        kept, documents = _tokenize(examples, tokenizer, section, name, tokenize_documents)
        bad = len(examples) - len(kept)
        small = _fit_patches(kept, documents, section, patches)
        fitting, dropped, cut = _fit(
            [kept[i] for i in small],
            [documents[i] for i in small],
            section,
            Bound.of(section, context, budget=budget),
            name,
        )
        dropped += len(documents) - len(small)
        dataset = SFTDataset(fitting, dropped, cut, bad)
        if not name:
            _warn_of_endless_turns(dataset.documents, tokenizer)
        return dataset


def make_fields(documents: Sequence[Document], *, drop: bool) -> list[dict[str, Any]]:
    """Return the documents as ``Batch.pack`` takes them, with the pixels of their images.

    With ``drop`` a document with an image that cannot be decoded is left out, with a warning.

    Raises ``ImageError`` for such an image without ``drop``.
    """
    if all(document.images is None for document in documents):
        return [document.fields() for document in documents]
    found: list[dict[str, Any]] = []
    with _decoding_threads() as threads:
        for future in [threads.submit(document.fields) for document in documents]:
            try:
                found.append(future.result())
            except ImageError as error:
                if not drop:
                    raise
                log.warning("a document is left out of this step: %s", error)
    return found


def make_media(images: Sequence[DocumentImages]) -> list[dict[str, Any]]:
    """Return the images of several documents in the form that ``Batch.pack`` takes.

    Raises ``ImageError`` for an image that cannot be decoded.
    """
    with _decoding_threads() as threads:
        return list(threads.map(DocumentImages.make_media, images))


def make_prompt_images(
    prompts: Sequence[Prompt], *, drop: bool
) -> tuple[list[int], list[PromptImages | None] | None]:
    """Return the images of each prompt as rollouts take them, or None where no prompt has any.

    With ``drop`` a prompt with an image that cannot be decoded is left out, with a warning. The
    first value has the indices of the prompts that are left.

    Raises ``ImageError`` for such an image without ``drop``.
    """
    if all(prompt.images is None for prompt in prompts):
        return list(range(len(prompts))), None

    def make(prompt: Prompt) -> PromptImages | None:
        images = prompt.images
        if images is None:
            return None
        return images.processor.make_prompt_images(images.planned, prompt.placeholders)

    left: list[int] = []
    found: list[PromptImages | None] = []
    with _decoding_threads() as threads:
        for index, future in enumerate([threads.submit(make, prompt) for prompt in prompts]):
            try:
                found.append(future.result())
            except ImageError as error:
                if not drop:
                    raise
                log.warning("a prompt is left out of this step: %s", error)
            else:
                left.append(index)
    return left, found


def _decoding_threads() -> ThreadPoolExecutor:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(choose_threads(count_cores(), ranks))


def _warn_of_endless_turns(documents: Sequence[Document], tokenizer: ChatTokenizer) -> None:
    """Warn if no document learns a token that ends a completion."""
    stops = list(tokenizer.stop_token_ids)
    if documents and not any(
        np.isin(d.input_ids[d.loss_weight > 0], stops).any() for d in documents
    ):
        names = tokenizer.tokenizer.convert_ids_to_tokens(stops)
        log.warning(
            "no row teaches the model to stop: none of the learned tokens is %s; raise "
            "data.max_length if rows are truncated, or end the assistant's turns with one of these "
            "tokens in the chat template (data.chat_template)",
            " or ".join(map(str, names)),
        )


class PromptDataset(_Dataset[Prompt]):
    """Tokenized prompts, with counts of those that were left out or cut."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that are left."""
        return self._items

    @staticmethod
    def build(
        examples: Sequence[Example],
        tokenizer: ChatTokenizer,
        section: DataSection,
        context: int | None = None,
        name: str = "",
        teacher: TeacherPrompts | None = None,
        *,
        patches: int | None = None,
    ) -> PromptDataset:
        """Tokenize the examples' prompts.

        Args:
            examples: the rows.
            tokenizer: the tokenizer with its chat template.
            section: the ``data`` section.
            context: tokens of the model's context that a completion leaves for the prompt
                (``context.longest_prompt``); None: unknown.
            name: name of the held-out set in messages; empty for training rows.
            teacher: the prompts of a teacher; None: the same, or no teacher.
            patches: rows of pixels that a micro-batch takes (``engine.memory.max_patches``); None:
                any number.

        Raises:
            DataError: a prompt is empty or too long, has no counterpart for the teacher, or has
                images that cannot be used.
        """
        kept, prompts = _tokenize(examples, tokenizer, section, name, tokenize_prompts)
        bad = len(examples) - len(kept)
        if teacher is not None:
            prompts = teacher.add(prompts, kept, tokenizer)
        small = _fit_patches(kept, prompts, section, patches)
        fitting, dropped, cut = _fit(
            [kept[i] for i in small],
            [prompts[i] for i in small],
            section,
            Bound.of(section, context, prompts=True),
            name,
        )
        made = PromptDataset(fitting, dropped + len(prompts) - len(small), cut, bad)
        if teacher is not None:
            teacher.check(made.prompts)
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPrompts:
    """The prompts that a teacher sees in place of the policy's."""

    template: str
    """Text around the last user turn, with ``{prompt}``, ``{answer}`` and ``{response}``."""
    limit: int | None
    """Tokens of the teacher's context that a completion leaves for the prompt; None: unknown."""

    def add(
        self, prompts: Sequence[Prompt], examples: Sequence[Example], tokenizer: ChatTokenizer
    ) -> list[Prompt]:
        """Return the prompts with ``teacher_tokens``.

        Raises ``DataError`` for a row that lacks what the template names.
        """
        shown = [_with_privilege(example, self.template) for example in examples]
        encoded = tokenizer.encode_prompts(shown)
        return [
            replace(prompt, teacher_tokens=ids)
            for prompt, (_, ids) in zip(prompts, encoded, strict=True)
        ]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``DataError`` for a prompt that is too long for the teacher."""
        for prompt in prompts:
            length = len(prompt.teacher_tokens or ())
            if self.limit is not None and length > self.limit:
                raise DataError(
                    f"the teacher's prompt has {length} tokens, expected at most {self.limit}",
                    file=prompt.file,
                    row=prompt.number or None,
                    why="the teacher's context must also hold rollout.max_new_tokens",
                    remedy="shorten algorithm.teacher.prompt_template or the row, or remove the "
                    "row",
                )


def _with_privilege(example: Example, template: str) -> Example:
    """Return the example with the template around its last user turn, and without its response."""
    turns = [dict(turn) for turn in example.prompt]
    asked = [turn for turn in turns if turn["role"] == "user"]
    if not asked:
        raise example.error(
            "algorithm.teacher.prompt_template needs a turn of the user, and the row has none",
            remedy="complete the row, or remove it",
        )
    response = example.messages[len(turns) :]
    texts = {
        "prompt": asked[-1]["content"],
        "answer": example.answer,
        "response": response[0]["content"] if response else None,
    }

    def fill(found: re.Match[str]) -> str:
        text = texts[found[1]]
        if text is None:
            raise example.error(
                f"algorithm.teacher.prompt_template shows {found[0]}, but the row has none",
                remedy=f"complete the row, or leave {found[0]} out",
            )
        return str(text)

    # In one pass, because a row's own text may have braces.
    asked[-1]["content"] = re.sub(r"\{(prompt|answer|response)\}", fill, template)
    return replace(example, messages=turns)


def read_examples(section: DataSection, need: Need) -> list[Example]:
    """Return the training rows of a data section.

    ``need`` is ``response`` for SFT and ``prompt`` for RL.
    """
    if section.reasoning_gym is not None:
        return gym_examples(section.reasoning_gym, "train")
    assert section.source is not None  # DataSection checks it
    rows = read_rows(section.source, section.split)
    return to_examples(rows, section.columns, need, images=True)


def tokenize_documents(examples: Sequence[Example], tokenizer: ChatTokenizer) -> list[Document]:
    """Return the tokens of each conversation.

    Raises ``DataError`` if there is nothing to learn, and ``ImageError`` for bad images.
    """
    segments = [tokenizer.document(e) for e in examples]
    images = [tokenizer.plan_images(e) for e in examples]
    expanded = [
        tokenizer.expand_images(*parts) for parts in zip(examples, segments, images, strict=True)
    ]
    encoded = tokenizer.encode_documents([texts for texts, _ in expanded])
    return [
        _add_images(e, _document(e, *tokens), placed, tokenizer)
        for e, tokens, (_, placed) in zip(examples, encoded, expanded, strict=True)
    ]


def _add_images(
    example: Example, document: Document, planned: Sequence[PlannedImage], tokenizer: ChatTokenizer
) -> Document:
    """Return the document with its images.

    Raises ``ImageError`` if its image tokens are not as many as the images have features.
    """
    _check_media_tokens(example, document.input_ids.tolist(), planned, tokenizer)
    if not planned:
        return document
    return replace(
        document, images=DocumentImages(planned=planned, processor=tokenizer.image_processor)
    )


def _check_media_tokens(
    example: Example, ids: list[int], planned: Sequence[PlannedImage], tokenizer: ChatTokenizer
) -> None:
    """Raise ``ImageError`` if tokens of images or videos are not as many as their features."""
    for kind, token in (("image", tokenizer.image_token), ("video", tokenizer.video_token)):
        if token is None:
            continue
        videos = kind == "video"
        own = [one for one in planned if one.is_video == videos]
        expected = tokenizer.image_processor.count_features(own, videos=videos) if own else 0
        tokens = ids.count(token)
        if tokens != expected:
            raise ImageError(
                f"the row has {say_count(tokens, f'{kind} token')} (id {token}), and "
                f"{say_count(len(own), kind)} of {say_count(expected, 'feature')}",
                file=example.file,
                row=example.number or None,
                why=f"the features of each {kind} replace the tokens of its placeholder",
                remedy=f"take the placeholder's text out of the row, or give its {kind}s in a "
                f"column {kind}s; or set data.on_bad_image=drop",
            )


def refuse_media_tokens(example: Example, ids: Sequence[int], tokenizer: ChatTokenizer) -> None:
    """Raise ``DataError`` for a document of text with tokens that stand for images or videos.

    The model would look for their features.
    """
    for kind, token in (("an image", tokenizer.image_token), ("a video", tokenizer.video_token)):
        if token is not None and token in ids:
            raise example.error(
                f"the row has tokens of {kind} (id {token}), expected text alone",
                why="the features of an image replace the tokens of its placeholder, and images "
                "are read by sft and rl alone",
                remedy="take the placeholder's text out of the row, or remove the row",
            )


def refuse_videos(
    given: Iterable[DocumentImages | None], declared: Collection[str], engine: str
) -> None:
    """Raise ``UnsupportedCapability`` for the first video, unless the engine declares ``video``.

    The engine refuses it, too, but in the step that takes it.
    """
    if Capability.VIDEO in declared:
        return
    planned = (one for images in given if images is not None for one in images.planned)
    first = next((one.source for one in planned if one.is_video), None)
    if first is not None:
        raise UnsupportedCapability(
            Capability.VIDEO,
            where=f"engine {engine!r}",
            why=f"{first.file}:{first.row} has videos, and the engine trains on none",
            remedy="name a backend that declares it "
            f"(`python -m engine_api list --capability {Capability.VIDEO}`), "
            "or remove the rows with videos",
        )


def _tokenize(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    section: DataSection,
    name: str,
    tokenize: Callable[[Sequence[Example], ChatTokenizer], list[T]],
) -> tuple[list[Example], list[T]]:
    """Return the documents or prompts, and the examples that they are made from.

    With ``data.on_bad_image: drop`` examples with images that cannot be used are left out.
    """
    kept: list[Example] = []
    items: list[T] = []
    first: ImageError | None = None
    for start in range(0, len(examples), CHUNK):
        chunk = examples[start : start + CHUNK]
        try:
            items += tokenize(chunk, tokenizer)
            kept += chunk
        except ImageError as error:
            if section.on_bad_image == "error":
                raise
            first = first or error
            for example in chunk:
                with suppress(ImageError):
                    items += tokenize([example], tokenizer)
                    kept.append(example)
    if first is not None:
        bad = len(examples) - len(kept)
        rows = f"of {len(examples)} rows" + (f" of {name}" if name else "")
        if not kept:
            raise first
        log.warning("%d %s have bad images and were dropped; the first: %s", bad, rows, first)
    return kept, items


def _fit_patches(
    examples: Sequence[Example],
    documents: Sequence[Document] | Sequence[Prompt],
    section: DataSection,
    most: int | None,
) -> list[int]:
    """Return the indices of the documents or prompts with at most this number of rows of pixels.

    Raises ``DataError`` for one with more of them, unless ``data.on_too_long`` drops it.
    """
    if most is None:
        return list(range(len(documents)))
    for example, document in zip(examples, documents, strict=True):
        if document.rows > most and section.on_too_long == "error":
            raise example.error(
                f"{document.rows} patches, engine.memory.max_patches is {most}",
                why="a document's images are computed in one micro-batch",
                remedy=PATCHES_REMEDY,
            )
    small = [i for i, document in enumerate(documents) if document.rows <= most]
    if not small:
        raise DataError(
            f"all {len(documents)} rows have more than {most} patches",
            why="engine.memory.max_patches is the most that a micro-batch takes",
            remedy="raise it, or give the processor a smaller size (data.processor_kwargs)",
        )
    if len(small) < len(documents):
        log.warning(
            "%d of %d rows have more patches than engine.memory.max_patches and were dropped",
            len(documents) - len(small),
            len(documents),
        )
    return small


def tokenize_prompts(examples: Sequence[Example], tokenizer: ChatTokenizer) -> list[Prompt]:
    """Return the tokens of each prompt.

    Raises ``DataError`` for an empty one, and ``ImageError`` for bad images.
    """
    encoded = tokenizer.encode_prompts(examples)
    return [
        _expand_images(e, _prompt(e, text, ids, tokenizer.prompt_messages(e)), tokenizer)
        for e, (text, ids) in zip(examples, encoded, strict=True)
    ]


def _expand_images(example: Example, prompt: Prompt, tokenizer: ChatTokenizer) -> Prompt:
    """Return the prompt with its images, and with as many image tokens as they have features.

    Raises ``ImageError`` for images that cannot be used, or that are not as many as their places.
    """
    planned = tokenizer.plan_images(example)
    if not planned:
        _check_media_tokens(example, prompt.tokens, planned, tokenizer)
        return prompt
    shown = Segment(text=prompt.rendered, learned=False)
    (expanded,), placed = tokenizer.expand_images(example, [shown], planned)
    ids = tokenizer.encode_text(expanded.text)
    _check_media_tokens(example, ids, placed, tokenizer)
    return replace(
        prompt,
        tokens=ids,
        images=DocumentImages(planned=placed, processor=tokenizer.image_processor),
        placeholders=prompt.tokens,
    )


def questions(rows: Sequence[Example] | Sequence[Prompt]) -> list[str]:
    """Return the last user turn of each row, with the files or digests of its images."""
    return [_identify(row) for row in rows]


def _identify(row: Example | Prompt) -> str:
    if isinstance(row, Example):
        return "\n".join([_question(row), *(one.key for one in (*row.images, *row.videos))])
    images = () if row.images is None else row.images.planned
    return "\n".join([row.text, *(one.source.key for one in images)])


def warn_of_overlap(train: Sequence[str], heldout: Sequence[str], name: str = "") -> int:
    """Return the number of held-out questions that are also trained on, and log it if above 0.

    ``name`` is the held-out set's name.
    """
    seen = set(train)
    shared = sum(question in seen for question in heldout)
    if shared:
        log.warning(
            "%d of %d held-out prompts%s are also in the training data: "
            "their accuracy says nothing",
            shared,
            len(heldout),
            f" of {name}" if name else "",
        )
    return shared


def order_of(dataset: Sized, section: DataSection, seed: int) -> SampleOrder:
    """Return the order of a run's samples.

    ``seed`` is the run's seed; ``data.seed`` takes precedence over it.
    """
    return SampleOrder(
        len(dataset), seed=seed if section.seed is None else section.seed, shuffle=section.shuffle
    )


def _document(example: Example, ids: list[int], weights: list[float]) -> Document:
    if not any(weights):
        raise example.error(
            "the response is empty, nothing to learn", remedy="complete the row, or remove it"
        )
    return Document(
        input_ids=np.asarray(ids, dtype=np.int64), loss_weight=np.asarray(weights, dtype=np.float32)
    )


def _prompt(example: Example, text: str, ids: list[int], messages: Messages) -> Prompt:
    if not ids:
        raise example.error("the prompt is empty", remedy="complete the row, or remove it")
    return Prompt(
        tokens=ids,
        rendered=text,
        text=_question(example),
        messages=messages,
        answer=example.answer,
        metadata=example.metadata,
        file=example.file,
        number=example.number,
    )


def _question(example: Example) -> str:
    asked = (t["content"] for t in reversed(example.prompt) if t["role"] == "user")
    return text_of(next(asked, ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A limit on the tokens of a document or prompt, with the texts for its error."""

    tokens: int | None
    """Largest number of tokens.

    None allows any number.
    """
    reason: str
    """The reason for the limit."""
    remedy: str
    """The advice on how to stay below the limit or raise it."""

    @staticmethod
    def of(
        section: DataSection,
        context: int | None,
        *,
        prompts: bool = False,
        spare: int = 0,
        budget: int | None = None,
    ) -> Bound:
        """Return the lowest of ``data.max_length``, what the context allows, and the budget.

        ``budget`` is the micro-batch's, into which a document must fit whole. ``spare`` tokens of
        the context and of the budget stay free.
        """
        spared = f", of which {spare} is for the score" if spare else ""
        own = section.max_length
        found: dict[int, tuple[str, str]] = {}
        # Of equal limits the last one counts, which is the easiest to raise.
        if budget is not None:
            found[budget - spare] = (
                f"engine.memory.max_tokens is {budget}{spared}",
                "shorten it, or raise engine.memory.max_tokens (auto: set data.max_length)",
            )
        if context is not None and prompts:
            found[context] = (
                f"the context minus rollout.max_new_tokens is {context}",
                "shorten it, or lower rollout.max_new_tokens",
            )
        elif context is not None:
            found[context - spare] = (
                f"the context has {context}{spared}",
                "shorten it, or raise engine.model.config_overrides.max_position_embeddings",
            )
        if own is not None:
            found[own] = (f"data.max_length is {own}", "raise data.max_length")
        if not found:
            return Bound(tokens=None, reason="nothing limits it", remedy="")
        tokens = min(found)
        reason, remedy = found[tokens]
        return Bound(tokens=tokens, reason=reason, remedy=remedy)


def _fit(
    examples: Sequence[Example], items: Sequence[T], section: DataSection, bound: Bound, name: str
) -> tuple[list[T], int, int]:
    """Return the items that are kept, the number dropped, and the number cut."""
    limit, reason = bound.tokens, bound.reason
    if limit is None:
        return list(items), 0, 0
    rows = f"of {len(items)} rows" + (f" of {name}" if name else "")
    long = [
        (example, item) for example, item in zip(examples, items, strict=True) if len(item) > limit
    ]
    if long and section.on_too_long == "error":
        example, item = long[0]
        raise example.error(
            f"{len(item)} tokens, {reason}",
            why=f"{len(long)} {rows} are too long, this is the first",
            remedy=f"{bound.remedy}, or set data.on_too_long=drop (or truncate)",
        )
    kept: list[T] = []
    cut = 0
    for item in items:
        if len(item) <= limit:
            kept.append(item)
        elif section.on_too_long == "truncate" and (shorter := item.cut(limit)) is not None:
            kept.append(shorter)
            cut += 1
    dropped = len(items) - len(kept)
    if not kept:
        raise DataError(
            f"all {rows.removeprefix('of ')} are too long: {reason}", remedy=bound.remedy
        )
    for count, what in ((dropped, "dropped"), (cut, "cut")):
        if count:
            log.warning("%d %s are too long and were %s: %s", count, rows, what, reason)
    return kept, dropped, cut
