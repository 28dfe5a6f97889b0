"""``engine-conformance run | merge | list | explain | verify | badge``.

Exit codes: 0 nothing failed (with ``--certify``: conformant), 1 not, 2 usage, 3 could
not run, 141 the reader of the output ended early.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api.commands import run_command
from engine_api.config import Parallelism
from engine_api.devices import SIMULATED_CUDA, SIMULATED_NPU, npu_is_simulated
from engine_api.errors import ConfigError
from engine_api.plugin import CONTRACT
from engine_conformance import __version__
from engine_conformance.errors import CannotRun, UsageError
from engine_conformance.explain import explain_case, list_cases
from engine_conformance.messages import describe, line
from engine_conformance.preflight import preflight
from engine_conformance.ranks import close_pools, warm_up
from engine_conformance.results import Row, SuiteRun
from engine_conformance.verdict import EXIT, compute_verdicts, exit_code

if TYPE_CHECKING:
    from engine_conformance.deviations import Deviation
    from engine_conformance.plan import Selection

__all__ = ["main"]

_ABOUT = (
    "Exit codes: 0 nothing failed (with --certify: conformant), 1 not, 2 usage, 3 could not run."
)
# By --device: the environment variable that --shim sets.
_SIMULATED = {"cpu": SIMULATED_CUDA, "npu": SIMULATED_NPU}
_COMMIT = re.compile("[0-9a-f]{7,64}(-dirty)?")
_DEVIATIONS = Path("conformance.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    return run_command(lambda: _run_one(list(sys.argv[1:] if arguments is None else arguments)))


def _run_one(given: Sequence[str]) -> int:
    options = _parser().parse_args(given)
    try:
        return options.command(options, given)
    except (UsageError, ConfigError) as error:
        print(f"engine-conformance: {error}", file=sys.stderr)
        return EXIT["usage"]
    except CannotRun as error:
        print(f"engine-conformance: could not run {options.name!r}\n{error}", file=sys.stderr)
        return EXIT["could not run"]
    except KeyboardInterrupt:
        print("engine-conformance: interrupted; nothing is reported", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine-conformance", description=_ABOUT)
    parser.add_argument(
        "--version",
        action="version",
        version=f"engine-conformance {__version__} (contract {CONTRACT}, "
        f"Python {platform.python_version()})",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(
        commands.add_parser("run", help="run the cases against an engine or a rollout, by name")
    )
    listing = commands.add_parser("list", help="every case")
    listing.add_argument("--profile", choices=("engine", "rl", "rollout"))
    listing.add_argument("--group", help="core, or a capability")
    listing.set_defaults(
        command=lambda options, _: _print(list_cases(options.profile, options.group))
    )
    explaining = commands.add_parser(
        "explain", help="what a case demands, why, and what to look at when it fails"
    )
    explaining.add_argument("case")
    explaining.set_defaults(command=lambda options, _: _print(explain_case(options.case)))
    verifying = commands.add_parser(
        "verify", help="whether a report.json is whole, unaltered and what this suite decides"
    )
    verifying.add_argument("report", type=Path)
    verifying.add_argument(
        "--parts",
        type=Path,
        nargs="+",
        default=[],
        metavar="REPORT",
        help="what a joined report was made of: join again, and compare",
    )
    verifying.set_defaults(command=_verify, name="verify")
    _add_merge(
        commands.add_parser(
            "merge", help="join reports of one engine, suite and kind of machine into one"
        )
    )
    badge = commands.add_parser("badge", help="the shields.io endpoint of a report.json")
    badge.add_argument("report", type=Path)
    badge.add_argument("--out", type=Path, help="a file; default: standard output")
    badge.set_defaults(command=_badge, name="badge")
    return parser


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="REPORT", help="a report.json, or its folder"
    )
    parser.add_argument(
        "--report", type=Path, required=True, metavar="DIR", help="write the joined reports there"
    )
    parser.add_argument(
        "--certify",
        action="store_true",
        help="exit 0 only if every verdict is conformant, and no part of a certificate is missing",
    )
    parser.set_defaults(command=_merge)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the backend's name in the registry, or the rollout's")
    parser.add_argument("--device", default="cpu", help="never replaced by another; default: cpu")
    parser.add_argument("--world", default="1,2", help="numbers of ranks, by commas; default: 1,2")
    parser.add_argument(
        "--dtype", default="float32", help="float32, bfloat16 or both, by commas; default: float32"
    )
    parser.add_argument(
        "--model-type", default="", help="by commas; default: all that the plug-in offers"
    )
    parser.add_argument(
        "--profile", default="", help="engine, rl, rollout; default: engine,rl (a rollout: rollout)"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        help="ids or globs, by commas, may be repeated; default: all",
    )
    parser.add_argument(
        "--tier", choices=("quick", "full"), default="full", help="quick: about a minute"
    )
    parser.add_argument(
        "--parallelism",
        default="",
        help="how ranks are spread, as tp=2,pp=2; default: data parallel",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the engine or the rollout itself, may be repeated; "
        "VALUE is JSON or a word",
    )
    parser.add_argument(
        "--partner", help="another engine, for checkpoints and rollouts that two share"
    )
    parser.add_argument(
        "--certify",
        action="store_true",
        help="all cases, and exit 0 only for conformant; with --case or --part: a part of a "
        "certificate, which merge joins",
    )
    parser.add_argument(
        "--part",
        default="",
        metavar="K/N",
        help="with --certify: the K-th of N parts of about the same length, as 2/5",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write report.json, certificate.md, report.html, …",
    )
    parser.add_argument(
        "--deviations", type=Path, help=f"default: {_DEVIATIONS} in this folder, if there is one"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="deadlines are this many times as long"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="draw the batches from another seed; default: 0, the one of published certificates",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="start no case after this many seconds; the next run may --continue",
    )
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="run what the report in --report DIR has not shown, and join both in it; "
        "without a report yet, this run begins it; with --certify, a report of an older suite of "
        "this contract keeps the rows of cases that have not changed",
    )
    parser.add_argument(
        "--commit",
        default="",
        metavar="HASH",
        help="the commit that the installed wheels were built from, for the report; a checkout, "
        "and a package that was installed from a repository, state their own",
    )
    parser.add_argument("--plugin", help="module:ATTR of a descriptor that is not installed")
    parser.add_argument(
        "--shim",
        action="store_true",
        help="simulate CUDA on the CPU, for an engine that knows only CUDA; "
        "with --device npu: an NPU, and no certificate",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="run N cases at the same time, each on ranks of its own; default: one for each core "
        "up to 4 on the CPU, and 1 on an accelerator or for a rollout",
    )
    parser.add_argument("--quiet", action="store_true", help="one line only for what did not pass")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    simulated = _SIMULATED.get(options.device) if options.shim else None
    if options.shim and simulated is None:
        raise UsageError(
            f"--shim: expected --device {' or '.join(_SIMULATED)}, got {options.device}. "
            "It simulates CUDA on the CPU, or an NPU; without it the engine runs on the device"
        )
    if options.certify and options.device == "npu" and (simulated or npu_is_simulated()):
        raise UsageError(
            "--certify: a simulated NPU gives no certificate; "
            f"on an Ascend host, without --shim and {SIMULATED_NPU}"
        )
    with tempfile.TemporaryDirectory(prefix="conformance-site-") as site:
        if simulated:
            # Read by the probe here, by the child that calls it first, and by the ranks.
            os.environ[simulated] = "1"
        if options.plugin:
            offer(options.plugin, Path(site))
        try:
            return _run_offered(options, given)
        finally:
            close_pools()
            sys.path[:] = [entry for entry in sys.path if entry != site]
            if simulated:
                del os.environ[simulated]


def _run_offered(options: argparse.Namespace, given: Sequence[str]) -> int:
    # The ranks import torch while this process does.
    warm_up(max(_worlds(options.world)), options.device)
    from engine_conformance.report import merge, read_document, to_document
    from engine_conformance.session import describe_run, run_selection

    selection = _selection(options)
    if options.report:
        _check_writable(options.report)
    deviations = _read_deviations(options.deviations)
    preflight(options.name, options.device)
    earlier = None
    # A part of a certificate is joined with other parts, which are of one kind of machine.
    any_machine = options.certify and selection.complete
    if options.go_on:
        now = describe_run(selection, command=given, commit=options.commit)
        earlier = _read_continued_report(options.report, now, certify=options.certify)
        if earlier and (earlier["suite"] != now.suite or _is_whole_plan(earlier, selection)):
            selection, earlier = _renew(earlier, selection, now)
            if not selection.cases:
                run = merge({str(options.report): earlier}, command=given, certify=options.certify)
                return _conclude(run, options.report, certify=options.certify)

    def listen(row: Row) -> None:
        well = row.outcome.status in ("passed", "refused")
        if well and options.quiet:
            return
        brief = well or row.outcome.status == "not-run"
        print(line(row) if brief else describe(row), flush=True)

    run = run_selection(
        selection,
        command=given,
        certify=options.certify,
        commit=options.commit,
        deviations=deviations,
        limit=options.limit,
        earlier=read_document(earlier)[0] if earlier else None,
        lanes=options.lanes,
        listen=listen,
    )
    if earlier:
        documents = {str(options.report): earlier}
        if run.rows:
            own = compute_verdicts(run.rows, complete=selection.complete, declared=run.declared)
            documents["what was run now"] = to_document(run, own)
        run = merge(documents, command=given, certify=options.certify, any_machine=any_machine)
    return _conclude(run, options.report, certify=options.certify)


def _read_deviations(named: Path | None) -> list[Deviation]:
    """Return the known deviations of a file, or of this folder's, if there is one.

    Raises:
        UsageError: if the file is not as it should be.
    """
    from engine_conformance.cases import load_cases
    from engine_conformance.deviations import DeviationError, read_deviations

    listed = named or (_DEVIATIONS if _DEVIATIONS.exists() else None)
    if listed is None:
        return []
    try:
        deviations = read_deviations(listed, known=load_cases())
    except DeviationError as error:
        raise UsageError(str(error)) from error
    print(f"{len(deviations)} deviation(s) from {listed}")
    return deviations


def _conclude(run: SuiteRun, folder: Path | None, *, certify: bool) -> int:
    """Judge a run, write its reports, print its summary, and return the exit code."""
    from engine_conformance.report import summary, write_reports

    verdicts = compute_verdicts(run.rows, complete=run.selection["complete"], declared=run.declared)
    if folder:
        write_reports(folder, run, verdicts)
    print(f"\n{summary(run, verdicts, folder=folder)}")
    return exit_code(run.rows, verdicts, certify=certify, part=run.is_part)


def _read_continued_report(
    folder: Path | None, now: SuiteRun, *, certify: bool
) -> dict[str, Any] | None:
    """Return the report that the run ``now`` continues, or None if the folder has none yet.

    Raises:
        UsageError: if no folder is named, or its report does not fit the run that would start.
    """
    from engine_conformance.report import SUITE, check_certified, differences, read_document

    if folder is None:
        raise UsageError("--continue goes on with the report in --report DIR: name its folder")
    if not (folder / "report.json").exists():
        print(f"--continue: no report.json in {folder} yet: this run begins it")
        return None
    document = _read_verified_report(folder, renewable=certify)
    earlier, _ = read_document(document)
    if certify:
        # Of an older suite it has rows to keep, or would not have been verified.
        facts = dict(earlier.environment) | {SUITE: now.environment[SUITE]}
        earlier = replace(earlier, suite=now.suite, environment=facts)
    # A report of an older suite is no part any more.
    is_older = document["suite"] != now.suite
    any_machine = certify and (is_older or now.selection["complete"])
    if problems := differences(earlier, now, any_machine=any_machine):
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise UsageError(
            f"--continue: {folder} reports something else than what would run now{reasons}"
        )
    if certify:
        check_certified({str(folder): document})
    return document


def _is_whole_plan(document: Mapping[str, Any], selection: Selection) -> bool:
    """Return whether a report with a certificate's plan is continued without naming a part."""
    return bool(document.get("planned")) and selection.complete


