"""Run the mutation campaign: change an engine's source by machine, and see whether a case fails.

``python tools/campaign.py --engine fsdp2 --budget 3600 --seed 7`` changes the engine's source at
one place at a time (`mutate.OPERATORS`), runs the cases that execute the place until one fails, and
writes one line of JSON for each changed engine. The same seed gives the same list of changes on any
machine. ``--resume FILE`` goes on with such a file, and ``--only ID`` runs one change alone.
``--record`` writes the rates and the survivors into ``conformance/mutants/campaign.json``, from
which ``tools/mutants.py --page`` writes the section of docs/mutants.md.

``--edits FILE`` runs changes that were written by hand instead (`campaign_edits`), such as those of
``conformance/mutants/edits/fsdp2.toml``, each on the number of ranks that it names. The cases that
a whole run repeats in other layouts run as well. ``--record`` then writes
``conformance/mutants/edits.json``.

The quick tier's cases run first, at world 1 and then at world 2, and the full tier's after them. A
first pass over the unchanged engine shows which lines each case executes: a change of a line that
no case executes is reported as "not executed" and does not run.

The suite, torch and the packages that the engine imports are loaded once. Each changed engine runs
in a process that is forked from there, as do its ranks: they import the changed package from a copy
at the front of ``sys.path``. It needs Linux, and neither network nor GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# torch reads it when it is imported: without threads a process of it can be forked.
os.environ["OMP_NUM_THREADS"] = "1"
# Changed engines run on the CPU, also on a host with GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# pyarrow's jemalloc reads it when pyarrow is imported, whichever allocator is used then. Otherwise
# it keeps a thread (jemalloc_bg_thd). transformers imports pyarrow with scikit-learn.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import torch
from campaign_edits import Edit, mutation_of, read_edits
from campaign_lanes import (
    ENGINES,
    Child,
    EngineUnderChange,
    Forking,
    Lanes,
    PackageCopy,
    Tracer,
    check_threads,
    executed_lines,
    imports,
)
from campaign_record import KILLED, record, record_edits, stale, summary
from mutate import Mutation, declared_defaults, option_defaults, sampled, sites

import engine_api.config
from engine_api.devices import SIMULATED_CUDA
from engine_conformance.cases import load_cases, run_case
from engine_conformance.cli import offer
from engine_conformance.environment import suite
from engine_conformance.errors import CannotRun
from engine_conformance.plan import Item, Selection, make_plan
from engine_conformance.ranks import close_pools, launched_by
from engine_conformance.results import BAD, Outcome

# Seconds of a call's deadline: a case asks for 120 s, or more.
CASE_DEADLINE_S = 120.0
# A call may take so many times as long as it took on the unchanged engine, and at least so long.
SLOWER = 10.0
AT_LEAST_S = 30.0
TIERS = ("quick", "full")
# Verdicts after which the next stage may still kill a changed engine, from the least.
UNDECIDED = ("not-executed", "survived", "suite-error")


def mutations_of(engine: EngineUnderChange) -> list[Mutation]:
    """Return every change of an engine's source."""
    classes = [
        one
        for one in vars(engine_api.config).values()
        if isinstance(one, type) and is_dataclass(one)
    ]
    files = engine.files()
    defaults = option_defaults(*classes)
    defaults["options"] = {k: v for text in files.values() for k, v in declared_defaults(text)}
    return [one for name, text in files.items() for one in sites(text, name, defaults)]


# --- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, slots=True)
class Stage:
    """The cases of one tier at one world size."""

    tier: str
    world: int

    def __str__(self) -> str:
        return f"{self.tier}, world {self.world}"


@dataclass(kw_only=True, slots=True)
class CaseFacts:
    """The facts about a case in a setting that the unchanged engine has shown.

    Attributes:
        seconds: time that it took.
        status: how it ended.
        lines: the lines that it executes, by file; None if that is not known.
        kills: changed engines that it has failed so far.
    """

    seconds: float
    status: str
    lines: Mapping[str, Sequence[int]] | None = None
    kills: int = 0

    @property
    def passes(self) -> bool:
        """True if the unchanged engine passes the case."""
        return self.status in ("passed", "refused")

    def executes(self, mutation: Mutation) -> bool:
        """Return whether the case executes the changed place, or might."""
        if self.lines is None:
            return True
        first, last = mutation.lines
        return any(first <= line <= last for line in self.lines.get(mutation.file, ()))


