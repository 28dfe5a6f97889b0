"""How draws are asked of vLLM, and how its sampler is made to report the log-probs that the contract wants.

The contract: temperature applied, top-p and top-k not. vLLM's ``logprobs_mode`` knows logits before
the temperature (``raw_*``) and after the truncation (``processed_*``), nothing between.
``Normalize``, a logits processor (public interface), turns logits into log-probs at the request's
own temperature before vLLM truncates; the softmax of log-probs is the same distribution.
``processed_logits`` then reports them as they are: truncation only masks others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine_api.errors import RolloutError
from engine_api.requests import check_prompts, check_sampling
from engine_api.rollout import SamplingParams

TEMPERATURE = "rollout_fp8_temperature"  # key of the request's extra arguments
COLDEST, HOTTEST = (
    0.01,
    2.0,
)  # vLLM raises a temperature below the one to it, and refuses one above the other (0.32.0; 0 is greedy)
NORMALIZE = "rollout_fp8.vllm.sampling:Normalize"


class Normalize(LogitsProcessor):
    """Logits → log-probs, divided by each row's temperature first (1 for greedy rows)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._rows: dict[int, float] = {}  # row → its temperature, where that is not 1
        self._divisor: torch.Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        """False, although no choice changes: invariant processors are skipped for greedy rows."""
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
            there, here = self._rows.pop(target, None), self._rows.pop(source, None)
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
        """``[rows, vocabulary]`` float32 both ways."""
        if self._divisor is not None:
            logits = logits.div_(self._divisor)
        return logits.log_softmax(-1)

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
    """One completion's draw as vLLM takes it.

    Args:
        sampling: of the contract; its ``n`` completions are requests of their own.
        seed: of this completion; None: of vLLM's own stream.
        stop: ids that end it, all of them.
        streamed: report tokens as they come, else once at the end.
        normalized: the engine runs ``Normalize``, which applies the temperature.
    """
    greedy, temperature, extra = sampling.temperature == 0, sampling.temperature, None
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
        ignore_eos=True,  # only the ids given to us end a completion
        logprobs=0,  # of the sampled token alone
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
    """Refuse what cannot be generated. Raises ``RolloutError`` that names the prompt at fault."""
    check_sampling(sampling, where)
    if not truncation and (sampling.top_p < 1 or sampling.top_k > 0):
        raise RolloutError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}",
            where=where,
            why="the rollout was made with truncation=false",
            remedy="rollout.options.truncation=true",
        )
    if (
        not truncation
        and sampling.temperature > 0
        and not COLDEST <= sampling.temperature <= HOTTEST
    ):
        raise RolloutError(
            f"temperature={sampling.temperature}",
            where=where,
            why=f"with truncation=false vLLM applies it, and knows {COLDEST} to {HOTTEST:g}, and 0: it would draw at another",
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
