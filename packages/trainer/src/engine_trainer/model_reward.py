"""The reward ``reward_model``: the score that a trained reward model gives a conversation.

The model is a sequence classifier with one output, such as ``engine-train rm`` saves. It is loaded
once in each process that scores (``reward.workers``). Calls that wait at the same time are scored
together.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.config import ModelSource
from engine_api.devices import DEVICES, device_of, probe_device
from engine_api.errors import ConfigError, EngineError
from engine_trainer.config.sections import DataSection
from engine_trainer.data import ChatTokenizer, Example, load_tokenizer, positions_of
from engine_trainer.rewards.sample import RewardError, RewardFn, Sample
from engine_trainer.utils.hf_models import first_line, require_source

NAME = "reward_model"
KEY = "reward.kwargs"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def reward_model(
    *,
    path: str,
    device: str = "auto",
    dtype: str = "auto",
    batch_size: int = 16,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> RewardFn:
    """Return a reward that is the model's score of the whole conversation, any finite number.

    The prompt's messages and the completion are rendered with the chat template of the reward
    model, and end with the token that ends a turn, as in training. A completion that was cut at the
    limit is scored in the same way.

    Args:
        path: folder or hub id of the reward model, with its tokenizer.
        device: device of the model, such as ``cpu`` or ``cuda:1``; ``auto``: the first kind of
            device that this machine has. Without a number it is the one of the process's rank.
        dtype: dtype of weights and computation: ``float32``, ``bfloat16``, ``float16``, or
            ``auto``, in which the model was saved.
        batch_size: largest number of conversations in one forward pass.
        revision: revision of a hub id.
        trust_remote_code: run the model's own code.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"{KEY}.dtype",
            f"expected one of {', '.join(DTYPES)}, got {dtype!r:.100}",
            remedy="use auto, or one of them",
        )
    if batch_size < 1:
        raise ConfigError(
            f"{KEY}.batch_size",
            f"expected a number of at least 1, got {batch_size}",
            remedy="give at least 1",
        )
    source = ModelSource(path=path, revision=revision, trust_remote_code=trust_remote_code)
    place = _device(device)
    require_source(path, f"{KEY}.path", revision)
    try:
        tokenizer = load_tokenizer(DataSection(source=path, train_on="last"), source)
        limit = positions_of(source)
    except ConfigError as error:
        # It names the key of the model that is trained.
        raise ConfigError(f"{KEY}.path", error.what, why=error.why, remedy=error.remedy) from error
    model = _load(source, tokenizer, dtype).to(place).eval()
    return ModelScorer(model, tokenizer, batch_size=batch_size, limit=limit).score


def _load(source: ModelSource, tokenizer: ChatTokenizer, dtype: str) -> Any:
    """Load the classifier.

    Raises:
        ConfigError: the folder holds no reward model.
    """
    from transformers import AutoModelForSequenceClassification

    remedy = "name a folder that engine-train rm saved (RUN/hf), or a reward model of one output"
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source.path,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
        )
    # transformers raises errors of many classes for a folder that it cannot read.
    except Exception as error:
        raise ConfigError(
            f"{KEY}.path",
            f"no sequence classifier at {source.path!r}",
            why=first_line(error),
            remedy=remedy,
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{KEY}.path",
            f"{source.path!r} is no trained reward model",
            why=f"it lacks {', '.join(missing[:3])}, which would be drawn at random",
            remedy=remedy,
        )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{KEY}.path",
            f"expected a model with one output, got {model.config.num_labels}",
            remedy=remedy,
        )
    text = model.config.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = tokenizer.pad_token_id
    return model


def _device(name: str) -> torch.device:
    """Return the device of a name, after checking that this process can use it."""
    kind, _, number = name.partition(":")
    if name == "auto":
        kind = next(kind for kind in DEVICES if probe_device(kind).ok)
    found = probe_device(kind)
    if not found.ok:
        raise ConfigError(f"{KEY}.device", f"{name!r:.100}: {found.reason}", remedy=found.remedy)
    device = device_of(kind)
    if not number:
        device.adopt_local_rank()
        return device.current()
    count = device.module.device_count() if number.isdecimal() else 0
    if not number.isdecimal() or int(number) >= count:
        raise ConfigError(
            f"{KEY}.device",
            f"expected a device of this machine, got {name!r:.100}",
            why=f"it has {count} of the kind {kind}" if number.isdecimal() else "",
            remedy=f"give {kind}, or a lower number behind the colon",
        )
    return torch.device(kind, int(number))


