"""From the contract's sampling parameters to SGLang's requests, and from its answers to completions."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine_api.errors import RolloutError
from engine_api.requests import check_prompts, check_sampling
from engine_api.rollout import Completion, FinishReason, SamplingParams

WHERE = "rollout 'sglang'"
LIKELIEST = 1e-9  # a nucleus that holds one token


def check_request(prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, vocab_size: int, limit: int) -> None:
    """Refuse what cannot be generated. Raises ``RolloutError`` that names the prompt at fault."""
    check_sampling(sampling, WHERE)
    check_prompts(prompts, sampling.max_new_tokens, WHERE, vocabulary=vocab_size, limit=limit,
                  room=f"the server has room for {limit} tokens a sequence",
                  remedy="shorten it, lower max_new_tokens, or raise rollout.options.gpu_memory_utilization")  # fmt: skip


def request_parameters(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, stop: Sequence[int]
) -> list[dict[str, Any]]:
    """SGLang's ``sampling_params``, one for each completion, grouped by prompt."""
    common: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1, "stop_token_ids": list(stop),
    }  # fmt: skip
    if sampling.top_k == 1 and sampling.temperature > 0:
        # For top_k=1 SGLang takes log-probs without the temperature when all of a batch have it (sampler.py).
        common |= {"top_k": -1, "top_p": LIKELIEST}
    return [common | {"sampling_seed": seed} for seed in seeds(prompts, sampling)]


def seeds(prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Iterator[int]:
    """One a completion: a function of the seed, the prompt, and its place among completions of equal prompts.

    ``seed=None`` takes entropy from the system.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    seen: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        key = tuple(prompt)
        seen[key] = seen.get(key, -1) + 1
        for place in range(sampling.n):
            digest = hashlib.sha256(repr((seed, seen[key], place, key)).encode()).digest()
            yield int.from_bytes(digest[:8], "big") >> 1


def completions_of(
    answers: Sequence[Mapping[str, Any]], *, n: int, version: int, stop: Sequence[int]
) -> list[Completion]:
    """``n`` a prompt, in the order of the requests. Raises ``RolloutError``, see ``completion_of``."""
    return [completion_of(answer, place // n, version, stop) for place, answer in enumerate(answers)]


def completion_of(answer: Mapping[str, Any], prompt_index: int, version: int, stop: Sequence[int]) -> Completion:
    """Raises ``RolloutError`` when SGLang gave up on the request, or its answer is not whole."""
    meta, tokens = answer["meta_info"], list(answer["output_ids"])
    log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()][: len(tokens)]
    if len(log_probs) != len(tokens):
        raise RolloutError(f"prompt {prompt_index} came back with {len(tokens)} tokens and {len(log_probs)} log-probs",
                           where=WHERE, remedy="this is a defect of the server's version: use one from the tested table")  # fmt: skip
    return Completion(prompt_index=prompt_index, tokens=tokens, log_probs=log_probs, weight_versions=[version] * len(tokens),
                      finish_reason=_finish(meta["finish_reason"], tokens, stop, prompt_index))  # fmt: skip


def _finish(told: Mapping[str, Any], tokens: Sequence[int], stop: Sequence[int], prompt_index: int) -> FinishReason:
    if told["type"] == "abort":
        if told.get("status_code") is not None:
            raise RolloutError(f"prompt {prompt_index} was refused by the server", where=WHERE, why=str(told.get("message")),
                               remedy="lower batch_size or max_new_tokens if memory ran out")  # fmt: skip
        return "abort"
    # At the very last place SGLang says "length" even for a stop token.
    return "stop" if tokens and tokens[-1] in stop else "length"
