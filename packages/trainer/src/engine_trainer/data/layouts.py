"""Conversion of rows with the field's usual columns to examples.

| layout | columns |
|---|---|
| chat | ``messages``: list of {role, content} |
| ShareGPT | ``conversations`` or ``conversation``: list of {from, value}; ``system`` (text) |
| prompt and response | ``prompt`` (text or messages), ``response`` or ``completion`` (same) |
| GSM8K | ``question``, ``answer`` with the result after ``####`` |
| verl, DAPO-17k | ``prompt`` (messages), ``reward_model.ground_truth``, ``data_source`` |
| AIME-2024 | the same as verl |
| MATH, AIME | ``problem``, ``solution``, ``answer`` |
| Alpaca | ``instruction``, ``input`` (text, may be empty), ``output`` |

The messages of a ``response`` are those that follow the prompt. Alpaca's input follows the
instruction after a blank line. ``data.columns`` names other columns; a dot reaches into a nested
column. A column ``tools`` (JSON schemas, or their JSON text) goes to the chat template.

Wherever there are messages, each may be in ShareGPT's form instead (``SHAREGPT_ROLES``), and a
``content`` may be a list of OpenAI's parts, ``{"type": "text", "text": …}``, whose texts are
joined.

Rows of ``sft`` and ``rl`` may have images (``images.ImageSource``) in a column ``images`` or
``image``. Each takes the place of one ``<image>`` in the texts before the responses, or of one part
of type ``image``. A part may hold its image itself, also as OpenAI's
``{"type": "image_url", "image_url": {"url": "data:…"}}``. Videos (``sources.VideoSource``) are read
likewise from a column ``videos`` or ``video``, with ``<video>`` and parts of type ``video``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from engine_trainer.config.sections import ColumnsSection
from engine_trainer.data.readers import Row
from engine_trainer.data.sources import ImageSource, S, VideoSource, list_sources, say_count
from engine_trainer.data.strict_json import loads
from engine_trainer.errors import DataError

# SFT needs rows with a response, RL needs rows with a prompt.
Need = Literal["response", "prompt"]
Messages = list[dict[str, Any]]

PROMPTS = ("prompt", "question", "problem", "Problem", "instruction", "Question")
RESPONSES = ("response", "completion", "solution", "output", "Solution", "answer")
ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer", "Answer", "solution", "Solution")
ROLES = ("system", "user", "assistant", "tool", "developer")
# ShareGPT's columns are looked at last, because rows with a prompt may have them in addition.
CONVERSATIONS = ("conversations", "conversation")
SYSTEM = "system"
# The names of ShareGPT's speakers, and the roles of these.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
GSM8K_MARK = "####"
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
# The texts that stand for an image and a video in rows whose messages have no parts.
IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
# Types of the parts of a message that are images or videos, in transformers' and in OpenAI's form.
IMAGE_PARTS = ("image", "image_url")
VIDEO_PARTS = ("video", "video_url")
TOOLS = "tools"
CALLS = "tool_calls"
# Alpaca's prompt consists of these two columns.
INSTRUCTION, INPUT = "instruction", "input"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One conversation.

    SFT learns its assistant turns. In RL it ends before the assistant's response.

    Attributes:
        messages: ``{role, content}`` turns, as chat templates take them.
        answer: ground truth that a reward compares with, or None.
        tools: schemas of a ``tools`` column, as chat templates take them.
        images: images of the row, in the order of their places in the messages.
        marks_images: whether ``<image>`` in the messages is the place of an image, because the
            row's file has a column of images.
        videos: videos of the row, in the order of their places in the messages.
        marks_videos: whether ``<video>`` in the messages is the place of a video, because the
            row's file has a column of videos.
        given: number of leading messages that are never learned, namely those of a prompt column.
        metadata: the row's other columns, including ``data_source`` if there is one.
        file: file that the row comes from.
        number: 1-based line (JSONL) or row in ``file``; 0 if unknown.
    """

    messages: Messages
    answer: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[ImageSource] = ()
    marks_images: bool = False
    videos: Sequence[VideoSource] = ()
    marks_videos: bool = False
    given: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    file: str = ""
    number: int = 0

    def error(self, what: str, *, why: str = "", remedy: str = "") -> DataError:
        """Return a ``DataError`` that names this example's row."""
        return DataError(what, file=self.file, row=self.number or None, why=why, remedy=remedy)

    @property
    def prompt(self) -> Messages:
        """The turns before a closing assistant turn."""
        return (
            self.messages[:-1]
            if self.messages and self.messages[-1]["role"] == "assistant"
            else self.messages
        )


