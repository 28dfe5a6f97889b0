"""Speculative decoding by vLLM: its refusals, and vLLM's arguments.

vLLM draws proposed tokens with its rejection sampler (Leviathan et al.,
https://arxiv.org/abs/2211.17192), whose tokens follow the served model's distribution. Log-probs
are computed from the logits that the served model has at each accepted position, with the request's
temperature (0.26.0 and 0.32.0, ``RejectionSampler._get_logprobs_tensors``).
"""

from __future__ import annotations

from typing import Any

from engine_api.errors import ConfigError
from rollout_fp8.options import VllmOptions

_TOKENS = 4
_LONGEST = 4
_SHORTEST = 2
_UNREPEATABLE = (
    "a completion's generator draws once for each proposed token, and how many are proposed at "
    "once depends on the room that other completions leave"
)


def check(options: VllmOptions, *, routed_experts: bool, adapter: bool) -> None:
    """Raise ``ConfigError`` for options that have no effect or exclude speculative decoding."""
    if options.speculative == "none":
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"rollout.options.{name}",
                    f"expected null with speculative=none, got {getattr(options, name)}",
                    remedy="set rollout.options.speculative=ngram, or leave it out",
                )
        return
    refusals = (
        (
            "rollout.options.truncation",
            options.truncation,
            "expected false with speculative decoding, got true",
            "vLLM then runs no logits processor, which log-probs before top_p and top_k need",
            "rollout.options.truncation=false, with rollout.top_p=1 and rollout.top_k=0",
        ),
        (
            "rollout.options.deterministic",
            options.deterministic,
            "expected false with speculative decoding, got true",
            _UNREPEATABLE,
            "rollout.options.deterministic=false",
        ),
        (
            "rollout.routed_experts",
            routed_experts,
            "expected off with speculative decoding, got replay",
            "no run has shown that vLLM leaves out the experts of rejected tokens",
            "rollout.routed_experts=off, or rollout.options.speculative=none",
        ),
        (
            "rollout.lora",
            adapter,
            "expected merged with speculative decoding, got adapter",
            "no run has compared the two together",
            "rollout.lora=merged, or rollout.options.speculative=none",
        ),
        (
            "rollout.options.tensor_parallel_size",
            options.executor == "in_process" and options.tensor_parallel_size > 1,
            f"expected 1 with speculative decoding, got {options.tensor_parallel_size}",
            "no run has shown that ranks that serve one replica then draw alike",
            "rollout.options.executor=workers",
        ),
        (
            "rollout.options.prompt_lookup_min",
            _shortest(options) > _longest(options),
            f"expected at most prompt_lookup_max = {_longest(options)}, got {_shortest(options)}",
            "",
            "lower it, or raise rollout.options.prompt_lookup_max",
        ),
    )
    for where, refused, what, why, remedy in refusals:
        if refused:
            raise ConfigError(where, what, why=why, remedy=remedy)


def arguments(options: VllmOptions) -> dict[str, Any]:
    """Return vLLM's arguments for speculative decoding."""
    if options.speculative == "none":
        return {}
    return {
        "speculative_config": {
            "method": options.speculative,
            "num_speculative_tokens": options.num_speculative_tokens or _TOKENS,
            "prompt_lookup_max": _longest(options),
            "prompt_lookup_min": _shortest(options),
        }
    }


def _longest(options: VllmOptions) -> int:
    return options.prompt_lookup_max or _LONGEST


def _shortest(options: VllmOptions) -> int:
    return options.prompt_lookup_min or _SHORTEST
