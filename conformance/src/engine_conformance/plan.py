"""The plan of a run: the cases that apply, in the settings that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine_api.config import Parallelism
from engine_api.errors import PluginError
from engine_api.plugin import EnginePlugin
from engine_api.registry import EngineRegistry, Resolution, RolloutRegistry
from engine_conformance.cases import Case, Target, load_cases
from engine_conformance.cases._case import EXPERTS
from engine_conformance.environment import devices_of, reported
from engine_conformance.errors import CannotRun, UsageError
from engine_conformance.oracle.config import FAMILIES
from engine_conformance.results import Key, Setting
from engine_conformance.variants import changed_sizes, repetitions
from engine_conformance.verdict import is_complete

__all__ = ["Item", "Selection", "choose_part", "make_plan", "resolve", "resolve_kind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The cases and settings that were asked for.

    Attributes:
        name: name of the engine's backend, or of the rollout.
        device: device type, never replaced by another.
        worlds, dtypes: each combination is a setting.
        model_types: empty means all that the plug-in has rows for.
        profiles: empty means ``engine`` and ``rl`` (``rollout`` for a rollout).
        cases: globs of ids; empty means all.
        quick: whether only the quick tier runs.
        layout: layout of several ranks, for cases that do not set one themselves.
        partner: another engine, for cases about what two engines owe each other.
        patience: factor by which deadlines are longer.
        seed: the seed of the batches.
        plugin: ``module:ATTR`` of a descriptor that is not installed.
        options: the engine's or the rollout's own options, by name.
        part: the part of a certificate that runs, ``1/5`` to ``5/5``; empty means all.
    """

    name: str
    device: str = "cpu"
    worlds: tuple[int, ...] = (1, 2)
    dtypes: tuple[str, ...] = ("float32",)
    model_types: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    quick: bool = False
    layout: Parallelism = field(default_factory=Parallelism)
    partner: str | None = None
    patience: float = 1.0
    seed: int = 0
    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    part: str = ""

    @property
    def complete(self) -> bool:
        """True if nothing was left out by hand.

        No verdict is ``conformant`` without it.
        """
        return is_complete({"cases": self.cases, "quick": self.quick, "part": self.part})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report.

        The layout has only sizes that differ from the defaults of `Parallelism`.
        """
        return asdict(self) | {
            "device": reported(self.device),
            "layout": changed_sizes(self.layout),
        }


@dataclass(frozen=True, kw_only=True)
class Item:
    """One case in one setting.

    ``absent`` holds the reason if it cannot run here, ``variant`` the name of the layout and the
    options if the case is repeated in them.
    """

    case: Case
    target: Target
    absent: str = ""
    variant: str = ""

    @property
    def setting(self) -> Setting:
        """The setting as the report names it."""
        target = self.target
        return Setting(
            model_type=target.model_type,
            device=reported(target.device),
            world=target.world,
            dtype=target.dtype,
            variant=self.variant,
        )

    @property
    def key(self) -> Key:
        """The subject of the item's row: the case in its setting."""
        return self.case.id, self.setting


def resolve_kind(selection: Selection) -> bool:
    """Return whether the name is a rollout's.

    Raises:
        UsageError: if the profiles are of both kinds.
    """
    if selection.profiles:
        if "rollout" in selection.profiles and len(selection.profiles) > 1:
            raise UsageError(
                "--profile rollout is about rollouts, the others are about engines: "
                "run them one by one"
            )
        return selection.profiles == ("rollout",)
    names = {
        kind: {b for _, row in kind.rows() for b in row.backends}
        for kind in (EngineRegistry, RolloutRegistry)
    }
    return selection.name not in names[EngineRegistry] and selection.name in names[RolloutRegistry]


def resolve(selection: Selection) -> Resolution:
    """Return the registry's choice for the first model type.

    Raises:
        CannotRun: if the name is unknown, broken, in conflict or not for this device; the text
            has the registry's reasons.
    """
    try:
        if resolve_kind(selection):
            return RolloutRegistry.resolve(backend=selection.name, device=selection.device)
        model_type = model_types(selection)[0]
        return EngineRegistry.resolve(
            model_type=model_type, backend=selection.name, device=selection.device
        )
    except PluginError as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error


def model_types(selection: Selection) -> tuple[str, ...]:
    """Return the model types asked for, or all that the backend has a row for on this device.

    Without any row the result is ``language_model``.
    """
    rows = [row for _, row in EngineRegistry.rows() if selection.name in row.backends]
    offered = dict.fromkeys(
        m for row in rows if selection.device in row.devices for m in row.model_types
    )
    return selection.model_types or tuple(offered) or ("language_model",)


