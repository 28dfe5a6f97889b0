"""Weight syncs while vLLM generates: the refusals of a rollout that is made for them.

The generation pauses between two steps (``generation.Stepper.pause``). With ``keep`` the
``cache_salt`` of a request says after which pause it began, so that vLLM's prefix cache serves it
no keys and values of other weights.
"""

from __future__ import annotations

from engine_api.errors import ConfigError, UnsupportedCapability
from rollout_fp8.options import VllmOptions

NAME = "in_flight"


def check(
    options: VllmOptions,
    *,
    in_flight: bool,
    adapter: bool,
    routed_experts: bool,
    vision: bool,
) -> None:
    """Raise an error for what excludes syncs during generation, or has no effect without them.

    Raises:
        UnsupportedCapability: the rollout cannot be made with ``in_flight``; it names the reason.
        ConfigError: ``kv_cache_in_flight`` is given without ``in_flight``.
    """
    if not in_flight:
        if options.kv_cache_in_flight != "recompute":
            raise ConfigError(
                "rollout.options.kv_cache_in_flight",
                f"expected recompute, got {options.kv_cache_in_flight}",
                why="this rollout takes no weights while it generates, so that no keys and values "
                "are kept",
                remedy="leave it out, or use overlap.mode=full with vllm in replicas of their own",
            )
        return
    refusals = (
        (
            adapter,
            "vLLM unloads the old adapter, which unfinished completions refer to",
            "rollout.lora=merged",
        ),
        (
            routed_experts,
            "no run has shown which experts vLLM reports for tokens from before a sync",
            "rollout.routed_experts=off",
        ),
        (
            vision,
            "no run has compared the features of images across a sync",
            "rollout.name=local",
        ),
        (
            options.kv_cache_dtype == "fp8",
            "scales of the FP8 cache are computed at each sync, from a pass of its own",
            "rollout.options.kv_cache_dtype=auto",
        ),
        (
            options.executor == "in_process" and options.tensor_parallel_size > 1,
            "ranks that serve one replica in their own processes do not generate in the background",
            "rollout.options.executor=workers",
        ),
    )
    for refused, why, remedy in refusals:
        if refused:
            raise UnsupportedCapability(NAME, where="rollout 'vllm'", why=why, remedy=remedy)