def _renew(
    document: Mapping[str, Any], selection: Selection, now: SuiteRun
) -> tuple[Selection, dict[str, Any]]:
    """Return what is to run, and what is kept of a certificate that is continued.

    The selection names no case if all rows are kept.

    Raises:
        UsageError: if cases were picked by hand, or the report has rows that would not run now.
    """
    from engine_conformance.plan import make_plan
    from engine_conformance.report import read_document, renew, shown

    if not selection.complete:
        raise UsageError(
            "--continue: the report is of an older suite, of which the cases that have changed run "
            "again by themselves: leave out --case and --part"
        )
    with tempfile.TemporaryDirectory(prefix="conformance-") as place:
        planned = [item.key for item in make_plan(selection, Path(place))]
    kept = renew(document, now, planned)
    there = shown(read_document(kept)[0])
    cases = tuple(dict.fromkeys(case for case, setting in planned if (case, setting) not in there))
    print(f"--continue: {len(there)} of {len(planned)} rows are kept")
    return replace(selection, cases=cases), kept


def _read_verified_report(path: Path, *, renewable: bool = False) -> dict[str, Any]:
    """Return the document of a verified report, given as a file or as its folder.

    Args:
        path: the file or the folder.
        renewable: whether it may be of an older suite, if some of its rows can be kept.

    Raises:
        UsageError: if the file is missing or does not verify.
    """
    from engine_conformance.environment import suite
    from engine_conformance.report import verify

    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"expected a report.json, or the folder of one, got {file}, which is not a file"
        )
    if problems := verify(file, suite=suite(), renewable=renewable):
        raise UsageError("\n".join(["a report that does not verify is not joined:", *problems]))
    document = json.loads(file.read_text())
    if document["suite"] != suite() and not renewable:
        raise UsageError(
            f"{file}: is of an older suite, though of one that decides its cases as this one does: "
            "`engine-conformance run` with its options, --certify and --continue takes it over"
        )
    return document


