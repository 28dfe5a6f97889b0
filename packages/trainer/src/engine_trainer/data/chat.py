"""Conversion of text to tokens with chat templates, and of turns to loss weights.

Each turn's text is tokenized on its own, cut where the template begins the assistant's turn.
The prompt's tokens are therefore exactly the ids that a rollout receives, and no token spans the
border between prompt and response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_config import check_counts
from engine_api.hf_vision import has_vision
from engine_trainer.config.sections import DataSection
from engine_trainer.data.images import ImageProcessor, PlannedImage
from engine_trainer.data.layouts import IMAGE_MARK, VIDEO_MARK, Example, Messages, text_of
from engine_trainer.data.sources import say_count
from engine_trainer.data.templates import TemplateError, renderer
from engine_trainer.errors import ImageError
from engine_trainer.utils.hf_models import (
    MODEL_KEY,
    first_line,
    hf_config,
    require_json,
    require_source,
)

TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tekken.json")
_FILES = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, vocab.txt"
RESERVED = {
    "messages",
    "conversation",
    "conversations",
    "chat_template",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "tokenize",
    "return_dict",
}
# A placeholder text that shows how a template renders a message.
PROBE = "ANSWER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a document's text."""

    text: str
    learned: bool
    """True for an assistant turn that carries loss."""


