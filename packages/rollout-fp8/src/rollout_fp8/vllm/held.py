"""Tokens of completions that are read once, at their end.

vLLM's output processor takes about 7 µs for each new token of each completion, on the thread that
steps the engine, so that a GPU that computes a small model waits for it (docs/benchmarks.md). It is
given all tokens of such a completion at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind

from engine_api.errors import RolloutError

__all__ = ["HeldOutputs"]


@dataclass(slots=True)
class _Held:
    """Tokens so far of a completion, of which vLLM's processor knows nothing yet."""

    name: str
    """Name of the request, as its caller knows it."""

    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])


class HeldOutputs:
    """Outputs of vLLM's engine core, on the way to its output processor.

    It is for engines that record no experts, which come with the output of each token.

    Args:
        process: processes the outputs of a step (``OutputProcessor.process_outputs``).
        requests: state of the processor by vLLM's own name of a request.
    """

    def __init__(self, process: Callable[..., Any], requests: Mapping[str, Any]) -> None:
        self._process = process
        self._requests = requests
        self._held: dict[str, _Held] = {}
        self._ended: dict[str, list[float]] = {}

    def process(self, outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """Process the outputs of a step, but hold those that their caller does not read yet.

        The last output of a completion has all of its tokens, and none of the log-probs, which
        ``take_log_probs`` returns.

        Raises ``RolloutError`` if vLLM has not given one log-prob for each token.
        """
        passed: list[Any] = []
        for output in outputs:
            held = self._held.get(output.request_id) or self._begin(output.request_id)
            if held is not None:
                assert output.routed_experts is None, "the engine records no experts"
                held.tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    # The first column is of the token that was drawn.
                    held.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is None:
                    continue
                self._end(output, held)
            passed.append(output)
        return self._process(passed, *args, **kwargs)

    def take_log_probs(self, name: str) -> list[float] | None:
        """Return the log-probs of a completion that has ended, once.

        It is None for one that was not held.
        """
        return self._ended.pop(name, None)

    def forget_aborted(self) -> None:
        """Drop the tokens of requests that vLLM no longer has."""
        self._held = {key: one for key, one in self._held.items() if key in self._requests}

    def _begin(self, request: str) -> _Held | None:
        """Hold a request from now on, unless its caller reads tokens as they come."""
        state = self._requests.get(request)
        if state is None or state.output_kind != RequestOutputKind.FINAL_ONLY:
            return None
        held = self._held[request] = _Held(state.external_req_id)
        return held

    def _end(self, output: Any, held: _Held) -> None:
        """Let a completion's last output have all of its tokens."""
        if len(held.log_probs) != len(held.tokens):
            raise RolloutError(
                f"expected a log-prob for each of {len(held.tokens)} tokens, got "
                f"{len(held.log_probs)}",
                where="rollout 'vllm'",
                why="this version of vLLM reports them in another way",
                remedy="use a tested version of vLLM",
            )
        output.new_token_ids = held.tokens
        # They would be processed one by one.
        output.new_logprobs = None
        self._ended[held.name] = held.log_probs
        del self._held[output.request_id]