def to_examples(
    rows: Sequence[Row], columns: ColumnsSection, need: Need, *, images: bool = False
) -> list[Example]:
    """Convert every row to an example.

    With ``images`` the images of rows are read, too; without, messages with images are refused.

    Raises:
        DataError: a row cannot be converted; the error names file, row and column.
    """
    convert = converter(rows, columns, need, images=images)
    return [convert(row) for row in rows]


def converter(
    rows: Sequence[Row], columns: ColumnsSection, need: Need, *, images: bool = False
) -> Callable[[Row], Example]:
    """Return the function that converts one of ``rows``, which raises ``DataError`` if it cannot.

    ``images`` is that of ``to_examples``.

    Raises:
        DataError: a file lacks a column, or is read from different columns than the first file.
    """
    files: dict[str, list[Row]] = {}
    for row in rows:
        files.setdefault(row.file, []).append(row)
    layouts = {file: _Layout.of(own, columns, need, images) for file, own in files.items()}
    _require_alike(layouts, need)
    return lambda row: layouts[row.file].example(row)


def have_responses(rows: Sequence[Row], columns: ColumnsSection) -> bool:
    """Return whether rows hold responses, in a column or as the assistant's turns of the first row.

    Raises:
        DataError: the rows have no prompt.
    """
    layout = _Layout.of(rows, columns, "prompt")
    if layout.messages:
        turns = _messages(rows[0], layout.messages, _RowImages.of(rows[0], None, None))
        return any(turn["role"] == "assistant" for turn in turns)
    return (columns.response or _Present(rows).first(RESPONSES)) is not None


