"""Conversion of the contract's sampling parameters to SGLang's requests, and of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from engine_api.errors import RolloutError
from engine_api.requests import check_prompts, check_sampling
from engine_api.rollout import Completion, FinishReason, SamplingParams
from rollout_fp8.log_probs import require_finite
from rollout_fp8.seeds import seeds

WHERE = "rollout 'sglang'"
# SGLang takes temperatures below it for 0 (``_SAMPLING_EPS``, 0.5.16).
COLDEST = 1e-6
# A nucleus that holds one token.
LIKELIEST = 1e-9


def check_request(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, vocab_size: int, limit: int
) -> None:
    """Raise ``RolloutError`` that names the prompt for a request that cannot be generated."""
    check_sampling(sampling, WHERE)
    if 0 < sampling.temperature < COLDEST:
        raise RolloutError(
            f"temperature={sampling.temperature}",
            where=WHERE,
            remedy=f"0, or at least {COLDEST}",
            why="SGLang would draw greedily, and report log-probs at temperature 1",
        )
    check_prompts(
        prompts,
        sampling.max_new_tokens,
        WHERE,
        vocabulary=vocab_size,
        limit=limit,
        room=f"the server holds at most {limit} tokens a sequence",
        remedy="shorten it, lower max_new_tokens, or raise rollout.options.gpu_memory_utilization",
    )


def request_parameters(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, stop: Sequence[int]
) -> list[dict[str, Any]]:
    """Return SGLang's ``sampling_params``, one for each completion, grouped by prompt."""
    common: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(stop),
    }
    if sampling.top_k == 1 and sampling.temperature > 0:
        # For top_k=1 SGLang takes log-probs without the temperature when all requests of a batch
        # have it (sampler.py).
        common |= {"top_k": -1, "top_p": LIKELIEST}
    return [
        common | {"sampling_seed": seed} for seed in chain.from_iterable(seeds(prompts, sampling))
    ]


def completions_of(
    answers: Sequence[Mapping[str, Any]], *, n: int, version: int, stop: Sequence[int]
) -> list[Completion]:
    """Return ``n`` completions for each prompt, in the order of the requests.

    Raises:
        RolloutError: as ``completion_of`` and ``require_finite``.
    """
    completions = [
        completion_of(answer, place // n, version, stop) for place, answer in enumerate(answers)
    ]
    require_finite(completions, WHERE)
    return completions


def completion_of(
    answer: Mapping[str, Any], prompt_index: int, version: int, stop: Sequence[int]
) -> Completion:
    """Return the completion of an answer.

    Raises:
        RolloutError: SGLang gave up on the request, or its answer is not whole.
    """
    meta = answer["meta_info"]
    tokens = list(answer["output_ids"])
    entries = meta.get("output_token_logprobs") or ()
    log_probs = [float(entry[0]) for entry in entries][: len(tokens)]
    if len(log_probs) != len(tokens):
        raise RolloutError(
            f"prompt {prompt_index} came back with {len(tokens)} tokens "
            f"and {len(log_probs)} log-probs",
            where=WHERE,
            remedy="this is a defect of the server's version: use one from the tested table",
        )
    return Completion(
        prompt_index=prompt_index,
        tokens=tokens,
        log_probs=log_probs,
        weight_versions=[version] * len(tokens),
        finish_reason=_finish(meta["finish_reason"], tokens, stop, prompt_index),
    )


def _finish(
    reason: Mapping[str, Any], tokens: Sequence[int], stop: Sequence[int], prompt_index: int
) -> FinishReason:
    if reason["type"] == "abort":
        if reason.get("status_code") is not None:
            raise RolloutError(
                f"prompt {prompt_index} was refused by the server",
                where=WHERE,
                why=str(reason.get("message")),
                remedy="lower batch_size or max_new_tokens if memory ran out",
            )
        return "abort"
    # No stop strings are requested, so a matched one is SGLang's "NaN happened".
    if isinstance(reason.get("matched"), str):
        raise RolloutError(
            f"prompt {prompt_index} came back with a token that is not a number",
            where=WHERE,
            why=reason["matched"],
            remedy="the model computes NaN: sync finite weights, "
            "or serve bfloat16 in place of float16",
        )
    # At the last possible position SGLang says "length" even for a stop token.
    return "stop" if tokens and tokens[-1] in stop else "length"