def _merge(options: argparse.Namespace, given: Sequence[str]) -> int:
    from engine_conformance.report import check_whole, merge

    documents = {str(path): _read_verified_report(path) for path in options.reports}
    _check_writable(options.report)
    run = merge(documents, command=given, certify=options.certify)
    if options.certify:
        check_whole(run)
    return _conclude(run, options.report, certify=options.certify)


def _selection(options: argparse.Namespace) -> Selection:
    from engine_conformance.cases._case import LM, PROFILES, VALUE
    from engine_conformance.plan import Selection

    selection = Selection(
        name=options.name,
        device=options.device,
        worlds=_worlds(options.world),
        dtypes=_words("--dtype", options.dtype, ("float32", "bfloat16")),
        model_types=_words("--model-type", options.model_type, (LM, VALUE)),
        profiles=_words("--profile", options.profile, PROFILES),
        cases=tuple(filter(None, ",".join(options.case).split(","))),
        quick=options.tier == "quick",
        layout=_layout(options.parallelism),
        partner=options.partner,
        patience=options.patience,
        seed=options.seed,
        plugin=options.plugin,
        options=dict(map(_option, options.option)),
        part=_part(options.part),
    )
    if options.certify and selection.quick:
        raise UsageError("--certify runs every case: leave out --tier quick")
    if options.part and not options.certify:
        raise UsageError("--part is a part of a certificate: add --certify")
    if options.part and options.case:
        raise UsageError("--part and --case both choose a part of a certificate: leave out one")
    if options.commit and not _COMMIT.fullmatch(options.commit):
        raise UsageError(
            f"--commit: expected 7 to 64 hexadecimal digits, and -dirty for changed files, got "
            f"{options.commit!r}; `git describe --always --dirty --abbrev=40 --exclude '*'` "
            "prints it"
        )
    if not 0 < options.patience < math.inf:
        raise UsageError(f"--patience: expected a finite factor above 0, got {options.patience}")
    if options.lanes is not None and options.lanes < 1:
        raise UsageError(f"--lanes {options.lanes}: expected a whole number of 1 or more")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: expected a whole number of 0 or more")
    return selection


