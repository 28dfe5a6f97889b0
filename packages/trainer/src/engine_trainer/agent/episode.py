"""The conversation that an agent function continues, token by token.

The function receives an ``Episode``, with the tokens so far and the model that continues them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from engine_api.errors import EngineError
from engine_api.rollout import Completion
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.utils.experts import join_experts

if TYPE_CHECKING:
    import torch

End = Literal["done", "limit", "timeout", "failed"]
Input = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, tokens, or messages."""


class AgentError(EngineError):
    """An agent function raised, or used its episode wrongly.

    ``__cause__`` is the error that it raised, where it ran in this process.
    """

    @classmethod
    def failed(cls, problem: str, prompt: Prompt, count: int, most: int) -> Self:
        """Build the error for the ``count``-th failure, where a run tolerates ``most``."""
        return cls(
            problem + (f"; failed trajectories: {count}" if most else ""),
            where="agent.function",
            why=about(prompt),
            remedy="fix it; agent.max_failures lets some trajectories end there",
        )


def about(prompt: Prompt) -> str:
    """Return a text about the prompt for errors."""
    return f"problem {prompt.text[:400]!r}"


class EpisodeOver(BaseException):
    """No turn or no token is left.

    It is not an ``Exception``, so that an agent's own ``except Exception`` does not catch it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The model's tokens of one turn.

    ``finished`` is True if it stopped by itself.
    """

    text: str
    tokens: list[int]
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A whole conversation after its prompt.

    Attributes:
        tokens: the model's and the tools', in their order.
        loss_weights: one per token, 1 where the model made it, 0 where a tool did.
        log_probs, weight_versions: one per token, from the rollout; where a tool made it 0, and the
            version of the turn before (at the beginning: of the first turn).
        text: the model's text of all its turns.
        finished: the function returned, and the model's last turn stopped by itself.
        turns: number of the model's turns.
        end: reason of the end: by itself, no turn or token left, out of time, or the function
            failed.
        problem: error that the function raised, where it failed.
        routed_experts: by token of the prompt and of ``tokens`` the experts of each layer, as the
            rollout recorded them, up to the model's last turn; None where it records none.
        passes: forward passes that generated the model's tokens, 0 where they are not counted.
        info: notes of the function (``Episode.info``); the reward finds them in ``metadata``.
    """

    tokens: list[int]
    loss_weights: list[float]
    log_probs: list[float]
    weight_versions: list[int]
    text: str
    finished: bool
    turns: int
    end: End = "done"
    problem: str = ""
    routed_experts: torch.Tensor | None = field(default=None, repr=False, compare=False)
    passes: int = 0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A turn to be generated, with its trajectory, its number there and the tokens before it."""

    number: int
    turn: int
    tokens: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the turn, in addition to the rollout's own."""


class Clock:
    """The time limit of a function.

    With None there is no limit.

    It stands still while the model generates.

    Attributes:
        out: set when the time is up.
    """

    def __init__(self, seconds: float | None) -> None:
        self.out = asyncio.Event()
        self._left = seconds
        self._since = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def go(self) -> None:
        """Start the clock."""
        if self._left is not None and self._handle is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._handle = loop.call_later(self._left, self.out.set)

    def stop(self) -> None:
        """Stop the clock."""
        if self._left is not None and self._handle is not None:
            self._handle.cancel()
            self._left -= asyncio.get_running_loop().time() - self._since
            self._handle = None


class Generator(Protocol):
    """The model, as episodes call it."""

    async def generate(self, request: Request) -> Completion:
        """Return one completion. Raises ``RolloutError``."""
        ...


