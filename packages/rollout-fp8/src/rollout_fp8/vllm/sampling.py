"""Draws by vLLM, and the logits processor that makes its sampler report the contract's log-probs.

The contract asks for log-probs with the temperature applied, and without top-p and top-k. vLLM's
``logprobs_mode`` knows logits before the temperature (``raw_*``) and after the truncation
(``processed_*``), and nothing between. ``Normalize``, a logits processor (public interface), turns
logits into log-probs at the request's own temperature before vLLM truncates; the softmax of
log-probs is the same distribution. ``processed_logits`` then reports them as they are, because
truncation only masks other tokens. So does ``Normalize`` with the tokens of images and videos,
which no completion has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine_api.errors import RolloutError
from engine_api.hf_vision import read_vision
from engine_api.requests import check_prompts, check_sampling
from engine_api.rollout import SamplingParams

# Key of the request's extra arguments.
TEMPERATURE = "rollout_fp8_temperature"
# vLLM raises a temperature below the first to it, and refuses one above the second (0.32.0; 0 is
# greedy).
COLDEST = 0.01
HOTTEST = 2.0
NORMALIZE = "rollout_fp8.vllm.sampling:Normalize"


class Normalize(LogitsProcessor):
    """Processor from logits to log-probs, divided by each row's temperature first (1 if greedy)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del is_pin_memory
        self._device = device
        vision = read_vision(vllm_config.model_config.hf_config, "rollout 'vllm'")
        special = [] if vision is None else list(vision.tokens)
        # Tokens that are never drawn, and whose log-probs count in those of the others.
        self._banned = torch.tensor(special, dtype=torch.int64, device=device) if special else None
        # Temperature by row, where it is not 1.
        self._rows: dict[int, float] = {}
        self._divisor: torch.Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        """Return False, although no choice changes: invariant processors skip greedy rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of vLLM's batch: removed, added, moved, in this order."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, *_ in batch_update.added:
            self._set(row, (params.extra_args or {}).get(TEMPERATURE))
        for source, target, direction in batch_update.moved:
            there = self._rows.pop(target, None)
            here = self._rows.pop(source, None)
            self._set(target, here)
            if direction == MoveDirectionality.SWAP:
                self._set(source, there)
        self._divisor = None
        if self._rows:
            divisor = torch.ones(batch_update.batch_size)
            for row, temperature in self._rows.items():
                divisor[row] = temperature
            self._divisor = divisor.to(self._device, non_blocking=True)[:, None]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probs of logits, both ``[rows, vocabulary]`` float32.

        Those of banned tokens are minus infinity.
        """
        if self._divisor is not None:
            logits = logits.div_(self._divisor)
        log_probs = logits.log_softmax(-1)
        if self._banned is None:
            return log_probs
        return log_probs.index_fill_(-1, self._banned, -torch.inf)

    def _set(self, row: int, temperature: float | None) -> None:
        if temperature is None:
            self._rows.pop(row, None)
        else:
            self._rows[row] = temperature


def server_params(
    sampling: SamplingParams,
    *,
    seed: int | None,
    stop: Sequence[int],
    streamed: bool,
    normalized: bool,
) -> vllm.SamplingParams:
    """Return vLLM's parameters of one completion's draw.

    Args:
        sampling: the contract's parameters; its ``n`` completions are separate requests.
        seed: the completion's seed; None: it is drawn from vLLM's own stream.
        stop: all ids that end the completion.
        streamed: report tokens as they come instead of once at the end.
        normalized: the engine runs ``Normalize``, which applies the temperature.
    """
    greedy = sampling.temperature == 0
    temperature = sampling.temperature
    extra = None
    if normalized and not greedy:
        extra = None if temperature == 1 else {TEMPERATURE: temperature}
        temperature = 1.0
    return vllm.SamplingParams(
        temperature=temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        seed=None if greedy else seed,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(stop),
        # Only the given ids end a completion.
        ignore_eos=True,
        # Of the sampled token alone.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        extra_args=extra,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    where: str,
    positions: int,
    vocabulary: int,
    truncation: bool,
) -> None:
    """Raise ``RolloutError`` that names the prompt for a request that cannot be generated."""
    check_sampling(sampling, where)
    if not truncation and (sampling.top_p < 1 or sampling.top_k > 0):
        raise RolloutError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}",
            where=where,
            why="the rollout was made with truncation=false",
            remedy="rollout.options.truncation=true",
        )
    in_range = COLDEST <= sampling.temperature <= HOTTEST
    if not truncation and sampling.temperature > 0 and not in_range:
        raise RolloutError(
            f"temperature={sampling.temperature}",
            where=where,
            why=f"with truncation=false vLLM applies it, and supports {COLDEST} to {HOTTEST:g}, "
            "and 0: it would draw at another temperature",
            remedy="rollout.options.truncation=true, or a temperature in that range",
        )
    check_prompts(
        prompts,
        sampling.max_new_tokens,
        where,
        vocabulary=vocabulary,
        limit=positions,
        room=f"one sequence has at most {positions}",
        remedy="shorten it, lower max_new_tokens, or raise rollout.options.max_model_len",
    )
