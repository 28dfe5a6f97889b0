"""Write docs/matrix.md from matrix.toml, or check that it is current (``--check``)."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "matrix.md"
README = ROOT / "README.md"
STATUSES = ("tested", "seen", "not run")
INTRODUCTION = """\
# Tested combinations

<!-- Generated from matrix.toml by tools/matrix.py: change it there. -->

The status *tested* means that `nox -s tests` runs the combination at every change, *seen* that it
was run by hand on such a machine, and *not run* that no one has run it yet.
"""
MODELS = """\
These model types (`model_type` in `config.json`) were compared with a reference: on a *CPU* and
with *simulated CUDA* at every change, on an *H200* by hand. For engines and `local` the comparison
is of every token's log-prob with a reference implementation, for `vllm` of the tokens with those of
a fresh server on the same weights, and for fp8 and `sglang` it is the audit of every weight sync
and generation (docs/benchmarks.md). In an empty cell the model type was not tried: it may be
refused, or served unproven.
"""


def load() -> dict[str, Any]:
    """Return the matrix.

    Raises ``ValueError`` for a status, an environment or a partner that the matrix does not define,
    and for a backend with only some of its runs on a device shimmed, or with two environments for
    one device: one command has to serve all of them.
    """
    matrix = tomllib.loads((ROOT / "matrix.toml").read_text())
    for part in [*matrix["engines"], *matrix["rollouts"]]:
        name = part.get("backend") or part["name"]
        for run in part["runs"]:
            if run["status"] not in STATUSES:
                raise ValueError(
                    f"{name}: status {run['status']!r} is none of {', '.join(STATUSES)}"
                )
            if run["environment"] not in matrix["environments"]:
                raise ValueError(f"{name}: environment {run['environment']!r} is not defined")
    for engine in matrix["engines"]:
        _check_engine(engine, matrix)
    for part in [*matrix["engines"], *matrix["rollouts"]]:
        _check_environments(part.get("backend") or part["name"], part, matrix)
    return matrix


def _check_engine(engine: dict[str, Any], matrix: dict[str, Any]) -> None:
    name, partner = engine["backend"], engine.get("partner")
    if partner is not None and partner not in {other["backend"] for other in matrix["engines"]} - {
        name
    }:
        raise ValueError(f"{name}: partner {partner!r} is no other engine of the matrix")
    shimmed: dict[str, bool] = {}
    for run in engine["runs"]:
        environment = matrix["environments"][run["environment"]]
        device, shim = environment["device"], environment.get("shim", False)
        if shimmed.setdefault(device, shim) != shim:
            raise ValueError(f"{name}: on {device} it runs both plainly and shimmed, choose one")


def _check_environments(name: str, part: dict[str, Any], matrix: dict[str, Any]) -> None:
    chosen: dict[str, str] = {}
    for run in part["runs"]:
        device = matrix["environments"][run["environment"]]["device"]
        if chosen.setdefault(device, run["environment"]) != run["environment"]:
            raise ValueError(
                f"{name}: expected one environment for {device}, got {chosen[device]!r} and "
                f"{run['environment']!r}: one session installs one of them, name it in every run"
            )


def environment_of(part: dict[str, Any], matrix: Mapping[str, Any], device: str) -> str:
    """Return the name of the environment in which an engine or a rollout runs on a device."""
    return next(
        run["environment"]
        for run in part["runs"]
        if matrix["environments"][run["environment"]]["device"] == device
    )


def engine_devices(matrix: dict[str, Any]) -> list[tuple[str, str]]:
    """Return every (backend, device) of the matrix: the axes of ``nox -s conformance``."""
    environments = matrix["environments"]
    pairs = [
        (e["backend"], environments[r["environment"]]["device"])
        for e in matrix["engines"]
        for r in e["runs"]
    ]
    return list(dict.fromkeys(pairs))


def rollout_devices(matrix: dict[str, Any]) -> list[tuple[str, str]]:
    """Return every (rollout, device) of the matrix: the axes of ``nox -s rollouts``."""
    environments = matrix["environments"]
    pairs = [
        (one["name"], environments[run["environment"]]["device"])
        for one in matrix["rollouts"]
        for run in one["runs"]
    ]
    return list(dict.fromkeys(pairs))


def rollout_of(matrix: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the row of a rollout."""
    return next(one for one in matrix["rollouts"] if one["name"] == name)


def rollout_arguments(matrix: Mapping[str, Any], name: str, device: str) -> list[str]:
    """Return the arguments of ``engine-conformance run`` for a rollout on a device."""
    environments = matrix["environments"]
    given = [
        option
        for run in rollout_of(matrix, name)["runs"]
        if environments[run["environment"]]["device"] == device
        for option in run.get("options", ())
    ]
    options = [part for option in dict.fromkeys(given) for part in ("--option", option)]
    return [
        *("run", name, "--profile", "rollout", "--device", device, "--world", "1"),
        *("--partner", "fsdp2", *options),
    ]