def _require_alike(layouts: Mapping[str, _Layout], need: Need) -> None:
    """Raise ``DataError`` if a file is read from different columns than the first file.

    In that case one of the two files is probably not the intended one.
    """
    described = {file: layout.describe(need) for file, layout in layouts.items()}
    first = next(iter(described))
    for file, columns in described.items():
        if columns != described[first]:
            raise DataError(
                "the columns of the file differ from those of the file before",
                file=file,
                why=f"{first}: {described[first]}; {file}: {columns}",
                remedy="name one of the files, or give all the same columns (or set data.columns)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    messages: str | None
    prompt: str | None
    response: str | None
    answer: str | None
    needs_answer: bool
    """True if a null in the answer column is an error.

    False if it means that there is no answer.
    """
    images: str | None
    """Column with images."""
    videos: str | None
    """Column with videos."""
    takes_images: bool

    @staticmethod
    def of(
        rows: Sequence[Row], columns: ColumnsSection, need: Need, takes_images: bool = False
    ) -> _Layout:
        present, scored = _Present(rows), need == "prompt"
        images = (columns.images or present.first(IMAGES)) if takes_images else None
        videos = (columns.videos or present.first(VIDEOS)) if takes_images else None
        messages = columns.messages
        if messages is None and columns.prompt is None:
            chosen = present.choose(("messages", *PROMPTS)) or present.choose(CONVERSATIONS)
            messages = None if chosen in PROMPTS else chosen
        if messages and not columns.prompt:
            return _Layout(
                messages=messages,
                prompt=None,
                response=None,
                answer=columns.answer or present.first(ANSWERS),
                needs_answer=scored,
                images=images,
                videos=videos,
                takes_images=takes_images,
            )
        prompt = columns.prompt or present.choose(PROMPTS)
        response = columns.response or present.choose(RESPONSES)
        if prompt is None or (response is None and need == "response"):
            missing = "prompt" if prompt is None else "response"
            raise rows[0].error(
                f"no {missing} column",
                column=missing,
                why=f"columns: {', '.join(map(str, rows[0].values))}",
                remedy=f"name it with data.columns.{missing}, or see engine_trainer.data.layouts",
            )
        return _Layout(
            messages=None,
            prompt=prompt,
            response=response if need == "response" else None,
            answer=columns.answer or present.first(ANSWERS),
            needs_answer=scored,
            images=images,
            videos=videos,
            takes_images=takes_images,
        )

    def describe(self, need: Need) -> str:
        """Return the columns that are read, in words."""
        names = {"messages": self.messages, "prompt": self.prompt, "response": self.response}
        names |= {"answer": self.answer} if need == "prompt" else {}
        return ", ".join(f"{part} {name}" for part, name in names.items() if name)

    def example(self, row: Row) -> Example:
        images = self._images(row)
        prompt = _turns(row, self.messages, images) if self.messages else self._prompt(row, images)
        response = self._response(row, images) if self.response else []
        used = {
            (c or "").split(".")[0]
            for c in (
                self.messages,
                self.prompt,
                self.response,
                self.answer,
                self.images,
                self.videos,
            )
        }
        used |= {INPUT} if self.prompt == INSTRUCTION else set()
        used |= {SYSTEM} if {self.messages, self.prompt} & {*CONVERSATIONS} else set()
        metadata = {name: value for name, value in row.values.items() if name not in used}
        return Example(
            messages=[*prompt, *response],
            given=len(prompt) if response else 0,
            answer=self._answer(row),
            tools=_tools(row),
            images=() if images is None else images.images.in_order(),
            marks_images=self.images is not None,
            videos=() if images is None else images.videos.in_order(),
            marks_videos=self.videos is not None,
            metadata=metadata,
            file=row.file,
            number=row.number,
        )

    def _images(self, row: Row) -> _RowImages | None:
        """Return the images of the row's columns, or None where images are refused.

        Raises ``DataError`` there for a row whose text has places for the images of a column.
        """
        if not self.takes_images:
            self._refuse_images(row, IMAGES, IMAGE_MARK)
            self._refuse_images(row, VIDEOS, VIDEO_MARK)
            return None
        return _RowImages.of(row, self.images, self.videos)

    def _refuse_images(self, row: Row, names: Sequence[str], mark: str) -> None:
        column = next((name for name in names if row.values.get(name)), None)
        text = row.values.get((self.prompt or self.messages or "").split(".")[0])
        if column is not None and mark in str(text):
            raise row.error(
                f"the text has {mark}, and images are read in sft and rl alone",
                column=column,
                why="the model would see the mark and not the image",
                remedy=f"train on them with sft or rl, or remove {mark} from the text",
            )

    def _prompt(self, row: Row, images: _RowImages | None) -> Messages:
        assert self.prompt is not None
        if isinstance(_cell(row, self.prompt), list):
            turns = _turns(row, self.prompt, images)
            if self.response is None and turns[-1]["role"] == "assistant":
                raise row.error(
                    "the prompt ends with the assistant's turn",
                    column=self.prompt,
                    why="it would be left out, because the rollout generates that turn",
                    remedy="end it with a question; "
                    f"of whole conversations set data.columns.messages={self.prompt}",
                )
            return turns
        return [_turn("user", _question(row, self.prompt))]

    def _response(self, row: Row, images: _RowImages | None) -> Messages:
        assert self.response is not None
        if not isinstance(_cell(row, self.response), list):
            return [_turn("assistant", _text(row, self.response))]
        turns = _messages(row, self.response, images)
        if turns[0]["role"] != "assistant":
            raise row.error(
                f"begins with a turn of the {turns[0]['role']}",
                column=self.response,
                why="it follows the prompt, which the assistant answers",
                remedy="begin it with the assistant's turn; "
                "a whole conversation goes into a messages column",
            )
        return turns

    def _answer(self, row: Row) -> str | None:
        if self.answer is None or (
            not self.needs_answer and _reach(row.values, self.answer) is None
        ):
            return None
        value = _cell(row, self.answer)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise row.error(
                f"{type(value).__name__} is not an answer",
                column=self.answer,
                remedy="give text or a number",
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise row.error(
                f"{value} is not an answer",
                column=self.answer,
                remedy="complete the row, or remove it",
            )
        # In a column with nulls, whole numbers arrive as floats: 42.0 is the answer 42.
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        return text.rsplit(GSM8K_MARK, 1)[1].strip() if GSM8K_MARK in text else text


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowImages:
    """The images and the videos of a row."""

    images: _Places[ImageSource]
    videos: _Places[VideoSource]

    @staticmethod
    def of(row: Row, images: str | None, videos: str | None) -> _RowImages:
        """Return those of two columns, each None where there is none."""
        return _RowImages(
            images=_Places(row, images or IMAGES[0], ImageSource, read=images is not None),
            videos=_Places(row, videos or VIDEOS[0], VideoSource, read=videos is not None),
        )


class _Places(Generic[S]):
    """The images of a row, or its videos, in the order of their places in its messages."""

    def __init__(self, row: Row, name: str, kind: type[S], *, read: bool) -> None:
        self._kind = kind
        value = _reach(row.values, name) if read else None
        self._column = list_sources(row, name, value, kind)
        self._left = list(self._column)
        self._placed: list[S] = []

    def place(self, row: Row, name: str, part: Mapping[str, Any]) -> None:
        """Place the image of a part of a message.

        It is the one that the part holds, the one of the column that its ``index`` names, or the
        next one of the column.
        """
        own = {key: value for key, value in part.items() if key != "type" and value is not None}
        if own.keys() == {"index"}:
            chosen = self._column[self._read_index(row, name, own["index"])]
            self._placed.append(chosen)
            self._left = [one for one in self._left if one is not chosen]
        elif own:
            first = len(self._placed) + 1
            self._placed += list_sources(row, name, own, self._kind, first)
        elif self._left:
            self._placed.append(self._left.pop(0))

    def _read_index(self, row: Row, name: str, index: object) -> int:
        if isinstance(index, int) and 0 <= index < len(self._column):
            return index
        kind = "image" if self._kind is ImageSource else "video"
        raise row.error(
            f"a part of type {kind} has index {index!r:.100}, and the row has "
            f"{say_count(len(self._column), kind)}",
            column=name,
            why=f"index is the place of the {kind} in the column of {kind}s, from 0",
            remedy=f"correct the index or the column; data.columns.{kind}s names it",
        )

    def in_order(self) -> list[S]:
        """Return the images that are placed, and behind them those that no part has taken."""
        return [*self._placed, *self._left]


class _Present:
    """The columns that rows fill.

    The first row alone does not decide, because it may have a null where other rows have a value.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._counts = Counter(
            name for row in rows for name, value in row.values.items() if value is not None
        )

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of ``names`` that is filled, or None.

        Dots reach into nested columns.
        """
        return next((name for name in names if self._count(name)), None)

    def choose(self, names: Sequence[str]) -> str | None:
        """Return the first of ``names`` that half of the rows fill, or that which most fill.

        It is None where no row fills one. A few odd rows do not choose the columns of all: they
        lack the chosen one, and are named for it.
        """
        half = (name for name in names if 2 * self._count(name) >= len(self._rows))
        chosen = next(half, None) or max(names, key=self._count)
        return chosen if self._count(chosen) else None

    def _count(self, name: str) -> int:
        """Return the number of rows that fill a column."""
        if name in self._counts or name.split(".", maxsplit=1)[0] not in self._counts:
            return self._counts[name]
        return sum(_reach(row.values, name) is not None for row in self._rows)


def _reach(values: Any, name: str) -> Any:
    if isinstance(values, Mapping) and name in values:
        return values[name]
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _cell(row: Row, name: str) -> Any:
    value = _reach(row.values, name)
    if value is None:
        filled = [str(name) for name, one in row.values.items() if one is not None]
        raise row.error(
            "the column is missing or null",
            column=name,
            why=f"this row has: {', '.join(filled) or 'nothing'}",
            remedy="complete the row, or name another column below data.columns",
        )
    return value


def _text(row: Row, name: str) -> str:
    value = _cell(row, name)
    if not isinstance(value, str):
        raise row.error(
            f"{type(value).__name__}, not text", column=name, remedy="write the text as a string"
        )
    return value


def _question(row: Row, name: str) -> str:
    text = _text(row, name)
    if name != INSTRUCTION or row.values.get(INPUT) in (None, ""):
        return text
    return f"{text}\n\n{_text(row, INPUT)}"


def _turns(row: Row, name: str, images: _RowImages | None) -> Messages:
    """Return the messages of a column, behind the text of ShareGPT's system column."""
    turns = _messages(row, name, images)
    if name not in CONVERSATIONS or row.values.get(SYSTEM) in (None, ""):
        return turns
    if turns[0]["role"] == "system":
        raise row.error(
            f"a system message in addition to that of {name}",
            column=SYSTEM,
            remedy="keep one of the two",
        )
    return [_turn("system", _text(row, SYSTEM)), *turns]


def _messages(row: Row, name: str, images: _RowImages | None = None) -> Messages:
    """Return the messages of a column, without images if ``images`` is None."""
    value = _cell(row, name)
    if not isinstance(value, list) or not value:
        raise row.error(
            f"{type(value).__name__}, not a list of messages",
            column=name,
            remedy="write [{role, content}, …]",
        )
    messages = [_message(row, name, turn, images) for turn in value]
    turns = messages if _as_written(row) else [_drop_nulls(turn) for turn in messages]
    return [
        {k: _calls(row, name, v) if k == CALLS else v for k, v in turn.items() if v is not None}
        for turn in turns
    ]


def is_sharegpt(turn: Any) -> bool:
    """Return whether a message is in ShareGPT's form, ``{from, value}``."""
    return isinstance(turn, Mapping) and turn.get("role") is None and turn.get("from") is not None


def _message(row: Row, name: str, turn: Any, images: _RowImages | None) -> dict[str, Any]:
    """Return a message as ``{role, content}``, with its other keys.

    The content is one string, or in a message with images a list of parts.
    """
    if is_sharegpt(turn):
        turn = _from_sharegpt(row, name, turn)
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        raise row.error(
            "a message without a known role",
            column=name,
            why=f"message: {str(turn)[:120]}",
            remedy=f"roles: {', '.join(ROLES)}",
        )
    content = turn.get("content")
    if isinstance(content, list):
        content = _join_parts(row, name, content, turn["role"], images)
    calls = turn["role"] == "assistant" and turn.get(CALLS)
    if not isinstance(content, str | list) and not (calls and content is None):
        raise row.error(
            "a message without text",
            column=name,
            why=f"message: {str(turn)[:120]}",
            remedy="give each message a string `content`",
        )
    return {**turn, "content": content}


def _from_sharegpt(row: Row, name: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise row.error(
            f"a message from {speaker!r:.100}, which is no known role",
            column=name,
            why=f"message: {str(turn)[:120]}",
            remedy=f"known: {', '.join(SHAREGPT_ROLES)}",
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value", "role")}
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}


def _join_parts(
    row: Row, name: str, parts: Sequence[Any], role: str, images: _RowImages | None
) -> str | list[dict[str, Any]]:
    """Return the text of a message's parts, or the parts in order where some are images."""
    if not parts:
        raise row.error("a message without parts", column=name, remedy="give it a text")
    found: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if images is not None and role != "assistant":
            if kind in IMAGE_PARTS:
                images.images.place(row, name, part)
                found.append({"type": "image"})
                continue
            if kind in VIDEO_PARTS:
                images.videos.place(row, name, part)
                found.append({"type": "video"})
                continue
        if kind != "text":
            raise row.error(
                f"a message of the {role} with a part of type {kind!r:.100}, expected text",
                column=name,
                why=f"part: {str(part)[:120]}",
                remedy="remove the part, or the row: images are read in sft and rl alone, and in "
                "no message of the assistant",
            )
        if not isinstance(part.get("text"), str):
            raise row.error(
                "a part without text",
                column=name,
                why=f"part: {str(part)[:120]}",
                remedy='write {"type": "text", "text": "…"}',
            )
        found.append({"type": "text", "text": part["text"]})
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found)
    return found


def text_of(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content or "")


def _calls(row: Row, name: str, value: Any) -> list[Any]:
    """Return the tool calls of a message, parsed if they are JSON text.

    JSON text is accepted because arguments differ from row to row.
    """
    value = _parse_json(row, value, name) or []
    calls: list[Any] = (
        [_parse_json(row, call, name) for call in value] if isinstance(value, list) else [value]
    )
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in calls):
        raise row.error(
            "expected tool_calls as a list of calls",
            column=name,
            why=f"got {str(value)[:120]}",
            remedy="write [{function: {name, arguments}}, …], or that as JSON text",
        )
    return calls


def _tools(row: Row) -> list[dict[str, Any]]:
    value = _parse_json(row, row.values.get(TOOLS))
    if value is None:
        return []
    tools: list[Any] = (
        [_parse_json(row, tool) for tool in value] if isinstance(value, list) else [value]
    )
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise row.error(
            "expected a list of tools",
            column=TOOLS,
            why=f"got {str(value)[:120]}",
            remedy="write their JSON schemas as a list, or as JSON text; "
            "rename a column that means something else",
        )
    return tools if _as_written(row) else [_drop_nulls(tool) for tool in tools]


def _parse_json(row: Row, value: Any, column: str = TOOLS) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return loads(value.encode("utf-8"))
    except ValueError as error:
        raise row.error(
            "the text is not JSON",
            column=column,
            why=f"{error}: {value[:120]}",
            remedy="write tools and their calls as JSON; rename a column that means something else",
        ) from error


def _as_written(row: Row) -> bool:
    """Return whether the author wrote the nulls in a row.

    Parquet and arrow give every message the keys of all messages, with nulls that a template would
    print.
    """
    return row.file.removesuffix(".gz").endswith((".jsonl", ".json"))


def _drop_nulls(value: Any) -> Any:
    """Return the value without keys that are null, at every depth."""
    if isinstance(value, Mapping):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