def _joined(
    first: Mapping[str, Sequence[int]], second: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    return {
        file: sorted({*first.get(file, ()), *second.get(file, ())}) for file in {*first, *second}
    }


def _name_of(item: Item) -> str:
    name = f"{item.case.id} {item.target.model_type} {item.target.world}"
    return f"{name} {item.variant}" if item.variant else name


def patient(item: Item, seconds: float) -> Item:
    """Return the item with a deadline for a case that takes so long on the unchanged engine."""
    deadline = max(AT_LEAST_S, SLOWER * seconds)
    return replace(item, target=replace(item.target, patience=deadline / CASE_DEADLINE_S))


# --- the run --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Campaign:
    """A campaign on one engine.

    Attributes:
        engine: the engine.
        work: folder for copies, models and coverage.
        lanes: number of changed engines that run at the same time.
        deadline: time of `time.monotonic` after which none is started.
        cases: globs of the cases that run; empty means all.
        repeats: whether the cases that a whole run repeats in other layouts run as well. They
            about double the time.
    """

    engine: EngineUnderChange
    work: Path
    lanes: int = 1
    deadline: float = float("inf")
    cases: tuple[str, ...] = ()
    repeats: bool = False
    known: dict[str, CaseFacts] = field(default_factory=dict[str, CaseFacts])
    names: dict[Stage, list[str]] = field(default_factory=dict[Stage, list[str]])

    def __post_init__(self) -> None:
        self._lanes = Lanes(self.engine, self.work, self.lanes)
        self.root = self.work / "root"
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.work / "tmp")
        if self.engine.shim:
            os.environ[SIMULATED_CUDA] = "1"
        self._lanes.copies[0].use()
        offer(f"{self.engine.package}.plugin:PLUGIN", self.work / "site")
        self._lanes.copies[0].use()
        torch.set_num_threads(1)
        load_cases()
        self._preload()

    def _preload(self) -> None:
        """Import the packages that the engine imports, without the engine's own."""
        listing = self.work / "modules.json"

        def look(_: Connection) -> None:
            before = set(sys.modules)
            for name in self.engine.folders:
                package = importlib.import_module(name)
                for module in pkgutil.walk_packages(package.__path__, f"{name}."):
                    # An optional package may be absent.
                    with suppress(ImportError):
                        importlib.import_module(module.name)
            names = [name for name in sys.modules if name not in before]
            listing.write_text(json.dumps(names))

        self._lanes.run([""], lambda _task, _copy: look, lambda _child: None, seconds=600.0)
        own = ("megatron", "transformer_engine") if self.engine.shim else ()
        for name in json.loads(listing.read_text()):
            if self.engine.is_module(name) or name.partition(".")[0] in own:
                continue
            with suppress(ImportError):
                importlib.import_module(name)
        check_threads()

    def items(self, stage: Stage) -> dict[str, Item]:
        """Return the cases of a stage in their settings, by name.

        Raises:
            CannotRun: if the engine, as it is now, cannot be resolved.
        """
        selection = Selection(name=self.engine.backend, worlds=(stage.world,), cases=self.cases)
        return {
            _name_of(item): item
            for item in make_plan(selection, self.root)
            if item.case.is_quick(stage.world, first=1) == (stage.tier == "quick")
            and not item.absent
            and (self.repeats or not item.variant)
        }

    # --- the unchanged engine ------------------------------------------------------------------

    def prepare(self, stage: Stage) -> None:
        """Run a stage on the unchanged engine: lines, times and the oracle's results.

        The lanes find the lines that each case executes, side by side, which takes several times as
        long as the cases do. The lines are kept in a file for the next campaign on the same
        sources. Then this process runs the quick tier's cases, so that the oracle's results stay in
        it and in all that are forked from it. The full tier's cases would take minutes here, while
        the lanes stand idle. Cases that do not pass are left out.
        """
        items = self.items(stage)
        print(f"{stage}: {len(items)} cases on the unchanged engine", flush=True)
        cache = self.work.parent / f"lines-{self.engine.backend}-{self._digest()}.json"
        lines: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
        read = self._lines_of_the_descriptor(stage)
        # The cases of the descriptor keep a result in their process, and must look at every change:
        # they run in a process of their own, and the descriptor's lines are theirs.
        alone = [name for name, item in items.items() if item.case.id.startswith("plugin.")]
        here = [name for name in items if stage.tier == "quick" and name not in alone]
        in_lanes = [name for name in items if name not in lines or name not in here]
        for name, known in self._run_in_lanes(stage, in_lanes):
            self.known[name] = known
            lines[name] = known.lines
            cache.write_text(json.dumps(lines))
        for name, item in items.items():
            # A case may fail in a lane because of the tracer alone.
            if name in here or not (name in alone or self.known[name].passes):
                self.known[name] = self._run_here(item)
        close_pools()
        gc.collect()
        gc.freeze()
        check_threads()
        for name in items:
            known = self.known[name]
            known.lines = None if lines[name] is None else _joined(read, lines[name])
            if not known.passes:
                print(f"  left out: {name} ended as {known.status}", flush=True)
        self.names[stage] = [name for name in items if self.known[name].passes]

    def _run_here(self, item: Item) -> CaseFacts:
        with launched_by(Forking(cpu_s=3600)):
            outcome = run_case(item.case, item.target)
        return CaseFacts(seconds=outcome.seconds, status=outcome.status)

    def _run_in_lanes(self, stage: Stage, names: Sequence[str]) -> list[tuple[str, CaseFacts]]:
        """Run cases side by side, with new ranks for each, and return what each has shown."""
        found: list[tuple[str, CaseFacts]] = []
        files = {name: self.work / f"lines-{stage.tier}-{i}" for i, name in enumerate(names)}

        def work(name: str, copy: PackageCopy) -> Callable[[Connection], None]:
            def look(pipe: Connection) -> None:
                tracer = Tracer(copy.folder, files[name])
                with launched_by(Forking(cpu_s=3600, tracer=tracer)):
                    item = self.items(stage)[name]
                    outcome = run_case(item.case, patient(item, AT_LEAST_S).target)
                    close_pools()
                pipe.send(CaseFacts(seconds=outcome.seconds, status=outcome.status))

            return look

        def done(child: Child) -> None:
            known = child.messages[0] if child.messages else CaseFacts(seconds=0, status="timeout")
            # It may be the tracer, and the case has not come to all of its lines.
            known.lines = executed_lines(files[child.task]) if known.passes else None
            found.append((child.task, known))

        self._lanes.run(names, work, done, seconds=600.0)
        return found

    def _lines_of_the_descriptor(self, stage: Stage) -> dict[str, list[int]]:
        """Return the lines that are executed where the engine is found, which all cases need."""
        path = self.work / f"descriptor-{stage.tier}-{stage.world}"

        def work(_task: str, copy: PackageCopy) -> Callable[[Connection], None]:
            def look(_pipe: Connection) -> None:
                Tracer(copy.folder, path).start()
                self.items(stage)

            return look

        self._lanes.run([""], work, lambda _child: None, seconds=600.0)
        return executed_lines(path)

    def _digest(self) -> str:
        text = json.dumps([self.engine.files(), suite(), sys.version, torch.__version__])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    # --- changed engines -----------------------------------------------------------------------

    def test_changes(
        self,
        mutations: Sequence[Mutation],
        stage: Stage,
        listen: Callable[[Mutation, dict[str, Any]], None],
    ) -> None:
        """Run a stage on changed engines, and call ``listen`` with each result.

        A result has ``verdict``, ``seconds`` and, if a case failed, ``case`` and ``message``.
        """

        def work(mutation: Mutation, _copy: PackageCopy) -> Callable[[Connection], None]:
            chosen = self._order(mutation, stage)

            def look(pipe: Connection) -> None:
                pipe.send(("result", self._look(mutation, stage, chosen, pipe)))

            return look

        def done(child: Child) -> None:
            messages = dict(child.messages)
            seconds = round(time.monotonic() - child.began, 2)
            # The process of the cases itself may have ended, or been ended at its deadline.
            late = time.monotonic() > child.end
            lost = {
                "verdict": "timeout" if late else "suite-error",
                "case": messages.get("case", ""),
                "message": "the process of the cases did not end" if late else "it sent no result",
            }
            result: dict[str, Any] = messages.get("result", lost)
            if result["verdict"] in KILLED and result["case"] in self.known:
                self.known[result["case"]].kills += 1
            listen(child.task, result | {"seconds": seconds})

        slowest = sum(self.known[name].seconds for name in self.names[stage])
        self._lanes.run(
            mutations,
            work,
            done,
            seconds=600.0 + 2 * SLOWER * slowest,
            deadline=self.deadline,
            change=True,
        )

    def _order(self, mutation: Mutation, stage: Stage) -> list[str]:
        """Return the stage's cases that execute a change: those that kill most per second first."""
        chosen = [name for name in self.names[stage] if self.known[name].executes(mutation)]
        return sorted(
            chosen,
            key=lambda name: -(self.known[name].kills + 1) / (self.known[name].seconds + 0.05),
        )

    def executed(self, mutation: Mutation, stage: Stage) -> bool:
        """Return whether a case of the stage executes a change that shows in its world."""
        return mutation.world in (0, stage.world) and any(
            self.known[name].executes(mutation) for name in self.names[stage]
        )

    def reaches(self, mutation: Mutation, stage: Stage) -> bool:
        """Return whether a case of the stage is known to execute a change."""
        known = (self.known[name] for name in self.names[stage])
        return any(one.lines is not None and one.executes(mutation) for one in known)

    def _look(
        self, mutation: Mutation, stage: Stage, chosen: Sequence[str], pipe: Connection
    ) -> dict[str, Any]:
        if mutation.imported and not imports(mutation.file):
            return {"verdict": "invalid", "case": "", "message": "cannot be imported"}
        try:
            items = self.items(stage)
        except CannotRun as error:
            return {"verdict": "killed", "case": "plan", "message": str(error)[:300]}
        # Cases that apply to the changed engine alone, as its capabilities are different.
        other = [name for name in items if name not in self.known]
        seconds = sum(self.known[name].seconds for name in chosen)
        result: dict[str, Any] = {"verdict": "survived", "case": "", "message": ""}
        with launched_by(Forking(cpu_s=int(240 + SLOWER * seconds))):
            for name in (*other, *chosen):
                if name not in items:
                    continue
                pipe.send(("case", name))
                known = self.known.get(name)
                item = patient(items[name], known.seconds if known else 0.0)
                outcome = run_case(item.case, item.target)
                if outcome.status == "timeout":
                    # A slow engine is not a wrong one: the case's own deadline decides.
                    outcome = run_case(item.case, items[name].target)
                if outcome.status in BAD:
                    return {"verdict": _verdict(outcome), "case": name} | _message_of(outcome)
                if outcome.status == "suite-error":
                    result = {"verdict": "suite-error", "case": name} | _message_of(outcome)
        return result