@dataclass(kw_only=True, eq=False)
class _Batch:
    """The calls of one event loop that wait to be scored together."""

    loop: asyncio.AbstractEventLoop
    calls: list[tuple[Sample, asyncio.Future[float]]]
    task: asyncio.Task[None] | None = None


class ModelScorer:
    """A reward model with its tokenizer.

    Args:
        model: sequence classifier with one output.
        tokenizer: its tokenizer and chat template.
        batch_size: largest number of conversations in one forward pass.
        limit: largest number of tokens of a conversation; None: any number.
    """

    def __init__(
        self, model: Any, tokenizer: ChatTokenizer, *, batch_size: int, limit: int | None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.limit = limit
        self._waiting: _Batch | None = None
        self._running: set[_Batch] = set()
        # A batch whose calls ran out of time may still be computed when the next one begins.
        self._lock = threading.Lock()

    async def score(self, sample: Sample) -> float:
        """Return the score of one conversation, together with the calls that wait at this time."""
        loop = asyncio.get_running_loop()
        batch = self._waiting
        if batch is None or batch.loop is not loop:
            batch = self._waiting = _Batch(loop=loop, calls=[])
            # All calls that the loop has already started come before this one.
            loop.call_soon(self._send, batch)
        future: asyncio.Future[float] = loop.create_future()
        batch.calls.append((sample, future))
        return await future

    def score_all(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Return the score of each conversation, or the error that it raised."""
        with self._lock, torch.inference_mode():
            found: list[float | Exception] = [math.nan] * len(samples)
            tokens: dict[int, list[int]] = {}
            for i, sample in enumerate(samples):
                try:
                    tokens[i] = self.encode(sample)
                except EngineError as error:
                    found[i] = error
            # Conversations of about the same length need little padding.
            order = sorted(tokens, key=lambda i: len(tokens[i]))
            for start in range(0, len(order), self.batch_size):
                part = order[start : start + self.batch_size]
                scores = self._forward([tokens[i] for i in part])
                for i, score in zip(part, scores, strict=True):
                    found[i] = score
            return found

    def encode(self, sample: Sample) -> list[int]:
        """Return the tokens of the whole conversation.

        Raises:
            RewardError: it is one with tools, or longer than the model's context.
            DataError: the chat template cannot render it.
        """
        if not sample.messages:
            raise RewardError(
                NAME,
                sample,
                "the completion does not answer a prompt of messages",
                remedy="use another reward in conversations with tools (agent)",
            )
        messages = [dict(turn) for turn in sample.messages]
        example = Example(
            messages=[*messages, {"role": "assistant", "content": sample.completion}],
            given=len(messages),
            file=f"reward {NAME!r}",
        )
        document = self.tokenizer.document(example, may_be_empty=True)
        ((tokens, _),) = self.tokenizer.encode_documents([document])
        if self.limit is not None and len(tokens) > self.limit:
            raise RewardError(
                NAME,
                sample,
                f"the conversation has {len(tokens)} tokens of the reward model, whose context has "
                f"{self.limit}",
                remedy="lower rollout.max_new_tokens or data.max_length, or use a reward model "
                "with a longer context",
            )
        return tokens

    # --- inside ---------------------------------------------------------------------------------

    def _send(self, batch: _Batch) -> None:
        """Score the waiting calls in a thread, so that the event loop keeps their time limits."""
        if self._waiting is batch:
            self._waiting = None
        # An event loop keeps no reference to its tasks.
        batch.task = batch.loop.create_task(self._answer(batch))
        self._running.add(batch)

    async def _answer(self, batch: _Batch) -> None:
        samples = [sample for sample, _ in batch.calls]
        found: list[float | Exception]
        try:
            found = await asyncio.to_thread(self.score_all, samples)
        except Exception as error:  # noqa: BLE001 - a forward pass may raise anything; every call raises it
            found = [error] * len(samples)
        finally:
            self._running.discard(batch)
        for (_, future), score in zip(batch.calls, found, strict=True):
            if future.done():
                # It ran out of time.
                continue
            if isinstance(score, Exception):
                future.set_exception(score)
            else:
                future.set_result(score)

    def _forward(self, documents: Sequence[list[int]]) -> list[float]:
        """Return the model's output for each document."""
        padding = self.model.config.get_text_config().pad_token_id
        longest = max(map(len, documents))
        ids = torch.full((len(documents), longest), padding, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.tensor(document)
            mask[row, : len(document)] = 1
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0].float().tolist()
