"""The running of a plan: one row per item, whatever the engine does."""

from __future__ import annotations

import datetime
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from engine_api.devices import cuda_is_simulated, npu_is_simulated
from engine_api.errors import PluginError
from engine_api.registry import EngineRegistry, Resolution
from engine_conformance.cases import Target, run_case
from engine_conformance.cases._case import LM
from engine_conformance.cases.plugin import find_missing_class
from engine_conformance.deviations import Deviation, with_deviations
from engine_conformance.environment import commits, environment, parts_of, sources, suite
from engine_conformance.errors import CannotRun
from engine_conformance.lanes import MOST_HANGS, default_lanes, rows_in_order
from engine_conformance.oracle.config import FAMILIES
from engine_conformance.plan import (
    Item,
    Selection,
    choose_part,
    make_plan,
    resolve,
    resolve_kind,
)
from engine_conformance.ranks import RankError, close_pools
from engine_conformance.report.merge import check_same_plan, shown
from engine_conformance.results import Key, Outcome, Row, SuiteRun
from engine_conformance.seeds import use_seed
from engine_conformance.variants import GROUP, changed_sizes

__all__ = ["describe_run", "repeat_command", "run_item", "run_selection"]

Listener = Callable[[Row], None]
# An engine that hangs in one case hangs in many, and each takes its whole deadline: after the first
# one deadlines are this many times as long, and after a few the run ends.
_SHORTER = 0.25


def run_selection(
    selection: Selection,
    *,
    command: Sequence[str],
    certify: bool = False,
    commit: str = "",
    deviations: Sequence[Deviation] = (),
    limit: float = float("inf"),
    earlier: SuiteRun | None = None,
    lanes: int | None = None,
    listen: Listener | None = None,
) -> SuiteRun:
    """Run everything that was selected.

    Pools of ranks are closed at the end.

    Args:
        selection: what to run.
        command: the command line's arguments, for the report.
        certify: whether a certificate was asked for; then a selection that is not complete is a
            part of one, and the report says which rows the whole has.
        commit: the commit that packages without a commit of their own were made from.
        deviations: the known deviations of this engine.
        limit: seconds after which no case is started; the rest is reported as not run.
        earlier: the run that this one continues, whose rows that have shown something are left out.
        lanes: number of cases that run at the same time, on which no row but its seconds depends;
            None is `default_lanes`.
        listen: called with each row, in the plan's order.

    Raises:
        UsageError, CannotRun: see `make_plan`; also if a class of the descriptor is not there, or
            the earlier run is a part of a different certificate.
    """
    began = time.monotonic()
    about = describe_run(selection, command=command, certify=certify, commit=commit)
    # The oracle's tensors are so small that threads would cost more than they gain.
    torch.set_num_threads(1)
    # Before there are lanes, which would forget each other's batches.
    use_seed(selection.seed)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        in_parts = certify and not selection.complete
        whole = replace(selection, cases=(), part="") if in_parts else selection
        plan = make_plan(whole, Path(folder))
        chosen = choose_part(plan, selection) if in_parts else plan
        planned = [item.key for item in plan] if in_parts else []
        done = frozenset[Key]()
        if earlier is not None:
            check_same_plan(earlier, planned)
            done = shown(earlier)
        items = [item for item in chosen if item.key not in done]
        rows: list[Row] = []

        def run_next(item: Item, before: Sequence[Row]) -> Row:
            late = "out of time (--limit)" if time.monotonic() - began > limit else ""
            hung = [row.case for row in before if row.outcome.status == "timeout"]
            if len(hung) >= MOST_HANGS:
                late = f"stopped: {', '.join(hung)} hung; fix these first"
            return run_item(item, selection, deviations, late=late, hung=hung)

        if lanes is None:
            lanes = default_lanes(selection.device, rollout=resolve_kind(selection))
        try:
            _check_classes(items)
            with closing(rows_in_order(items, run_next, lanes=lanes)) as coming:
                for row in coming:
                    rows.append(row)
                    if listen:
                        listen(row)
        finally:
            close_pools()
    return replace(about, seconds=time.monotonic() - began, rows=rows, planned=planned)


