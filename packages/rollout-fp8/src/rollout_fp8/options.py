"""Options that ``rollout.options`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from engine_api.config import near_matches
from engine_api.errors import ConfigError

QUANTIZATIONS = ("none", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that the rollout of every server takes."""

    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for weights, activations and caches together, in (0, 1].

    The rest is the engine's.
    """

    max_model_len: int | None = None
    """Largest number of tokens of a prompt with its completion. Null is the model's own limit."""

    tensor_parallel_size: int = 1
    """Number of GPUs that serve one replica."""

    scales: Literal["fp32", "pow2"] = "fp32"
    """Kind of the scales of FP8 blocks. ``pow2`` rounds them up to powers of two."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Kind of numbers in the cache of keys and values (``kv_cache_dtype`` of the servers).

    ``auto`` is the rollout's dtype. ``fp8`` is e4m3, which takes half of the memory of 16 bits.
    """

    kv_cache_for_batch: bool = False
    """True makes the cache just large enough for one batch, instead of using all memory left.

    That is the size of ``batch_size`` sequences of ``max_model_len`` at once. No generation uses
    more, and a smaller cache sleeps and wakes faster. vLLM refuses it for models with latent
    attention, and SGLang for those with layers of windows or states.
    """

    audit: bool = True
    """True compares the served weights with the exported ones after every sync."""

    allow_untested_version: bool = False
    """True accepts a server that is not in the table of tested versions."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Check names and values, and return the options.

        Raises:
            ConfigError: an option is unknown or has a wrong value; the error names it.
        """
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
    """Options that ``VllmRollout`` takes in addition to those of every server."""

    executor: Literal["in_process", "workers"] = "in_process"
    """Place of vLLM's engine. ``in_process`` puts it into this process, on its device.

    Where torch.distributed runs, ``tensor_parallel_size`` neighbouring ranks then serve one
    replica. With ``workers`` vLLM starts processes of its own.
    """

    enforce_eager: bool | None = None
    """True uses no CUDA graphs and no compilation.

    Null is true on the CPU, for models with states in their layers (linear attention, state spaces)
    and for models that vLLM has no class of its own for. False is refused for the latter.
    """

    max_num_batched_tokens: int | None = None
    """Largest number of tokens of one forward pass. Null leaves the choice to vLLM."""

    deterministic: bool = True
    """True gives every completion its own seed, so that its draw depends on nothing else.

    With false completions are drawn from one stream, which is faster with hundreds of them at a
    time, and no run can be repeated.
    """

    memory_saver: bool = True
    """True lets ``sleep`` free memory on CUDA.

    vLLM then serves only one rollout in each process at a time.
    """

    prefix_caching: bool = True
    """True keeps keys and values of common prefixes. They are dropped at every sync."""

    kv_cache_bytes: int | None = None
    """Size of the cache on each GPU, instead of the memory that ``gpu_memory_utilization`` leaves.

    Null is that memory, and 1 GiB on the CPU.
    """

    kv_cache_in_flight: Literal["recompute", "keep"] = "recompute"
    """Keys and values of unfinished completions at a sync that comes while they are generated.

    With ``recompute`` the new weights compute them again, so that each token is drawn from the
    distribution that the engine computes for its version, as with slices. A sync then costs a
    prefill of all unfinished completions. With ``keep`` they stay those of the old weights: nothing
    is computed again, and later tokens are drawn from a mixture that no weights have by themselves.
    New completions never use old keys and values. Where the rollout takes no weights while it
    generates, as with ``overlap.in_flight: false``, with an agent and in ``engine-train eval``,
    only ``recompute`` is accepted.
    """

    truncation: bool = True
    """True serves ``top_p`` and ``top_k``.

    With false they are refused, and so are temperatures that vLLM changes (below 0.01, except 0)
    or does not accept (above 2). vLLM may then use its newer model runner, which seeds the draws
    of all sequences in one kernel.
    """

    gdn_prefill_backend: Literal["auto", "flashinfer", "triton", "cutedsl"] = "auto"
    """Kernel with which linear attention computes prompts on CUDA (vLLM's ``gdn_prefill_backend``).

    Qwen3-Next and Qwen3.5 have such layers, and other models ignore it. ``auto`` leaves the choice
    to vLLM: FlashInfer's kernel on Hopper and some Blackwell GPUs, and Triton's on others. A kernel
    that cannot be used is refused at the start.
    """

    speculative: Literal["none", "ngram"] = "none"
    """Method of speculative decoding (``method`` of vLLM's ``speculative_config``).

    ``ngram`` proposes the tokens that followed the last tokens where these came before in the
    sequence, and needs no draft weights. The served model checks them in one forward pass, and
    tokens and log-probs follow its own distribution. It needs ``truncation: false`` and
    ``deterministic: false``.
    """

    num_speculative_tokens: int | None = None
    """Largest number of tokens that are proposed for one forward pass. Null is 4."""

    prompt_lookup_max: int | None = None
    """Largest number of last tokens that ``ngram`` looks for. Null is 4."""

    prompt_lookup_min: int | None = None
    """Smallest number of last tokens that ``ngram`` looks for. Null is 2."""


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
