"""What ``rollout.options`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from engine_api.config import near_matches
from engine_api.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What every server's rollout takes.

    Attributes:
        gpu_memory_utilization: share of a GPU's memory for weights, activations and caches together; the rest is the
            engine's.
        max_model_len: tokens of a prompt with its completion; None: what the model was made for.
        tensor_parallel_size: GPUs that serve one replica.
        scales: of FP8 blocks; ``pow2`` rounds them up to powers of two.
        audit: compare what is served with what was exported, after every sync.
        allow_untested_version: take a server that is not in the table of tested versions.
    """

    gpu_memory_utilization: float = 0.5
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    scales: Literal["fp32", "pow2"] = "fp32"
    audit: bool = True
    allow_untested_version: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Check names and values. Raises ``ConfigError`` that says which option is wrong."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"rollout.options.{name}",
                    "there is no such option",
                    remedy=near_matches(name, sorted(known)),
                )
        hints = get_type_hints(cls)
        for name, value in given.items():
            _check(name, value, hints[name])
        return cls(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmOptions(Options):
    """What ``VllmRollout`` takes beside.

    Attributes:
        executor: ``in_process``: vLLM's engine lives in this process, on its device; where torch.distributed runs,
            ``tensor_parallel_size`` neighbouring ranks serve one replica. ``workers``: vLLM starts processes of its own.
        enforce_eager: no CUDA graphs and no compilation; None: on the CPU only.
        max_num_batched_tokens: tokens of one forward pass; None: vLLM's choice.
        deterministic: a seed of its own for every completion, so that its draw depends on nothing else. Without it
            completions are drawn from one stream, which is faster with hundreds at a time, and no run is repeated.
        memory_saver: on CUDA, let ``sleep`` give memory back; vLLM then serves one rollout a process at a time.
        prefix_caching: keep keys and values of common beginnings; they are dropped at every sync.
        kv_cache_bytes: of each GPU, instead of what ``gpu_memory_utilization`` leaves; None on the CPU: 1 GiB.
        kv_cache_for_batch: a cache for ``batch_size`` sequences of ``max_model_len`` at once, and not all that is left: no generation
            uses more, and what is smaller falls asleep and wakes up faster.
        truncation: serve ``top_p`` and ``top_k``. Without it they are refused, and so are temperatures that vLLM changes (below 0.01, but
            0) or does not take (above 2); vLLM may then take its newer model runner, which seeds the draws of all sequences in one kernel.
    """

    executor: Literal["in_process", "workers"] = "in_process"
    enforce_eager: bool | None = None
    max_num_batched_tokens: int | None = None
    deterministic: bool = True
    memory_saver: bool = True
    prefix_caching: bool = True
    kv_cache_bytes: int | None = None
    kv_cache_for_batch: bool = False
    truncation: bool = True


def _check(name: str, value: Any, hint: Any) -> None:
    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(f"rollout.options.{name}", f"{value!r} {what}", remedy=remedy)

    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            refuse("is not a choice", near_matches(str(value), get_args(hint)))
        return
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return
    if bool in kinds:
        if not isinstance(value, bool):
            refuse("is not a flag", "give true or false")
    elif float in kinds:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            refuse("is not a share", "give a number above 0, at most 1")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse("is not a positive integer", "give an integer >= 1")