def _verdict(outcome: Outcome) -> str:
    if outcome.status == "timeout":
        return "timeout"
    return "crash" if re.search(r"\n--- rank \d+ died", outcome.message) else "killed"


def _message_of(outcome: Outcome) -> dict[str, str]:
    lines = outcome.message.strip().splitlines()
    return {"message": " | ".join([*lines[:2], *lines[-1:]])[:400]}


# --- the command line -----------------------------------------------------------------------------


def identity(engine: EngineUnderChange, mutation: Mutation) -> str:
    """Return the id of a changed engine."""
    return f"{engine.backend}:{mutation.place}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file by id, the newest of several."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line)
    return {row["id"]: row for row in rows}


class Results:
    """The file with a line for each changed engine."""

    def __init__(self, path: Path, engine: EngineUnderChange) -> None:
        self.path = path
        self._engine = engine
        self._digests = {
            file: hashlib.sha256(text.encode()).hexdigest()[:12]
            for file, text in engine.files().items()
        }
        found = read_results(path) if path.exists() else {}
        # Of another state of the source: places have other meanings there.
        self.rows = {
            name: row
            for name, row in found.items()
            if self._digests.get(row["file"]) == row["source"]
        }
        if dropped := len(found) - len(self.rows):
            print(f"{path}: {dropped} results are of other sources, and are left out")

    def of(self, mutation: Mutation) -> dict[str, Any]:
        """Return the result of a change so far."""
        found = self.rows.get(identity(self._engine, mutation))
        # A change that was written by hand keeps its name when its text changes.
        if found is None or (found["before"], found["after"]) != (mutation.before, mutation.after):
            return {"verdict": "", "passed": []}
        return found

    def add(self, mutation: Mutation, stage: Stage, result: Mapping[str, Any]) -> None:
        """Add the result of a stage."""
        before = self.of(mutation)
        verdict = result["verdict"]
        passed = list(before["passed"])
        if verdict in UNDECIDED:
            passed.append(str(stage))
            # The most that a stage has shown: it runs, and no case fails.
            verdict = max(verdict, before["verdict"], key=("", *UNDECIDED).index)
        row = {
            "id": identity(self._engine, mutation),
            "file": mutation.file,
            "line": mutation.line,
            "operator": mutation.operator,
            "function": mutation.function,
            "before": mutation.before,
            "after": mutation.after,
            "source": self._digests[mutation.file],
            "verdict": verdict,
            "case": result.get("case", ""),
            "tier": stage.tier,
            "world": stage.world,
            "passed": passed,
            "seconds": round(before.get("seconds", 0.0) + result.get("seconds", 0.0), 2),
            "message": result.get("message", ""),
        }
        self.rows[row["id"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def compact(self) -> None:
        """Rewrite the file with one line for each changed engine."""
        whole = self.path.with_suffix(".tmp")
        whole.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()))
        whole.replace(self.path)