def make_plan(selection: Selection, root: Path) -> list[Item]:
    """Return every case that applies, world by world so that few ranks are idle at a time.

    In a run that leaves nothing out, some cases are repeated at its end in every declared layout,
    and with the options that the descriptor lists as variants.

    Raises:
        UsageError: if a glob fits no case.
        CannotRun: if the engine cannot be resolved, or nothing is left to run.
    """
    rollout = resolve_kind(selection)
    profiles = selection.profiles or (("rollout",) if rollout else ("engine", "rl"))
    chosen = [case for case in _chosen(selection.cases) if case.profile in profiles]
    resolution = resolve(selection)
    if not rollout:
        _check_families(resolution.plugin)
    targets = [
        Target(
            backend=selection.name,
            device=selection.device,
            world=world,
            dtype=dtype,
            model_type=model_type,
            root=root,
            layout=selection.layout,
            partner=selection.partner,
            patience=selection.patience,
            seed=selection.seed,
            rollout=rollout,
            options=selection.options,
        )
        for world in selection.worlds
        for dtype in selection.dtypes
        for model_type in (("language_model",) if rollout else model_types(selection))
    ]
    why_not: dict[str, str] = {}
    items = [
        item
        for target in targets
        for case in chosen
        if (not selection.quick or case.is_quick(target.world, first=min(selection.worlds)))
        and (item := _item(case, target, why_not))
    ]
    if selection.complete and selection.layout == Parallelism() and not rollout:
        items += _repeated(chosen, targets, resolution)
    if not items:
        reasons = "".join(f"\n  {case}: {why}" for case, why in list(why_not.items())[:10])
        raise CannotRun(
            f"nothing to run: no case applies to {selection.name!r} in these settings{reasons}"
        )
    return items


def choose_part(plan: Sequence[Item], selection: Selection) -> list[Item]:
    """Return the items of a certificate's plan that belong to the selection's part, in their order.

    Settings and options of a case cost about the same, so that all items are dealt out in the order
    of the cases, alternately forwards and backwards: each part then has its share of every case,
    and no part has all items of one number of ranks.

    Raises:
        UsageError: if there are more parts than items, or a glob fits no case.
        CannotRun: if no item is in the part.
    """
    if not selection.part:
        ids = {case.id for case in _chosen(selection.cases)}
        items = [item for item in plan if item.case.id in ids]
        if not items:
            raise CannotRun(
                f"nothing to run: the certificate of {selection.name!r} in these settings has no "
                f"row of --case {','.join(selection.cases)}"
            )
        if len(items) == len(plan):
            raise UsageError(
                f"--case {','.join(selection.cases)} has all rows of the certificate: leave it out"
            )
        return items
    number, count = map(int, selection.part.split("/"))
    if count > len(plan):
        raise UsageError(
            f"--part {selection.part}: expected at most {len(plan)} parts, "
            f"one for each row of the certificate, got {count}"
        )
    dealt = sorted(range(len(plan)), key=lambda index: (plan[index].case.id, index))
    rounds = [dealt[start : start + count] for start in range(0, len(dealt), count)]
    own = {
        index
        for turn, items in enumerate(rounds)
        for hand, index in enumerate(items)
        if number - 1 == (hand if turn % 2 == 0 else count - 1 - hand)
    }
    return [item for index, item in enumerate(plan) if index in own]


def _repeated(
    chosen: Sequence[Case], targets: Sequence[Target], resolution: Resolution
) -> Iterator[Item]:
    """Yield the repeated cases, of every model type, in the first precision that was asked for."""
    worlds = [target.world for target in targets]
    for repetition in repetitions(resolution.plugin, worlds):
        for target in targets:
            if (target.world, target.dtype) != (repetition.world, targets[0].dtype):
                continue
            varied = replace(
                target,
                layout=repetition.layout,
                options={**target.options, **repetition.options},
            )
            for case in chosen:
                item = _item(case, varied, {}) if case.id in repetition.cases else None
                if item:
                    yield replace(item, variant=repetition.name)


def _check_families(plugin: EnginePlugin) -> None:
    """Raise ``CannotRun`` if an engine declares no model family to compare it with."""
    dense = [name for name in FAMILIES if name not in EXPERTS]
    if plugin.families and not set(plugin.families) & set(dense):
        raise CannotRun(
            f"expected an engine of one of the model families {', '.join(dense)}, "
            f"got one that declares {', '.join(plugin.families)} alone\n"
            "  to do: build one of them, too, and declare it in the descriptor's `families`"
        )


def _chosen(globs: Sequence[str]) -> list[Case]:
    cases: Mapping[str, Case] = load_cases()
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in cases):
            near = get_close_matches(glob, cases, n=3, cutoff=0.4)
            hint = "`engine-conformance list` shows all"
            if near:
                hint = f"did you mean {' or '.join(near)}?"
            raise UsageError(f"no case is called {glob!r}; {hint}")
    return [
        case
        for name, case in cases.items()
        if not globs or any(fnmatchcase(name, glob) for glob in globs)
    ]


def _item(case: Case, target: Target, why_not: dict[str, str]) -> Item | None:
    try:
        reason = case.why_not(target)
    except PluginError as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error
    if reason:
        why_not[case.id] = reason
        return None
    there = devices_of(target.device)
    short = there is not None and there < target.world
    absent = f"needs {target.world} {target.device} devices, there are {there}" if short else ""
    return Item(case=case, target=target, absent=absent)
