"""The documents of a recorded step that are explained, and what was recorded of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine_trainer.config import RLConfig
from engine_trainer.data import ChatTokenizer, load_tokenizer
from engine_trainer.data.layouts import Example
from engine_trainer.errors import DataError
from engine_trainer.rl.recorded import RecordedStep
from engine_trainer.telemetry.rollouts import EXPERTS
from engine_trainer.telemetry.samples import spread
from engine_trainer.utils.experts import pad_experts

Prompts = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Some completions of a step, and the log-probs that were recorded."""

    rows: Sequence[Mapping[str, Any]]
    """Rows of the recording."""

    engine: Sequence[torch.Tensor]
    """Log-probs of each completion's tokens by the engine, NaN where it computed none."""

    rollout: Sequence[torch.Tensor]
    """Log-probs by the rollout, NaN for tokens that other versions of the weights made."""

    others: int
    """Number of tokens that other versions of the weights made."""

    lost: int
    """Number of tokens of which the rollout reported no number."""


def choose_sample(recorded: RecordedStep, version: int, count: int) -> Sample:
    """Return at most ``count`` completions of a step, in equal distances over the step.

    Args:
        recorded: the step.
        version: version of the weights that the step began with.
        count: number of completions.

    Raises ``DataError`` for a step of which no completion has a token.
    """
    rows = [row for row in recorded.rows if row["tokens"] and row["prompt_tokens"]]
    if not rows:
        raise DataError(
            f"step {recorded.step} has no completion with a token",
            file=str(recorded.file),
            remedy="name another step",
        )
    # The engine computes no completion without an advantage.
    computed = [row for row in rows if row["old_log_probs"] is not None]
    rows = computed or rows
    chosen = [rows[i] for i in spread(len(rows), count)]
    engine = [_floats(row["old_log_probs"], len(row["tokens"])) for row in chosen]
    rollout: list[torch.Tensor] = []
    others = 0
    lost = 0
    for row in chosen:
        values = _floats(row["rollout_log_probs"], len(row["tokens"]))
        stale = torch.tensor([v != version for v in row["weight_versions"]])
        made = _made_by_model(row)
        others += int((stale & made).sum())
        lost += int((values.isnan() & made).sum())
        rollout.append(values.masked_fill(stale | ~made, torch.nan))
    return Sample(rows=chosen, engine=engine, rollout=rollout, others=others, lost=lost)


def other_prompts(config: RLConfig, rows: Sequence[Mapping[str, Any]]) -> list[Prompts]:
    """Return for each row its prompt as other templates render it, by a name of the template.

    Only names that every row has are kept.
    """
    section = config.data
    found = [_plain(load_tokenizer(section, config.engine.model), row) for row in rows]
    sections = {
        "without data.system_prompt": replace(section, system_prompt=None),
        "without data.prompt_template": replace(section, prompt_template="{prompt}"),
        "by the tokenizer's own template": replace(section, chat_template=None),
        "without data.chat_template_kwargs": replace(section, chat_template_kwargs={}),
    }
    for name, other in sections.items():
        if other != section:
            tokenizer = load_tokenizer(other, config.engine.model)
            for prompts, row in zip(found, rows, strict=True):
                _render(prompts, name, tokenizer, row)
    every = set.intersection(*[set(prompts) for prompts in found])
    return [
        {
            name: ids
            for name, ids in prompts.items()
            if name in every and ids != row["prompt_tokens"]
        }
        for prompts, row in zip(found, rows, strict=True)
    ]


def replayed_experts(
    config: RLConfig, rows: Sequence[Mapping[str, Any]]
) -> list[torch.Tensor | None]:
    """Return for each row the recorded experts ``[L, layers, k]`` of prompt and completion.

    They are -1 where they are not known, and None in all rows where the run replayed or recorded
    none.
    """
    given = [row.get(EXPERTS) for row in rows]
    like = next((one for one in given if one is not None), None)
    if config.rollout.routed_experts == "off" or like is None:
        return [None] * len(rows)
    lengths = [len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows]
    return [pad_experts(one, n, like) for one, n in zip(given, lengths, strict=True)]


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a row's name for people."""
    return f"group {row['group']}, sample {row['sample']}"


def _floats(values: Sequence[float | None] | None, length: int) -> torch.Tensor:
    if values is None:
        return torch.full((length,), torch.nan, dtype=torch.float64)
    known = [torch.nan if value is None else value for value in values]
    return torch.tensor(known, dtype=torch.float64)


def _made_by_model(row: Mapping[str, Any]) -> torch.Tensor:
    """Return which tokens of a completion the model made, and no tool."""
    made = torch.ones(len(row["tokens"]), dtype=torch.bool)
    for call in row["tool_calls"]:
        made[call["start"] : call["end"]] = False
    return made


def _plain(tokenizer: ChatTokenizer, row: Mapping[str, Any]) -> Prompts:
    """Return the question alone, and the rendered prompt without the opening of an answer."""
    found = {"the question alone, without a template": tokenizer.encode_text(row["question"])}
    if tokenizer.has_template:
        closed = row["prompt"][: row["prompt"].find(row["question"]) + len(row["question"])]
        found["the prompt up to the question, without the opening of an answer"] = (
            tokenizer.encode_text(closed)
        )
    return {name: ids for name, ids in found.items() if ids}


def _render(prompts: Prompts, name: str, tokenizer: ChatTokenizer, row: Mapping[str, Any]) -> None:
    """Add a prompt, unless the template cannot render it, which no rollout could have done."""
    example = Example(messages=[{"role": "user", "content": row["question"]}], given=1)
    try:
        ((_, ids),) = tokenizer.encode_prompts([example])
    except DataError:
        return
    prompts[name] = ids