def run(
    campaign: Campaign, mutations: Sequence[Mutation], stages: Sequence[Stage], results: Results
) -> None:
    """Run all stages on the changes that have no verdict yet, as far as the time goes."""
    for stage in stages:
        if time.monotonic() > campaign.deadline:
            return
        left = [
            one
            for one in mutations
            if results.of(one)["verdict"] in ("", *UNDECIDED)
            and str(stage) not in results.of(one)["passed"]
        ]
        if not left:
            continue
        campaign.prepare(stage)
        executed = [one for one in left if campaign.executed(one, stage)]
        print(f"{stage}: {len(executed)} changed engines", flush=True)
        for one in left:
            if one not in executed:
                results.add(one, stage, {"verdict": "not-executed"})
        count = Counter[str]()

        def listen(
            mutation: Mutation,
            result: dict[str, Any],
            stage: Stage = stage,
            count: Counter[str] = count,
        ) -> None:
            # A case whose lines are not known, as the tracer disturbs it, runs on every change.
            if result["verdict"] == "survived" and not campaign.reaches(mutation, stage):
                result = {**result, "verdict": "not-executed"}
            results.add(mutation, stage, result)
            count[result["verdict"]] += 1
            print(
                f"{result['verdict']:<12} {result['seconds']:6.1f} s  "
                f"{identity(campaign.engine, mutation):<60} {result.get('case', '')}",
                flush=True,
            )

        campaign.test_changes(executed, stage, listen)
        print(f"{stage}: {dict(count)}", flush=True)


