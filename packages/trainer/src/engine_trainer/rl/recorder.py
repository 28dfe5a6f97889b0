"""The recorder of a run's completions, in the files of ``engine_trainer.telemetry.rollouts``."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from engine_api.comm import together
from engine_trainer.config import RLConfig
from engine_trainer.data import ChatTokenizer
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rl.credit import CompletionIndex
from engine_trainer.rl.experience import Experience, shaped_rewards
from engine_trainer.rl.kept_tokens import LEARNED, KeptTokens
from engine_trainer.run.run import Run
from engine_trainer.telemetry.rollouts import (
    EXPERTS,
    FOLDER,
    SCHEMA,
    RolloutFiles,
    column,
    describe,
)
from engine_trainer.telemetry.samples import spread
from engine_trainer.telemetry.token_texts import TokenTexts


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """A completion that is kept."""

    group: Group
    number: int
    """Number of its group among all groups of the step."""
    sample: int
    """Number of the completion in its group."""
    learned: CompletionIndex | None
    """Index among the completions that the step learns from, None if it does not."""

    @property
    def completion(self) -> ScoredCompletion:
        """The completion itself."""
        return self.group.completions[self.sample]


class Recorder:
    """The completions of each step that ``run.rollouts`` keeps, written by the first process.

    Every method is called on all processes of the loop together.
    """

    def __init__(self, run: Run, config: RLConfig, tokenizer: ChatTokenizer) -> None:
        self._run = run
        self._config = config
        self._chosen: list[_Chosen] = []
        self._learned = 0
        self._files = RolloutFiles(run.folder / FOLDER)
        self._active = run.is_main and config.run.rollouts != "none"
        # A step whose completions are not all kept cannot be made again, with or without experts.
        self._experts = config.run.rollouts == "all" and config.run.record_experts
        # The thread that writes has a tokenizer of its own, because the loop uses the other one.
        self._texts = TokenTexts(copy.deepcopy(tokenizer.tokenizer)) if self._active else None
        run.before_save.append(self.settle)

    def open(self, step: int) -> None:
        """Prepare to continue after ``step`` (see ``RolloutFiles.open``)."""
        together(self._run.comm, lambda: self._files.open(step) if self._run.is_main else None)

    def choose(self, experience: Experience) -> list[CompletionIndex]:
        """Choose the completions of a step that are kept, and return those that are learned from.

        A number of them is taken from groups in equal distances, because the first groups of an
        asynchronous step are those with the shortest completions.

        Raises ``EngineError`` where the file of the step before could not be written: here no
        weight has changed since that step, which can still be saved.
        """
        self.settle()
        groups = experience.generated or experience.groups
        places = {id(group): place for place, group in enumerate(experience.groups)}
        wanted = self._config.run.rollouts
        if wanted == "none":
            return []
        numbers: Sequence[int] = range(len(groups))
        if wanted != "all":
            numbers = spread(len(groups), math.ceil(wanted / self._config.rollout.n))
        chosen = [
            _Chosen(
                group=groups[number],
                number=number,
                sample=sample,
                learned=(places[id(groups[number])], sample)
                if id(groups[number]) in places
                else None,
            )
            for number in numbers
            for sample in range(len(groups[number].completions))
        ]
        self._learned = sum(len(group.completions) for group in experience.groups)
        self._chosen = chosen if wanted == "all" else chosen[:wanted]
        return [c.learned for c in self._chosen if c.learned is not None]

    def record(self, step: int, kept: KeptTokens) -> None:
        """Write the chosen completions of ``step`` in the background."""
        chosen = self._chosen
        self._chosen = []
        if self._active and chosen:
            now = time.time()
            seconds = self._run.timers.running()
            experts = _describe_experts(chosen) if self._experts else ""
            schema = SCHEMA.with_metadata(describe(self._run.id, self._learned, experts))
            self._files.write(step, lambda: self._table(step, now, chosen, kept, seconds, schema))

    def settle(self) -> None:
        """Wait until the newest file is on the disk. Raises ``EngineError``."""
        if self._config.run.rollouts == "none":
            return
        with self._run.timers.phase("rollouts"):
            together(self._run.comm, lambda: self._files.wait() if self._active else None)

    def close(self) -> None:
        """End the thread that writes, after an error too.

        Each process calls it alone.
        """
        self._files.close()

    # --- in the thread --------------------------------------------------------------------------

    def _table(
        self,
        step: int,
        now: float,
        chosen: Sequence[_Chosen],
        kept: KeptTokens,
        seconds: Mapping[str, float],
        schema: pa.Schema,
    ) -> pa.Table:
        phases = sorted(seconds.items())
        alone = [Group(prompt=c.group.prompt, completions=[c.completion]) for c in chosen]
        shaped = shaped_rewards(alone, self._config)
        rows = [
            {"step": step, "time": now, "seconds": phases, "shaped_reward": float(reward)}
            | _prompt(one)
            | self._completion(one.completion)
            | {EXPERTS: _flat_experts(one.completion) if self._experts else None}
            | _learned(one, kept)
            for one, reward in zip(chosen, shaped[:, 0], strict=True)
        ]
        return pa.Table.from_arrays(
            [column(name, [row[name] for row in rows]) for name in schema.names], schema=schema
        )

    def _completion(self, completion: ScoredCompletion) -> dict[str, Any]:
        assert self._texts is not None
        score = completion.score
        reason = completion.finish_reason or ("stop" if completion.finished else "length")
        return {
            "text": completion.text,
            "tokens": completion.tokens,
            "token_texts": self._texts.texts_of_tokens(completion.tokens),
            "rollout_log_probs": np.asarray(completion.log_probs, dtype=np.float32),
            "weight_versions": completion.weight_versions,
            "reward": score.total,
            "reward_parts": list(score.parts.items()),
            "correct": score.correct,
            "found_answer": score.answer,
            "finish_reason": reason,
            "tool_calls": _tool_calls(completion, self._texts),
            "error": completion.problem,
        }


def _prompt(one: _Chosen) -> dict[str, Any]:
    prompt = one.group.prompt
    return {
        "group": one.number,
        "sample": one.sample,
        "problem": f"{prompt.file}:{prompt.number}",
        "question": prompt.text,
        "prompt": prompt.rendered,
        "prompt_tokens": prompt.tokens,
        "teacher_prompt_tokens": prompt.teacher_tokens,
        "answer": prompt.answer,
        "images": prompt.image_names,
    }


def _describe_experts(chosen: Sequence[_Chosen]) -> str:
    """Return layers, experts a token and dtype of the experts, empty where there are none."""
    given = (one.completion.routed_experts for one in chosen)
    first = next((experts for experts in given if experts is not None), None)
    if first is None:
        return ""
    _, layers, each = first.shape
    return f"{layers} {each} {str(first.dtype).removeprefix('torch.')}"


def _flat_experts(completion: ScoredCompletion) -> np.ndarray[Any, Any] | None:
    experts = completion.routed_experts
    return None if experts is None else experts.flatten().cpu().numpy()


def _learned(one: _Chosen, kept: KeptTokens) -> dict[str, Any]:
    """Return the numbers of the learner, without which no token counts."""
    if one.learned is None:
        mask = np.zeros(len(one.completion.tokens), dtype=np.bool_)
        return {"loss_mask": mask, "learned": False} | dict.fromkeys(LEARNED)
    numbers = kept.numbers(one.learned)
    found: dict[str, Any] = {"loss_mask": numbers.pop("loss_mask").numpy(), "learned": True}
    for name, values in numbers.items():
        found[name] = None if values.isnan().all() else values.numpy()
    return found


def _tool_calls(completion: ScoredCompletion, texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the stretches of tokens that the model did not make.

    ``call`` is the model's text before the stretch, ``result`` the stretch's text, and ``start``
    and ``end`` are its place among the tokens.
    """
    calls: list[dict[str, Any]] = []
    before = ""
    begin = 0
    for made, stretch in groupby(completion.loss_weights or (), key=bool):
        end = begin + sum(1 for _ in stretch)
        text = texts.decode(completion.tokens[begin:end])
        if not made:
            calls.append({"call": before, "result": text, "start": begin, "end": end})
        before = text if made else ""
        begin = end
    return calls