def engine_of(matrix: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Return the row of a backend."""
    return next(e for e in matrix["engines"] if e["backend"] == backend)


def package_of(matrix: Mapping[str, Any], backend: str, device: str) -> str:
    """Return the package that offers a backend on a device.

    It is the run's own package where the run names one, and the backend's package if not.
    """
    engine, environments = engine_of(matrix, backend), matrix["environments"]
    own = [
        r["package"]
        for r in engine["runs"]
        if "package" in r and environments[r["environment"]]["device"] == device
    ]
    return own[0] if own else engine["package"]


def world_sizes(matrix: dict[str, Any], backend: str, device: str) -> list[int]:
    """Return every number of ranks at which a backend was seen to work on a device.

    Where the backend has not run on the device yet, these are the numbers to begin with.
    """
    environments = matrix["environments"]
    runs = [
        r
        for r in engine_of(matrix, backend)["runs"]
        if environments[r["environment"]]["device"] == device
    ]
    seen = [r for r in runs if r["status"] != "not run"]
    return sorted({n for r in seen or runs for n in r["world_sizes"]})


def run_arguments(
    matrix: dict[str, Any], backend: str, device: str, sizes: Sequence[int] = ()
) -> list[str]:
    """Return the arguments of ``engine-conformance run`` for a backend on a device.

    They name the ranks (or ``sizes``), the partner, and whether CUDA is simulated.
    """
    engine = engine_of(matrix, backend)
    worlds = ",".join(map(str, sizes or world_sizes(matrix, backend, device)))
    partner = ["--partner", engine["partner"]] if "partner" in engine else []
    return [
        "run",
        backend,
        "--device",
        device,
        "--world",
        worlds,
        *partner,
        *(["--shim"] if is_shimmed(matrix, backend, device) else []),
    ]


def is_shimmed(matrix: dict[str, Any], backend: str, device: str) -> bool:
    """Return whether a backend runs on a device only with simulated CUDA."""
    found = [
        matrix["environments"][run["environment"]] for run in engine_of(matrix, backend)["runs"]
    ]
    return any(e.get("shim", False) for e in found if e["device"] == device)


def render(matrix: dict[str, Any]) -> str:
    """Return the page."""
    environments, engines, rollouts = (
        _environments(matrix["environments"]),
        _engines(matrix),
        _rollouts(matrix),
    )
    return (
        f"{INTRODUCTION}\n## Engines\n\n{engines}\n## Rollouts\n\n{rollouts}"
        f"\n## Models\n\n{MODELS}\n{render_models(matrix)}"
        f"\n## Environments\n\n{environments}"
    )


def render_models(matrix: dict[str, Any], longest: int | None = None) -> str:
    """Return the table of model types by engine and rollout.

    Types with equal cells share a row, the most served ones first; of more than ``longest`` types
    in a row only some are named.
    """
    columns: dict[str, dict[str, list[str]]] = {}
    for part in [*matrix["engines"], *matrix["rollouts"]]:
        for run in part["runs"]:
            short = matrix["environments"][run["environment"]]["short"]
            for quantization in run.get("quantization", ["none"]):
                name = f"`{part.get('backend') or part['name']}`"
                column = name if quantization == "none" else f"{name} {quantization}"
                for model in run.get("models", ()):
                    columns.setdefault(column, {}).setdefault(model, []).append(short)
    rows: dict[tuple[str, ...], list[str]] = {}
    for model in sorted({model for column in columns.values() for model in column}):
        cells = tuple(", ".join(column.get(model, ())) for column in columns.values())
        rows.setdefault(cells, []).append(model)
    ordered = sorted(rows.items(), key=lambda row: sum(map(bool, row[0])), reverse=True)
    return table(
        ("model types", *columns),
        [(_shortened(models, longest), *cells) for cells, models in ordered],
    )


def _shortened(names: list[str], longest: int | None) -> str:
    shown = names[:longest]
    more = len(names) - len(shown)
    return ", ".join(f"`{name}`" for name in shown) + (f" and {more} more" if more else "")


def _engines(matrix: dict[str, Any]) -> str:
    rows = [
        (
            f"`{e['backend']}`",
            ", ".join(e["model_types"]),
            matrix["environments"][r["environment"]]["title"],
            ", ".join(map(str, r["world_sizes"])),
            r["status"],
            r.get("note", ""),
        )
        for e in matrix["engines"]
        for r in e["runs"]
    ]
    return table(("backend", "model types", "environment", "ranks", "status", "note"), rows)


def _rollouts(matrix: dict[str, Any]) -> str:
    rows = [
        (
            f"`{e['name']}`",
            f"`{e['package']}`",
            matrix["environments"][r["environment"]]["title"],
            ", ".join(r["quantization"]),
            r["status"],
            r.get("note", ""),
        )
        for e in matrix["rollouts"]
        for r in e["runs"]
    ]
    return table(("rollout", "package", "environment", "quantization", "status", "note"), rows)


def _environments(environments: dict[str, Any]) -> str:
    names = sorted({name for e in environments.values() for name in e["versions"]})
    rows = [
        (
            e["title"],
            e["device"],
            e["python"],
            *(e["versions"].get(n, "") for n in names),
            f"`{e['constraints']}`" if "constraints" in e else "",
        )
        for e in environments.values()
    ]
    return table(("environment", "device", "Python", *names, "constraints"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_section(page: str, name: str, body: str) -> str:
    """Return ``page`` with the text between the markers of ``name`` replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in page:
        page = f"{page.rstrip()}\n\n## {name}\n\n{begin}\n{end}\n"
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n{body.rstrip()}\n{end}{after}"


def write_or_check(page: Path, text: str, tool: str) -> int:
    """Write a generated page, or compare it with ``--check``.

    Returns the exit status: 0 for a page that was written or is current, 1 for one out of date.
    """
    if "--check" not in sys.argv[1:]:
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
        return 0
    if page.is_file() and page.read_text() == text:
        return 0
    print(f"{page.relative_to(ROOT)} is out of date: run `python tools/{tool}`", file=sys.stderr)
    return 1


def main() -> int:
    """Write or check the page and the README's table of models, and return the exit status."""
    matrix = load()
    models = replace_section(README.read_text(), "models", render_models(matrix, longest=12))
    return max(
        write_or_check(PAGE, render(matrix), "matrix.py"),
        write_or_check(README, models, "matrix.py"),
    )


if __name__ == "__main__":
    sys.exit(main())
