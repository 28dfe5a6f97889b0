"""The parts below ``eval``: measurements on rows that are not trained on.

Every field has a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine_api.errors import ConfigError
from engine_trainer.config.checks import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_2,
    Refusal,
    refuse,
    require,
)
from engine_trainer.config.sections import DataSection


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A held-out set of ``eval.sets``, whose figures are reported as ``eval/NAME/…``."""

    source: str | Sequence[str] | None = None
    """Source of the problems, in the form of ``data.source``. Null is the held-out problems of
    ``data.reasoning_gym``.
    """

    split: str | None = None
    """Split of the source, in the form of ``data.split``. Null reads all of the source."""

    samples: int | None = None
    """Number of completions of a problem. Null is ``eval.samples``. 0 is accepted in ``sft``, where
    it measures the loss only.
    """

    temperature: float | None = None
    """Sampling temperature, 0 for greedy decoding. Null is ``eval.temperature``."""

    max_problems: int | None = None
    """Largest number of problems to measure, the first ones of the source. Null measures all."""

    def check(self, key: str) -> None:
        """Raise ``ConfigError`` for values that make no sense."""
        require(
            key,
            self,
            {"samples": AT_LEAST_0, "temperature": AT_LEAST_0, "max_problems": AT_LEAST_1},
        )
        refuse(key, _wrong_set(self, key))


def _wrong_set(section: EvalSet, key: str) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a held-out set may not have."""
    yield (
        section.split is not None and section.source is None,
        "split",
        f"expected null without {key}.source, got {section.split!r:.100}",
        "it chooses files of a folder",
        f"name the folder in {key}.source, which may be data.source's",
    )
    yield (
        section.temperature == 0 and (section.samples or 0) > 1,
        "samples",
        f"expected 1 at temperature 0, got {section.samples}",
        "greedy completions are all equal",
        "use 1 sample, or a temperature above 0",
    )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Held-out problems, measured before the first step, every ``every`` steps and after the last.

    ``source`` and the fields that belong to it are one set, reported as ``eval/…``. ``sets`` are
    more sets. Accuracy is measured on each of them, and in ``sft`` the loss of the responses, too.
    """

    source: str | Sequence[str] | None = None
    """Source of the problems, in the form of ``data.source``. Null is the held-out problems of
    ``data.reasoning_gym``.
    """

    split: str | None = None
    """Split of the source, in the form of ``data.split``. Null reads all of the source."""

    every: int = 0
    """Number of steps from one evaluation to the next. 0 evaluates only before the first step and
    after the last.
    """

    samples: int = 1
    """Number of completions of a problem. Above 1, ``mean@n``, ``best@k`` and ``maj@k`` are
    reported, too.

    0 measures no accuracy: in ``sft`` only the loss is left, and in ``rl`` with generated problems
    only ``sets``.
    """

    temperature: float = 1.0
    """Sampling temperature. 0 is greedy decoding, which allows one completion of a problem."""

    max_problems: int | None = None
    """Largest number of problems to measure, the first ones of the source. Null measures all."""

    sets: Mapping[str, EvalSet] = field(default_factory=dict[str, EvalSet])
    """More held-out sets by name, reported as ``eval/NAME/…``."""

    def __post_init__(self) -> None:
        require("eval", self, {"every": AT_LEAST_0})
        self._own.check("eval")
        for name in self.sets:
            if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
                raise ConfigError(
                    f"eval.sets.{name}",
                    "not a name for metrics and files",
                    why="expected letters, digits, - _ . and no dot in front",
                    remedy="rename the set",
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
class _JudgedSection:
    """Held-out pairs or labelled rows, and the steps after which they are measured."""

    source: str | Sequence[str]
    """Source of the held-out data, in the form of ``data.source``."""

    split: str | None = None
    """Split of the source, in the form of ``data.split``. Null reads all of the source."""

    every: int = 0
    """Number of steps from one evaluation to the next. 0 evaluates only before the first step and
    after the last.
    """

    def __post_init__(self) -> None:
        require("eval", self, {"every": AT_LEAST_0})


@dataclass(frozen=True, kw_only=True)
class HeldoutSection(_JudgedSection):
    """Held-out pairs, measured before the first step, every ``every`` steps and after the last."""

    max_pairs: int | None = None
    """Largest number of pairs to measure, the first ones of the source. Null measures all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("eval", self, {"max_pairs": AT_LEAST_1})


@dataclass(frozen=True, kw_only=True)
class LabelledEvalSection(_JudgedSection):
    """Held-out labelled rows, measured at the start, every ``every`` steps and at the end."""

    max_rows: int | None = None
    """Largest number of rows to measure, at least 2, the first ones of the source. Null measures
    all.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require("eval", self, {"max_rows": AT_LEAST_2})


def check_evaluation(section: EvalSection, data: DataSection, *, loss: bool) -> None:
    """Raise ``ConfigError`` for sets that nothing would be measured on.

    With ``loss`` the loss of every set is measured, too.
    """
    sets = section.all_sets(data)
    for name, one in sets.items():
        key = f"eval.sets.{name}" if name else "eval"
        needed = name or one.source is not None or len(sets) == 1
        if one.samples == 0 and not loss and needed:
            raise ConfigError(
                f"{key}.samples",
                "expected a number of at least 1, got 0",
                why="without completions nothing is measured on this set",
                remedy="give at least 1, or leave the set out",
            )
        gym = data.reasoning_gym if one.source is None and (one.samples or loss) else None
        if gym is not None and gym.heldout_size == 0:
            raise ConfigError(
                "data.reasoning_gym.heldout_size",
                "expected a number of at least 1, got 0",
                why=f"{key} measures these problems",
                remedy="give at least 1, or leave eval out",
            )