def main() -> int:
    """Run a campaign and return 0, or 1 if ``--only`` names a change that survives."""
    options = _options()
    engine = ENGINES[options.engine]
    edits = read_edits(options.edits) if options.edits else []
    chosen = _chosen(options, engine, edits)
    if options.list:
        for one in chosen:
            print(f"{identity(engine, one)}\n  - {one.before}\n  + {one.after}")
        return 0
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    stages = [Stage(tier, world) for tier in tiers for world in options.world]
    default = f"{engine.backend}-edits" if options.edits else engine.backend
    out: Path = options.resume or options.out or Path(f"build/campaign/{default}.jsonl")
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    single = options.only and not (options.out or options.resume)
    if out.exists() and not options.resume and not single:
        raise SystemExit(f"{out} exists: --resume {out} goes on with it, or name another --out")
    cache = options.work.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    # As after Ctrl-C, the processes that run are ended and the results are kept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=cache) as folder:
        if single:
            out = Path(folder) / "only.jsonl"
        results = Results(out, engine)
        campaign = Campaign(
            engine=engine,
            work=Path(folder),
            lanes=options.lanes,
            deadline=deadline,
            cases=tuple(filter(None, options.case.split(","))),
            repeats=bool(options.edits),
        )
        try:
            run(campaign, chosen, stages, results)
        finally:
            if results.rows:
                results.compact()
    rows = [results.of(one) for one in chosen if results.of(one)["verdict"]]
    print("\n".join(_shown(row) for row in rows) if options.only else summary(rows, stages))
    if options.record:
        _record(options, rows, edits, stages)
    return int(bool(options.only) and any(row["verdict"] not in KILLED for row in rows))


