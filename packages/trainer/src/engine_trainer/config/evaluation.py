"""The parts below ``eval``: measurements on rows that are not trained on.

Every field has a reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine_api.errors import ConfigError
from engine_trainer.config.sections import DataSection, at_least


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A held-out set of ``eval.sets``."""

    source: str | Sequence[str] | None = None
    """Source of the problems, written like ``data.source``; null is the held-out problems of
    ``data.reasoning_gym``.
    """

    split: str | None = None
    """Split of the source, written like ``data.split``; null reads every file."""

    samples: int | None = None
    """Number of completions of a problem; null is ``eval.samples``."""

    temperature: float | None = None
    """Sampling temperature, 0 for greedy decoding; null is ``eval.temperature``."""

    max_problems: int | None = None
    """Largest number of problems to measure; null measures all."""

    def check(self, key: str) -> None:
        """Raise ``ConfigError`` for values that make no sense."""
        at_least(
            key, self, 0, *(n for n in ("samples", "temperature") if getattr(self, n) is not None)
        )
        if self.max_problems is not None:
            at_least(key, self, 1, "max_problems")
        if self.split is not None and self.source is None:
            raise ConfigError(
                f"{key}.split",
                f"without {key}.source",
                why="it chooses files of a folder",
                remedy=f"name the folder in {key}.source, which may be data.source's",
            )
        if self.temperature == 0 and (self.samples or 0) > 1:
            raise ConfigError(
                f"{key}.samples",
                f"{self.samples} at temperature 0",
                why="greedy completions are all equal",
                remedy="use 1 sample, or a temperature above 0",
            )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Evaluation on held-out problems, at least before the first step and after the last.

    ``source`` and the fields that belong to it are one set, reported as ``eval/…``. ``sets`` are
    more sets, reported as ``eval/NAME/…``.
    """

    source: str | Sequence[str] | None = None
    """Source of the problems, written like ``data.source``; null is the held-out problems of
    ``data.reasoning_gym``.
    """

    split: str | None = None
    """Split of the source, written like ``data.split``; null reads every file."""

    every: int = 0
    """Number of steps from one evaluation to the next; 0 evaluates only before the first
    step and after the last.
    """

    samples: int = 1
    """Number of completions of a problem.

    With 0 there is only the loss (SFT), or only ``sets`` are measured (generated problems).
    """

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy decoding."""

    max_problems: int | None = None
    """Largest number of problems to measure; null measures all."""

    sets: Mapping[str, EvalSet] = field(default_factory=dict[str, EvalSet])
    """More held-out sets by name, reported as ``eval/NAME/…``."""

    def __post_init__(self) -> None:
        at_least("eval", self, 0, "every")
        self._own.check("eval")
        for name in self.sets:
            if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
                raise ConfigError(
                    f"eval.sets.{name}",
                    "not a name for metrics and files",
                    remedy="use letters, digits, - _ .",
                )

    @property
    def _own(self) -> EvalSet:
        return EvalSet(
            source=self.source,
            split=self.split,
            samples=self.samples,
            temperature=self.temperature,
            max_problems=self.max_problems,
        )

    def own_set(self, data: DataSection) -> EvalSet | None:
        """Return the set without a name, or None where it has no problems to read."""
        return self._own if self.source is not None or data.reasoning_gym is not None else None

    def all_sets(self, data: DataSection) -> dict[str, EvalSet]:
        """Return every set by name, with all values filled in.

        The set without a name has the name "".

        Raises ``ConfigError`` for values that make no sense, a set that has no problems to read,
        and no set at all.
        """
        own = self.own_set(data)
        sets = {"": own} if own is not None else {}
        for name, given in self.sets.items():
            sets[name] = replace(
                given,
                samples=self.samples if given.samples is None else given.samples,
                temperature=self.temperature if given.temperature is None else given.temperature,
            )
            sets[name].check(f"eval.sets.{name}")
            if given.source is None and data.reasoning_gym is None:
                raise _nothing_held_out(f"eval.sets.{name}.source")
        if not sets:
            raise _nothing_held_out("eval.source")
        return sets


def _nothing_held_out(key: str) -> ConfigError:
    return ConfigError(
        key,
        "missing",
        why="data.source has no held-out part of its own",
        remedy="name a file of problems that are not trained on, or leave eval out",
    )


@dataclass(frozen=True, kw_only=True)
class HeldoutSection:
    """Held-out pairs of preferences, measured at least before the first step and after the last."""

    source: str | Sequence[str]
    """Source of the held-out pairs, written like ``data.source``."""

    split: str | None = None
    """Split of the source, written like ``data.split``; null reads every file."""

    every: int = 0
    """Number of steps from one evaluation to the next; 0 evaluates only before the first
    step and after the last.
    """

    max_pairs: int | None = None
    """Largest number of pairs to measure; null measures all."""

    def __post_init__(self) -> None:
        at_least("eval", self, 0, "every")
        if self.max_pairs is not None:
            at_least("eval", self, 1, "max_pairs")


def check_evaluation(section: EvalSection, data: DataSection, *, loss: bool) -> None:
    """Raise ``ConfigError`` for sets that nothing would be measured on.

    With ``loss`` the loss of the set without a name is measured, too.
    """
    sets = section.all_sets(data)
    for name, one in sets.items():
        key = f"eval.sets.{name}" if name else "eval"
        if one.samples == 0 and (name or (not loss and (one.source is not None or len(sets) == 1))):
            raise ConfigError(
                f"{key}.samples",
                "0 completions a problem measure nothing",
                remedy="give at least 1, or leave the set out",
            )
        gym = data.reasoning_gym if one.source is None and (one.samples or loss) else None
        if gym is not None and gym.heldout_size == 0:
            raise ConfigError(
                "data.reasoning_gym.heldout_size",
                f"0, but {key} measures these problems",
                remedy="give at least 1, or leave eval out",
            )
