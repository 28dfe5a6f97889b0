"""The configuration of ``reward.name: combine``, a weighted sum of several rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.binding import bind
from engine_trainer.config.checks import Refusal, refuse
from engine_trainer.config.secrets import masked

COMBINE = "combine"
KEY = "reward.kwargs.rewards"


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """A reward of the weighted sum, given by ``name`` or as a user's own ``function``."""

    name: str | None = None
    """Name of the reward, as in ``reward.name``. Null needs ``function``."""

    function: str | None = None
    """User's own function in place of ``name``, as ``path/to/file.py:name`` or
    ``package.module:name``. Null needs ``name``.
    """

    weight: float = 1.0
    """Factor of the reward in the sum, any finite number. With 0 the reward is only measured."""

    kwargs: Mapping[str, Any] | None = None
    """Arguments of the function, or of the factory that ``name`` stands for. Null is none."""

    timeout_s: float | None = 10.0
    """Seconds that a call may take, after which it counts 0. Null sets no limit.

    Without this key the limit is ``reward.timeout_s``, which has the same default.
    """

    @property
    def title(self) -> str:
        """Name of the reward in metrics and errors."""
        return self.name or (self.function or "").rpartition(":")[2]


def parts_of(kwargs: Mapping[str, Any], timeout_s: float | None) -> list[RewardPart]:
    """Return the rewards of ``kwargs["rewards"]`` in their order.

    Raises ``ConfigError`` for anything that is not read as it is written.
    """
    for name in kwargs:
        if name != "rewards":
            raise ConfigError(
                f"reward.kwargs.{name}",
                "unknown key",
                why="combine reads rewards alone",
                remedy=near_matches(name, ["rewards"]),
            )
    given = kwargs.get("rewards")
    if not isinstance(given, list | tuple):
        kinds = {type(None): "null", dict: f"the mapping {given!r}"}
        raise ConfigError(
            KEY,
            f"expected a list of rewards, got {kinds.get(type(given), repr(given))}",
            remedy="give a list: rewards: [{name: math, weight: 1.0}, …]",
        )
    parts = [_part(one, f"{KEY}[{i}]", timeout_s) for i, one in enumerate(given)]
    titles = [part.title for part in parts]
    if not parts:
        raise ConfigError(
            KEY, "no reward is named", remedy="rewards: [{name: math, weight: 1.0}, …]"
        )
    if len(set(titles)) < len(titles):
        raise ConfigError(
            KEY, f"names {titles}", why="figures are kept by name", remedy="name each reward once"
        )
    return parts


def refuse_limits_without_workers(limits: Mapping[str, float | None]) -> None:
    """Raise ``ConfigError`` for a time limit, given by reward, without a process to enforce it."""
    for name, timeout_s in limits.items():
        if timeout_s is not None:
            raise ConfigError(
                "reward.timeout_s",
                f"expected null with reward.workers: 0, got {timeout_s:g} s for {name!r}",
                why="nothing can end a call for sure inside the process that makes it",
                remedy="set reward.workers: 1, or more: their processes are killed at the limit; "
                "or reward.timeout_s: null",
            )


def _part(given: Any, key: str, timeout_s: float | None) -> RewardPart:
    part = bind(
        RewardPart, {"timeout_s": timeout_s, **given} if isinstance(given, Mapping) else given, key
    )
    refuse(key, _wrong_part(part, given))
    return part


def _wrong_part(part: RewardPart, given: Any) -> Iterator[Refusal]:
    """Yield a refusal for each value that a reward of the sum may not have."""
    yield (
        (part.name is None) == (part.function is None),
        "",
        f"expected name or function, one of the two, got {masked(given)}",
        "",
        "give one of the two, and if wanted weight, kwargs, timeout_s",
    )
    yield (
        part.name == COMBINE,
        "name",
        "combine within combine",
        "",
        "write its rewards into this list, with the weights multiplied",
    )
    yield (
        not math.isfinite(part.weight),
        "weight",
        f"{part.weight} is not a finite number",
        "",
        "give a finite number; 0 only measures",
    )
    yield (
        part.timeout_s is not None and not part.timeout_s > 0,
        "timeout_s",
        f"expected seconds above 0, got {part.timeout_s}",
        "",
        "give seconds above 0, or null",
    )