def describe_run(
    selection: Selection, *, command: Sequence[str], certify: bool = False, commit: str = ""
) -> SuiteRun:
    """Return a run of this selection that begins now and has no rows yet.

    Raises:
        CannotRun: see `resolve`.
    """
    chosen = resolve(selection)
    tested = [chosen]
    if selection.partner is not None:
        tested += _partner(selection, selection.partner)
    modules = [row.target.partition(":")[0] for found in tested for row in found.plugin.rows]
    modules += parts_of(*modules)
    return SuiteRun(
        name=selection.name,
        distribution=chosen.source,
        contract=chosen.plugin.contract,
        declared=sorted(map(str, chosen.plugin.capabilities)),
        families=tuple(name for name in chosen.plugin.families if name in FAMILIES),
        trace=[str(c) for c in chosen.trace],
        command=list(command),
        selection=selection.as_dict() | {"complete": selection.complete},
        certify=certify,
        environment=environment(*_distribution(chosen)),
        suite=suite(),
        started=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        rows=[],
        sources=sources("engine_api", *modules),
        commits=commits("engine_api", "engine_conformance", *modules, stated=commit),
    )


def _partner(selection: Selection, name: str) -> list[Resolution]:
    """Return the partner's resolution, or nothing if it cannot run here, which the cases report."""
    try:
        return [EngineRegistry.resolve(model_type=LM, backend=name, device=selection.device)]
    except PluginError:
        return []


def _check_classes(items: Sequence[Item]) -> None:
    """Import the classes that the descriptor names, once for each model type, in the ranks.

    The case ``plugin.classes`` says more, but every other case would fail for the same reason.

    Raises:
        CannotRun: if a class is not there.
    """
    firsts: dict[str, Target] = {}
    for item in items:
        if not (item.absent or item.target.rollout or item.case.id.startswith("plugin.")):
            firsts.setdefault(item.target.model_type, item.target)
    for target in firsts.values():
        try:
            problems = target.run(find_missing_class, target.config(target.model()))
        # A rank that ends or hangs while it imports is reported by the cases.
        except RankError:
            continue
        if problem := next(filter(None, problems), None):
            raise CannotRun(problem)


def run_item(
    item: Item,
    selection: Selection,
    deviations: Sequence[Deviation] = (),
    *,
    late: str = "",
    hung: Sequence[str] = (),
) -> Row:
    """Run one item and return its row.

    Args:
        item: the case and its setting.
        selection: the selection that it is from.
        deviations: the known deviations of this engine.
        late: the reason why it is not even started.
        hung: the cases that hung before it: then its deadlines are shorter.
    """
    case = item.case
    target = item.target
    if hung:
        target = replace(target, patience=target.patience * _SHORTER)
    if reason := item.absent or late:
        outcome = Outcome(status="not-run", seconds=0.0, message=reason)
    else:
        # Two declared capabilities must compose or be refused, so that the experts of a mixture and
        # adapters may be refused in a layout; the layout itself may not.
        outcome = run_case(case, target, may_refuse=bool(item.variant and case.requires))
        if outcome.status == "timeout" and hung:
            note = f"the deadline was {_SHORTER} of the usual one, since {hung[0]} hung before"
            outcome = replace(outcome, message=f"{note}\n{outcome.message}")
    listed = next((d for d in deviations if d.covers(case.id, item.setting)), None)
    outcome = with_deviations(outcome, listed)
    silent = outcome.status in ("passed", "refused", "not-run")
    return Row(
        case=case.id,
        must=case.must,
        profile=case.profile,
        group=_group(item),
        setting=item.setting,
        outcome=outcome,
        provisional=case.provisional,
        hints="" if silent else outcome.hints or case.hints,
        repeat="" if silent else repeat_command(item, selection),
        deviation=listed.facts if listed else None,
    )


def _group(item: Item) -> str:
    if item.variant:
        return GROUP
    return "undeclared" if item.case.probes else item.case.group


def repeat_command(item: Item, selection: Selection) -> str:
    """Return the command line that runs this case again."""
    setting = item.setting
    parts = ["engine-conformance", "run", selection.name, "--case", item.case.id]
    parts += ["--model-type", setting.model_type, "--device", item.target.device]
    parts += ["--world", str(setting.world), "--dtype", setting.dtype]
    layout = ",".join(f"{name}={size}" for name, size in changed_sizes(item.target.layout).items())
    given = {
        "--profile": item.case.profile if item.case.profile != "engine" else None,
        "--parallelism": layout,
        "--partner": selection.partner,
        "--plugin": selection.plugin,
        "--seed": str(selection.seed) if selection.seed else None,
    }
    parts += [word for option, value in given.items() if value for word in (option, value)]
    parts += [
        word
        for name, value in item.target.options.items()
        for word in ("--option", f"{name}={json.dumps(value)}")
    ]
    return shlex.join([*parts, "--shim"] if cuda_is_simulated() or npu_is_simulated() else parts)


def _distribution(chosen: Resolution) -> tuple[str, ...]:
    """Return the distribution's name, or nothing for a class that was registered in process."""
    name, _, version = chosen.source.partition("==")
    return (name,) if version else ()