def _chosen(
    options: argparse.Namespace, engine: EngineUnderChange, edits: Sequence[Edit]
) -> list[Mutation]:
    """Return the changes that the options choose, in the order in which they run."""
    if options.edits:
        files = engine.files()
        everything = [mutation_of(one, files) for one in edits]
    else:
        everything = mutations_of(engine)
    if options.only:
        by_id = {identity(engine, one): one for one in everything}
        if unknown := [name for name in options.only if name not in by_id]:
            raise SystemExit(f"no change is called {', '.join(unknown)}; --list shows all")
        return [by_id[name] for name in options.only]
    if options.edits:
        return everything[: options.count]
    return sampled(everything, options.seed, options.count)


def _record(
    options: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    edits: Sequence[Edit],
    stages: Sequence[Stage],
) -> None:
    """Write the results into the tree."""
    names = list(map(str, stages))
    if options.edits:
        record_edits(options.engine, rows, edits, stages=names)
        return
    record(options.engine, rows, seed=options.seed, stages=names)
    print("\n".join(f"triaged, and no survivor: {line}" for line in stale()))


def _shown(row: Mapping[str, Any]) -> str:
    return (
        f"{row['id']}: {row['verdict']}\n  in {row['file']}, line {row['line']}, "
        f"{row['function']}\n  - {row['before']}\n  + {row['after']}\n"
        f"  by {row['case'] or 'no case'} ({row['seconds']} s)\n  {row['message']}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--seed", type=int, default=7, help="of the order of the changes")
    parser.add_argument("--count", type=int, help="so many changes; default: all")
    parser.add_argument(
        "--budget", type=float, default=3600.0, help="seconds after which no change is tried"
    )
    parser.add_argument("--tier", choices=TIERS, default="full")
    parser.add_argument(
        "--world",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 2],
        help="numbers of ranks, by commas; default: 1,2",
    )
    parser.add_argument("--lanes", type=int, default=1, help="changed engines at the same time")
    parser.add_argument("--out", type=Path, help="results; default: build/campaign/ENGINE.jsonl")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with these results")
    parser.add_argument(
        "--edits", type=Path, metavar="FILE", help="changes written by hand instead"
    )
    parser.add_argument("--only", metavar="ID", nargs="+", help="these changes alone")
    parser.add_argument("--case", default="", help="ids or globs, by commas; default: all")
    parser.add_argument("--list", action="store_true", help="show the changes and run none")
    parser.add_argument(
        "--record", action="store_true", help="write the results for docs/mutants.md"
    )
    parser.add_argument("--work", type=Path, default=Path("build/campaign"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