def _words(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [word for word in words if word not in known]:
        raise UsageError(f"{option} {','.join(unknown)} is unknown; known: {', '.join(known)}")
    return words


def _worlds(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--world: expected positive integers separated by commas, such as 1,2,4, got {text!r}"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _part(text: str) -> str:
    number, _, count = text.partition("/")
    numbers = number.isdecimal() and count.isdecimal()
    if text and not (numbers and 1 <= int(number) <= int(count) and int(count) > 1):
        raise UsageError(
            f"--part: expected K/N with K from 1 to N and N of 2 or more, as 2/5, got {text!r}"
        )
    return f"{int(number)}/{int(count)}" if text else ""


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(
            f"--option {text}: write NAME=VALUE, as spec=local or kv_cache_bytes=1073741824"
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _layout(text: str) -> Parallelism:
    known = [f.name for f in fields(Parallelism)]
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in known or not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"--parallelism {part}: write NAME=SIZE, as tp=2; names: {', '.join(known)}"
            )
        sizes[name] = int(size)
    return Parallelism(**sizes)


def _check_writable(folder: Path) -> None:
    """Raise if the folder cannot be written: before the run, not after ten minutes of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--report {folder}: cannot be written: {error.strerror}; name another folder"
        ) from error


def offer(target: str, site: Path) -> None:
    """Make a descriptor discoverable as an installed one is, by an entry point on ``sys.path``.

    Does nothing if an entry point already names the descriptor.

    Raises:
        UsageError: if the module does not exist.
    """
    module, _, attribute = target.partition(":")
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there or not attribute:
        raise UsageError(
            f"--plugin {target}: no module {module!r} on the path; "
            "write module:ATTR, as acme.plugin:PLUGIN"
        )
    if any(entry.value == target for entry in entry_points(group="engine_api.engines")):
        return
    info = site / "engine_under_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[engine_api.engines]\nunder-test = {target}\n")
    sys.path.append(str(site))


def _print(text: str) -> int:
    print(text)
    return EXIT["conformant"]


def _verify(options: argparse.Namespace, _: Sequence[str]) -> int:
    from engine_conformance.environment import suite
    from engine_conformance.report import verify

    if not options.report.is_file():
        raise UsageError(f"expected a report.json, got {options.report}, which is not a file")
    problems = verify(options.report, suite=suite())
    if options.parts and not problems:
        problems = _find_differences_from_parts(options.report, options.parts)
    if problems:
        print("\n".join(problems))
        return EXIT["not conformant"]
    print(f"{options.report}: whole, unaltered, and decided as this suite decides")
    print("".join(f"{note}\n" for note in _other_builds(options.report)), end="")
    return EXIT["conformant"]


def _other_builds(report: Path) -> list[str]:
    """Return a note for each package whose installed files are not those that were tested.

    The report stays valid: it is about the files that it names.
    """
    from engine_conformance.environment import sources

    document = json.loads(report.read_text())
    installed = sources(*document.get("sources", {}))
    commits = document.get("commits", {})
    return [
        f"note: {name}: tested were the files of SHA-256 {tested[:12]}…"
        + (f" (commit {commits[name]})" if name in commits else "")
        + f", installed are those of {installed[name][:12]}…"
        for name, tested in document.get("sources", {}).items()
        if name in installed and installed[name] != tested
    ]


def _find_differences_from_parts(report: Path, parts: Sequence[Path]) -> list[str]:
    """Return the fields in which a joined report differs from its parts, joined again."""
    from engine_conformance.report import merge, to_document

    stated = json.loads(report.read_text())
    run = merge(
        {str(path): _read_verified_report(path) for path in parts},
        command=stated["command"],
        certify=stated["certify"],
    )
    verdicts = compute_verdicts(run.rows, complete=run.selection["complete"], declared=run.declared)
    made = to_document(run, verdicts)
    return [
        f"{report}: {name}: is not what its parts give"
        for name in made
        if name != "digest" and stated.get(name) != made[name]
    ]


def _badge(options: argparse.Namespace, _: Sequence[str]) -> int:
    from engine_conformance.environment import suite
    from engine_conformance.report import badge, verify

    if not options.report.is_file():
        raise UsageError(f"expected a report.json, got {options.report}, which is not a file")
    if problems := verify(options.report, suite=suite()):
        raise UsageError("\n".join(["no badge for a report that does not verify:", *problems]))
    text = json.dumps(badge(json.loads(options.report.read_text())), indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return EXIT["conformant"]


if __name__ == "__main__":
    sys.exit(main())