class Episode:
    """One conversation, which the function continues until it ends it.

    Attributes:
        prompt: the problem: ``text``, ``answer``, ``metadata``, ``tokens``.
        info: notes for the reward function.
        clock: the function's time limit.
    """

    def __init__(
        self,
        number: int,
        prompt: Prompt,
        generator: Generator,
        tokenizer: ChatTokenizer,
        *,
        max_tokens: int,
        max_turns: int,
        max_turn_tokens: int | None,
    ) -> None:
        self.prompt = prompt
        self.info = dict[str, Any]()
        self.clock: Clock | None = None
        # The task that waits for the model: the function, or a task that it has started.
        self._asking: asyncio.Task[Any] | None = None
        self._left = False
        self._number = number
        self._generator = generator
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._added: list[int] = []
        self._weights: list[float] = []
        self._log_probs: list[float] = []
        self._passes = 0
        self._versions: list[int] = []
        self._turns: list[Turn] = []
        self._experts: torch.Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, the prompt's included."""
        return [*self.prompt.tokens, *self._added]

    @property
    def turns(self) -> list[Turn]:
        """The model's turns so far."""
        return list(self._turns)

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still follow, the model's and the tools' together."""
        return self._max_tokens - len(self._added)

    async def generate(
        self,
        given: Input | None = None,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """Append ``given`` (see ``append``) and let the model continue.

        Args:
            given: a tool's result, or the text of another speaker; it carries no loss.
            max_new_tokens: limit of this turn, in addition to ``agent.max_turn_tokens`` and the
                tokens left.
            stop_token_ids: end this turn too.

        Raises ``EpisodeOver``, which need not be caught, when no turn or no token is left.
        """
        # A task outlived its function. With an error, which it might catch to ask again, it would
        # block the event loop.
        if self._left:
            await asyncio.get_running_loop().create_future()
        if self._asking is not None:
            raise AgentError(
                "generate was called while the model still generates",
                where="agent.function",
                why=f"an episode is one conversation; {about(self.prompt)}",
                remedy="await one generate after the other",
            )
        if given is not None:
            self.append(given)
        if len(self._turns) >= self._max_turns or self.tokens_left < 1:
            raise EpisodeOver
        limits = [
            n for n in (self.tokens_left, self._max_turn_tokens, max_new_tokens) if n is not None
        ]
        request = Request(
            number=self._number,
            turn=len(self._turns),
            tokens=self.tokens,
            max_new_tokens=max(1, min(limits)),
            stop_token_ids=tuple(stop_token_ids),
        )
        return self._record(await self._ask(request))

    def append(self, given: Input) -> None:
        """Add tokens that the model did not make.

        They are text (tokenized by itself), tokens, or messages through the chat template. After
        messages it is the model's turn again.

        Raises ``EpisodeOver`` when they do not fit.
        """
        tokens = self._tokens_of(given)
        if len(tokens) > self.tokens_left:
            raise EpisodeOver
        self._added += tokens
        self._weights += [0.0] * len(tokens)
        self._log_probs += [0.0] * len(tokens)
        self._versions += [self._versions[-1] if self._versions else -1] * len(tokens)

    def end(self) -> Trajectory:
        """Return the conversation so far, for an agent function to return."""
        return self.close("done")

    def close(self, end: End, problem: str = "") -> Trajectory:
        """Return the conversation with the reason of its end (for the runner)."""
        finished = end == "done" and bool(self._turns) and self._turns[-1].finished
        info = {**self.info, "turns": [turn.text for turn in self._turns]}
        return Trajectory(
            tokens=list(self._added),
            loss_weights=list(self._weights),
            log_probs=list(self._log_probs),
            weight_versions=list(self._versions),
            text="".join(turn.text for turn in self._turns),
            finished=finished,
            turns=len(self._turns),
            end=end,
            problem=problem,
            routed_experts=self._experts,
            passes=self._passes,
            info=info,
        )

    def leave(self) -> None:
        """Stop all further requests, because the function has ended (for the runner)."""
        self._left = True
        if self._asking is not None:
            self._asking.cancel()

    # --- inside ---------------------------------------------------------------------------------

    async def _ask(self, request: Request) -> Completion:
        self._asking = asyncio.current_task()
        if self.clock is not None:
            self.clock.stop()
        try:
            return await self._generator.generate(request)
        finally:
            self._asking = None
            if self.clock is not None:
                self.clock.go()

    def _record(self, completion: Completion) -> Turn:
        self._added += completion.tokens
        self._weights += [1.0] * len(completion.tokens)
        self._log_probs += completion.log_probs
        self._passes += completion.passes
        # Tokens that were appended before the first turn get the version of that turn.
        if completion.weight_versions:
            self._versions = [completion.weight_versions[0] if v < 0 else v for v in self._versions]
        self._versions += completion.weight_versions
        self._experts = join_experts(self._experts, completion.routed_experts)
        turn = Turn(
            text=self._tokenizer.decode(completion.tokens),
            tokens=list(completion.tokens),
            finished=completion.finish_reason == "stop",
        )
        self._turns.append(turn)
        return turn

    def _tokens_of(self, given: Input) -> list[int]:
        if isinstance(given, str):
            return self._tokenizer.encode_text(given)
        if all(isinstance(item, int) for item in given):
            return [int(item) for item in cast("Sequence[int]", given)]
        messages = [dict(item) for item in cast("Sequence[Mapping[str, Any]]", given)]
        return self._tokenizer.encode_messages(messages, after=self.tokens[-1])