class ChatTokenizer:
    """A tokenizer with its chat template and the settings of a ``DataSection``.

    Without a template (neither in the tokenizer nor in ``data.chat_template``) a row must be one
    prompt with one response. The document is then the two texts in sequence, followed by EOS. The
    tokens that the tokenizer puts before a text (BOS) come before the prompt.

    Attributes:
        tokenizer: the Hugging Face tokenizer.
        stop_token_ids: tokens that end a completion, namely the template's end-of-turn token and
            EOS.
        pad_token_id: padding token for rollouts that pad; EOS if the tokenizer has none.
        image_token: id of the tokens that stand for images, None for a model without a tower.
        video_token: id of the tokens that stand for videos, None for a model that has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        section: DataSection,
        model: ModelSource | None = None,
        image_token: int | None = None,
        video_token: int | None = None,
    ) -> None:
        self.tokenizer, self.section = tokenizer, section
        self.image_token = image_token
        self.video_token = video_token
        self._model = model
        if section.chat_template is not None:
            tokenizer.chat_template = _template_text(section.chat_template)
        self.has_template = bool(tokenizer.chat_template)
        self._is_jinja = _renders_jinja(tokenizer)
        for name in RESERVED & section.chat_template_kwargs.keys():
            raise ConfigError(
                f"data.chat_template_kwargs.{name}",
                "the trainer sets it itself",
                remedy="leave it out",
            )
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "data.tokenizer",
                "the tokenizer has no EOS token",
                why="completions could not end",
                remedy="set eos_token in its tokenizer_config.json",
            )
        self.eos_token_id = int(tokenizer.eos_token_id)
        self.stop_token_ids = tuple(dict.fromkeys([*self._end_of_turn(), self.eos_token_id]))
        self.pad_token_id = (
            self.eos_token_id if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        )

    @property
    def vocabulary(self) -> int:
        """The number of token ids, up to the largest one that is a token."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """The model's processor of images, which is loaded when it is first asked for.

        Raises ``ConfigError`` as ``ImageProcessor.load``.
        """
        assert self._model is not None, "rows have images only where the model is known"
        section = self.section
        return ImageProcessor.load(
            self._model,
            self.tokenizer,
            section.processor_kwargs,
            section.tokenizer,
            video_kwargs=section.video_processor_kwargs,
            video_fps=section.video_fps,
        )

    @property
    def has_image_processor(self) -> bool:
        """True where the processor is loaded, because rows have images."""
        return "image_processor" in self.__dict__

    def keep_image_settings(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the image processor, which a resumed run must find again.

        It is empty where no row has images.

        Raises ``ConfigError`` for a processor that makes other pixels than the checkpoint's.
        """
        if not self.has_image_processor:
            return {}
        if "image_processor" in state:
            self.image_processor.require(state["image_processor"])
        return {"image_processor": self.image_processor.settings}

    def save_pretrained(self, folder: Path) -> None:
        """Write the tokenizer to a model's folder, and the image processor if it was used.

        The folder has the files of the model's processor, whose settings may be others.
        """
        self.tokenizer.save_pretrained(folder)
        if self.has_image_processor:
            self.image_processor.save(folder)

    def plan_images(self, example: Example) -> list[PlannedImage]:
        """Return the example's images, and behind them its videos, with their tokens.

        Raises ``ImageError`` for an image that cannot be used.
        """
        return [self.image_processor.plan(one) for one in (*example.images, *example.videos)]

    def expand_images(
        self, example: Example, segments: Sequence[Segment], images: Sequence[PlannedImage]
    ) -> tuple[list[Segment], list[PlannedImage]]:
        """Return the segments with the placeholders replaced by the tokens of the images.

        The images and videos come back in the order of their tokens.

        Raises ``ImageError`` if there are more images than placeholders, or fewer.
        """
        if not images:
            return list(segments), []
        processor = self.image_processor
        by_kind = {kind: [one for one in images if one.is_video == kind] for kind in (False, True)}
        for kind, own in by_kind.items():
            placed = sum(processor.count_places(one.text, videos=kind) for one in segments)
            if placed != len(own):
                noun = "video" if kind else "image"
                mark = processor.video_placeholder if kind else processor.placeholder
                raise _misplaced(
                    example,
                    noun,
                    len(own),
                    placed,
                    "placeholder",
                    f"{mark!r} in the rendered conversation",
                    f"set a data.chat_template that writes each part of type {noun}, take the "
                    f"placeholder's text out of the row, or put the {noun}s before the last "
                    "response",
                )
        left = {kind: iter(own) for kind, own in by_kind.items()}
        found = [processor.expand(one.text, left[False], left[True]) for one in segments]
        texts = [replace(one, text=text) for one, (text, _) in zip(segments, found, strict=True)]
        return texts, [image for _, own in found for image in own]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt_messages(self, example: Example) -> Messages:
        """Return the messages before the response, as the template receives them."""
        return self._apply_templates(example.prompt, example)

    def prompt_text(self, example: Example) -> str:
        """Return the text that a rollout continues."""
        turns = self._apply_templates(example.prompt, example)
        if not self.has_template:
            return turns[0]["content"]
        text = self._render(turns, example, ask=True)
        self._require_whole(text, turns, example, ask=True)
        return text

    def encode_prompts(self, examples: Sequence[Example]) -> list[tuple[str, list[int]]]:
        """Return one (text, token ids) pair per example, each the prompt a rollout continues."""
        texts = [self.prompt_text(e) for e in examples]
        ids = self._encode(texts) if self.has_template else [self._encode_opening(t) for t in texts]
        return list(zip(texts, ids, strict=True))

    def document(self, example: Example, *, may_be_empty: bool = False) -> list[Segment]:
        """Return the example's text, cut at the borders of the assistant's turns.

        Earlier assistant turns that are empty are not learned.

        Args:
            example: the conversation.
            may_be_empty: accept an empty last response, as in a preference pair, where the
                response that ended at once may be the rejected one.

        Raises:
            DataError: nothing can be learned from the example, or the template does not render a
                longer conversation as a continuation of the shorter one.
        """
        turns = self._apply_templates(example.messages, example)
        # The turns may begin with a system prompt that the example's messages do not have.
        given = len(turns) - len(example.messages) + example.given
        own = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= given]
        if not own:
            raise example.error(
                "no assistant turn, nothing to learn", remedy="add a response to the row"
            )
        # A row without a response is incomplete: it does not ask the model to end at once.
        if not may_be_empty and not _has_content(turns[own[-1]]):
            raise example.error(
                "the response is empty, nothing to learn", remedy="complete the row, or remove it"
            )
        earlier = (
            [i for i in own[:-1] if _has_content(turns[i])]
            if self.section.train_on == "all"
            else []
        )
        own = [*earlier, own[-1]]
        if not self.has_template:
            return [
                Segment(text=turns[0]["content"], learned=False),
                Segment(text=turns[1]["content"], learned=True),
            ]
        return self._cut(turns, own, example)

    def encode_documents(
        self, documents: Sequence[Sequence[Segment]]
    ) -> list[tuple[list[int], list[float]]]:
        """Return the token ids and loss weights of each document.

        The weight is 1 on learned tokens, up to and including the one that ends the turn, else 0.
        """
        ids = iter(self._encode([s.text for segments in documents for s in segments]))
        return [self._join([(s, next(ids)) for s in segments]) for segments in documents]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text in the middle of a document."""
        return self._encode([text])[0]

    def encode_messages(self, messages: Messages, *, after: int) -> list[int]:
        """Return the token ids between two of the model's turns.

        These are the end of the first turn, ``messages``, and the opening of the second turn.

        Args:
            messages: the messages between the two turns.
            after: the last token before. If it already ends the turn, the template's own end is
                left out. If the turn was cut, the template's end is inserted.

        Raises:
            DataError: there is no chat template, or it does not render such messages.
        """
        probe = Example(
            messages=[
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": PROBE},
                *messages,
            ]
        )
        if not self.has_template:
            raise probe.error(
                "messages need a chat template", remedy="set data.chat_template, or append text"
            )
        rest = self._render(probe.messages, probe, ask=True).partition(PROBE)[2]
        lost = [m for m in messages if str(m.get("content") or "").strip() not in rest]
        if lost:
            raise probe.error(
                f"the chat template leaves out a message of role {lost[0]['role']!r}",
                why=str(lost[0])[:200],
                remedy="set another data.chat_template, or append text",
            )
        ids = self.encode_text(rest)
        end = self.stop_token_ids[0]
        return ids[ids.index(end) + 1 :] if after in self.stop_token_ids and end in ids else ids

    # --- inside ---------------------------------------------------------------------------------

    def _cut(self, turns: Messages, own: Sequence[int], example: Example) -> list[Segment]:
        segments: list[Segment] = []
        done = ""
        for at in own:
            asked = self._render(turns[:at], example, ask=True)
            answered = self._render(turns[: at + 1], example, ask=False)
            if not asked.startswith(done) or not answered.startswith(asked):
                raise self._not_a_prefix(example, at, done if not asked.startswith(done) else asked)
            segments.append(Segment(text=asked[len(done) :], learned=False))
            segments.append(Segment(text=answered[len(asked) :], learned=True))
            done = answered
        self._require_whole(done, turns[: own[-1] + 1], example, ask=False)
        return segments

    def _require_whole(self, text: str, turns: Messages, example: Example, *, ask: bool) -> None:
        """Raise ``DataError`` if ``text``, rendered from ``turns``, lacks a part of them.

        Tools, tool calls, questions and system prompts are checked. Assistant and tool messages are
        not, because templates cut thoughts out of answers and write tool results in their own form.
        """
        names = [("the tool", _function(tool)) for tool in example.tools]
        names += [
            ("the call of", _function(call))
            for turn in turns
            for call in turn.get("tool_calls") or ()
        ]
        lost = [f"{what} {name!r}" for what, name in names if name not in text]
        for at, turn in enumerate(turns):
            reaches_text = turn["role"] in ("assistant", "tool") or all(
                part.strip() in text for part in _texts(turn.get("content"))
            )
            # A template may read a message without writing it: SmolLM3's removes /no_think from a
            # system prompt and sets its mode. Such a message changes the rendered text.
            if (
                not reaches_text
                and self._render(
                    [*turns[:at], {**turn, "content": PROBE}, *turns[at + 1 :]], example, ask=ask
                )
                == text
            ):
                lost.append(f"a message of role {turn['role']!r}")
        if lost:
            raise example.error(
                f"the chat template leaves out {lost[0]}",
                why="it would not reach the model",
                remedy="set another data.chat_template, "
                "or take it out of the row or of data.system_prompt",
            )

    def _not_a_prefix(self, example: Example, at: int, expected: str) -> Exception:
        return example.error(
            f"the chat template rewrites earlier text when message {at} is added, so the "
            "assistant's tokens cannot be identified",
            why=f"the longer conversation does not begin with {expected[-80:]!r}",
            remedy="set data.train_on=last (reasoning templates drop earlier thoughts), "
            "or another data.chat_template",
        )

    def _join(self, parts: Sequence[tuple[Segment, list[int]]]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        weights: list[float] = []
        for index, (segment, ids) in enumerate(parts):
            if segment.learned:
                kept, own = self._end_turn(ids, last=index == len(parts) - 1)
            else:
                kept, own = (
                    (
                        self._encode_opening(segment.text)
                        if index == 0 and not self.has_template
                        else ids
                    ),
                    0,
                )
            tokens += kept
            weights += [1.0] * own + [0.0] * (len(kept) - own)
        if weights:
            # The first token has no predecessor that could predict it.
            weights[0] = 0.0
        return tokens, weights

    def _end_turn(self, ids: list[int], *, last: bool) -> tuple[list[int], int]:
        """Return the turn's tokens and the number of them that are learned.

        All tokens up to the one that ends the turn are learned. The text that a template writes
        after it (a line break) is never generated.
        """
        ends = [i for i, token in enumerate(ids) if token in self.stop_token_ids]
        if ends:
            return (ids[: ends[-1] + 1] if last else ids), ends[-1] + 1
        return ([*ids, self.eos_token_id], len(ids) + 1) if last else (ids, len(ids))

    def _apply_templates(self, turns: Messages, example: Example) -> Messages:
        """Return the turns with the system prompt and the prompt template applied."""
        turns = [dict(turn) for turn in turns]
        if not self.has_template:
            self._require_plain(turns, example)
        self._require_tower(example)
        asked = [t for t in turns if t["role"] == "user"]
        if asked:
            asked[-1]["content"] = _fill(self.section.prompt_template, asked[-1]["content"])
        parted = any(isinstance(turn.get("content"), list) for turn in turns)
        around = self.section.prompt_template
        marked = {
            IMAGE_MARK: example.marks_images
            or (self.image_token is not None and IMAGE_MARK in around),
            VIDEO_MARK: example.marks_videos
            or (self.video_token is not None and VIDEO_MARK in around),
        }
        marks = [mark for mark, is_place in marked.items() if is_place]
        if parted or marks:
            _place_images(turns, example, marks)
        if self.section.system_prompt is not None and (not turns or turns[0]["role"] != "system"):
            turns.insert(0, {"role": "system", "content": self.section.system_prompt})
        return turns

    def _require_tower(self, example: Example) -> None:
        """Raise ``ConfigError`` for a row with images or videos and a model of text alone."""
        first = next(iter((*example.images, *example.videos)), None)
        # A token of images is that of a tower. Only without one config.json is read for each row.
        if first is None or self._model is None or self.image_token is not None:
            return
        if has_vision(hf_config(self._model)):
            return
        kind = "images" if example.images else "videos"
        raise ConfigError(
            MODEL_KEY,
            f"{first.file}:{first.row} has {kind} (column {first.column!r}), and "
            f"{self._model.path!r} has no vision tower",
            why="its config.json has no vision_config",
            remedy=f"give a vision-language model, remove the {kind} from the rows, or give a "
            "column that is metadata another name",
        )

    def _require_plain(self, turns: Messages, example: Example) -> None:
        whole = {"tools": example.tools, "images": example.images, "videos": example.videos}
        for name, given in whole.items():
            if given:
                raise example.error(
                    f"{name}, but the tokenizer has no chat template",
                    remedy="set data.chat_template",
                )
        roles = [t["role"] for t in turns]
        if roles not in (["user"], ["user", "assistant"]) or self.section.system_prompt is not None:
            raise example.error(
                "a conversation, but the tokenizer has no chat template",
                why=f"roles: {', '.join(roles)}",
                remedy="set data.chat_template, or give one prompt with one response",
            )

    def _render(self, turns: Messages, example: Example, *, ask: bool) -> str:
        given = dict(self.section.chat_template_kwargs)
        tools = list(example.tools) or None
        try:
            if not self._is_jinja:
                return str(
                    self.tokenizer.apply_chat_template(
                        turns,
                        tokenize=False,
                        add_generation_prompt=ask,
                        **given,
                        **({"tools": tools} if tools else {}),
                    )
                )
            template = self.tokenizer.get_chat_template(tools=tools)
            known = {**self.tokenizer.special_tokens_map, **given, "tools": tools}
            return renderer().render(template, turns, ask=ask, given=known)
        # A template, or a tokenizer's own code, may raise any of these.
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise example.error(
                "the chat template cannot render this conversation",
                why=str(error),
                remedy="check the roles and their order, or set data.chat_template",
            ) from error

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # Some tokenizers make a token of an empty text.
        filled = [t for t in texts if t]
        ids = iter(self.tokenizer(filled, add_special_tokens=False)["input_ids"] if filled else [])
        return [list(next(ids)) if t else [] for t in texts]

    def _encode_opening(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text)["input_ids"])
        return ids[:-1] if ids and ids[-1] == self.eos_token_id else ids

    def _end_of_turn(self) -> list[int]:
        """Return the first special token that the template writes after an assistant's text."""
        if not self.has_template:
            return []
        probe = Example(
            messages=[{"role": "user", "content": "1"}, {"role": "assistant", "content": PROBE}],
            file="data.chat_template, a probe of one question and its answer",
        )
        tail = self._render(probe.messages, probe, ask=False).rpartition(PROBE)[2]
        special = set(self.tokenizer.all_special_ids)
        special |= {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return [i for i in self._encode([tail])[0] if i in special][:1]


def _renders_jinja(tokenizer: Any) -> bool:
    """Return whether a tokenizer renders Jinja templates with transformers' own method."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def load_tokenizer(section: DataSection, model: ModelSource) -> ChatTokenizer:
    """Load the tokenizer of ``data.tokenizer``, or the model's if that is not set.

    Raises:
        ConfigError: there is no tokenizer, it has no vocabulary, or a file that it is read with is
            damaged.
    """
    from transformers import AutoTokenizer

    path = section.tokenizer or model.path
    key = "data.tokenizer" if section.tokenizer else MODEL_KEY
    revision = None if section.tokenizer else model.revision
    require_source(path, key, revision)
    _require_files(Path(path), key)
    try:
        _check_counts(path, key, revision)
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, revision=revision
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            key,
            f"no tokenizer at {path!r}",
            why=first_line(error),
            remedy="name a folder with tokenizer.json, or a hub id, in data.tokenizer",
        ) from error
    # transformers reads config.json too, and each family's own code may raise anything on
    # unexpected values.
    except Exception as error:
        raise ConfigError(
            key,
            f"the files of the tokenizer at {path!r} cannot be used",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="correct config.json and the tokenizer's files, or fetch them again",
        ) from error
    # For some model types transformers builds an empty tokenizer instead of raising an error.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ConfigError(
            key,
            f"the tokenizer at {path!r} has no vocabulary",
            why=f"expected one of {_FILES} in its folder",
            remedy="copy the whole tokenizer into it, or name another in data.tokenizer",
        )
    return ChatTokenizer(tokenizer, section, model, *_find_media_tokens(model))


def _find_media_tokens(model: ModelSource) -> tuple[int | None, int | None]:
    """Return the ids of the tokens that stand for images and for videos.

    They are None for a model without a tower.
    """
    from transformers import PreTrainedConfig

    require_json(model.path, MODEL_KEY)
    # A tokenizer needs no config.json.
    with suppress(OSError):
        content, _ = PreTrainedConfig.get_config_dict(model.path, revision=model.revision)
        image = content.get("image_token_id", content.get("image_token_index"))
        video = content.get("video_token_id")
        if has_vision(content) and isinstance(image, int):
            return image, video if isinstance(video, int) else None
    return None, None


def _check_counts(path: str, key: str, revision: str | None) -> None:
    """Raise ``ConfigError`` for counts that no model has in the ``config.json`` at ``path``.

    transformers reads the file to choose a tokenizer's class, and would fill the memory.
    """
    from transformers import PreTrainedConfig

    # A tokenizer needs no config.json.
    with suppress(OSError):
        content, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
        check_counts(content, f"{path}/config.json", key)


def _require_files(folder: Path, key: str) -> None:
    """Raise ``ConfigError`` for a folder without any file of a tokenizer."""
    if not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return
    there = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
    saved = folder / "hf"
    if saved.is_dir():
        remedy = f"name {saved}, the model that this run has saved"
    else:
        remedy = (
            "copy the tokenizer's files into it, or name another folder or a hub id in "
            "data.tokenizer"
        )
    raise ConfigError(
        key,
        f"no tokenizer in the folder {str(folder)!r}",
        why=f"expected one of {_FILES}, got {there}",
        remedy=remedy,
    )


def _has_content(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn has text, a tool call, or any other content (such as thoughts)."""
    return any(v.strip() if isinstance(v, str) else v for name, v in turn.items() if name != "role")


def _texts(content: Any) -> list[str]:
    """Return the texts of a message's content, one by one."""
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [str(content or "")]


def _fill(template: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's content in place of ``{prompt}`` in the template."""
    if isinstance(content, str):
        return template.replace("{prompt}", content)
    found: list[dict[str, Any]] = []
    for number, text in enumerate(template.split("{prompt}")):
        found += content if number else []
        found += [{"type": "text", "text": text}] if text else []
    return found


def _place_images(turns: Messages, example: Example, marks: Sequence[str]) -> None:
    """Put a part of type image or video into the turns for each image or video of the example.

    Turns that have such parts are left as they are. In others ``marks`` (``<image>``, ``<video>``)
    are the places, but for those of the assistant, which writes no images.

    Raises ``ImageError`` if there are more images than places, or fewer.
    """
    if marks and not any(isinstance(turn.get("content"), list) for turn in turns):
        for turn in turns:
            text = text_of(turn.get("content"))
            if turn["role"] != "assistant" and any(mark in text for mark in marks):
                turn["content"] = _divide_at_marks(text, marks)
    kinds = [
        part["type"]
        for turn in turns
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
    ]
    places = (("image", IMAGE_MARK, example.images), ("video", VIDEO_MARK, example.videos))
    for kind, mark, given in places:
        placed = kinds.count(kind)
        if placed != len(given):
            raise _misplaced(
                example,
                kind,
                len(given),
                placed,
                "place",
                f"for them: {mark} in the texts before the response, or parts of type {kind}",
                f"write {mark} where each {kind} belongs, in the row or in data.prompt_template",
            )


def _divide_at_marks(text: str, marks: Sequence[str]) -> list[dict[str, Any]]:
    """Return a text as parts, with one of type image or video in the place of each mark."""
    types = {IMAGE_MARK: "image", VIDEO_MARK: "video"}
    divided = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [
        {"type": types[one]} if at % 2 else {"type": "text", "text": one}
        for at, one in enumerate(divided)
        if one
    ]


def _misplaced(
    example: Example, kind: str, given: int, placed: int, place: str, places: str, remedy: str
) -> ImageError:
    return ImageError(
        f"the row has {say_count(given, kind)} and {say_count(placed, place)} {places}",
        file=example.file,
        row=example.number or None,
        why=f"the features of {'an image' if kind == 'image' else 'a video'} replace the tokens of "
        "its placeholder",
        remedy=f"{remedy}, or set data.on_bad_image=drop",
    )


def _function(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool or of a tool call, with or without ``function`` around it."""
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name") or "")


def _template_text(value: str) -> str:
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "data.chat_template",
            f"expected a Jinja template or a readable file, got {value!r:.200}",
            why=str(error)[:200],
            remedy="give the template's text, or the path of a .jinja file",
        ) from error
