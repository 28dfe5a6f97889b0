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
is of every token's log-prob with a reference implementation. For `vllm` on a CPU it is of each
generated token's log-prob with transformers after weight syncs: a few types at every change, and
all of them in [the table of models](models.md#rollouts-on-vllm), which also names those that are
refused. For `vllm` on an H200 it is of the tokens with those of a fresh server on the same weights,
and for fp8 and `sglang` it is the audit of every weight sync and generation (docs/benchmarks.md).
In an empty cell the model type was not tried: it may be refused, or served unproven.
"""

MACHINES = """\
A team certifies engines on machines of several kinds from one commit of this repository. Every
machine needs Python 3.11 or 3.12 and `python -m pip install "nox[uv]"`; nox makes the environments
and installs the versions that the last table of this page names. Run this:
"""
SESSIONS = """\
`-k` runs every session whose name holds the words. One session by its name needs quotes, since its
parentheses and quotes mean something to a shell:
"""
AFTERWARDS = """\
Arguments after `--` go to `engine-conformance run`, and a later one wins over the session's own:
`-- --world 1,2` for a host with two devices, `-- --dtype float32,bfloat16` for both precisions,
`-- --limit 3000 --continue` to go on where an earlier call ended. On a host that lacks a device or
a library the suite ends with exit code 3 and names the missing part. A part that is on no package
index is asked for before anything is installed.

A CPU host, and an NPU host, needs the CPU build of torch. The environments that must have it ask uv
for it (`--torch-backend cpu`). `UV_TORCH_BACKEND=cpu` does so for all sessions, and
`PIP_FIND_LINKS=FOLDER` takes the wheel from a folder, where there is no way to PyTorch's index.

### One table of all machines

Each `certify` session writes `conformance/reports/ENGINE-VERSION/DEVICE/`. The folders of two
machines have different names, so they come together by a commit of each machine's own folder, or by
the artifacts of CI. Then, on any machine:

```sh
engine-conformance verify conformance/reports/fsdp2-0.1.0/cuda/report.json   # each of them
nox -s docs                                        # the README's table of certificates
```

The table shows which reports verify with this commit's suite, and marks the others with the
contract that they are of. Reports of one engine on the same kind of machine, as one of float32 and
one of bfloat16, become one certificate:

```sh
engine-conformance merge PART-1/report.json PART-2/report.json --certify \\
    --report conformance/reports/fsdp2-0.1.0/cuda
```

`merge` refuses reports of different versions, files or kinds of machine, and says which differ. One
certificate can be spread over machines of one kind, too: `engine-conformance run … --certify
--part 2/5` runs one part of five, and `merge --certify` joins all of them.

### CI

One workflow for GitHub Actions, for runners of your own with the labels `cuda` and `npu`. The last
job writes the table from what the others have uploaded:
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
        f"\n## On each machine, run this\n\n{render_machines(matrix)}"
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


def render_machines(matrix: dict[str, Any]) -> str:
    """Return the section for a team with several kinds of machines."""
    pairs = [
        *(("certify", "engine", *pair) for pair in engine_devices(matrix)),
        *(("rollouts", "rollout", *pair) for pair in rollout_devices(matrix)),
    ]
    rows = [_session_row(matrix, *pair) for pair in pairs]
    machines = table(
        ("machine", "needs first", "command", "result"),
        [
            (
                "CPU",
                "",
                '`nox -s tests`, `nox -k "certify and cpu"`',
                "every test; certificates in the folders `cpu` and `cpu-shimmed`",
            ),
            (
                "NVIDIA GPUs",
                "a driver for CUDA 13",
                '`nox -k "certify and cuda"`, `nox -k "rollouts and cuda"`',
                "certificates in the folders `cuda`; the rollouts' cases, without a report",
            ),
            (
                "Ascend NPUs",
                f"driver and CANN ([docs/npu.md](npu.md)), and for Megatron {_checkouts(matrix)}",
                '`nox -k "certify and npu"`',
                "certificates in the folders `npu`",
            ),
        ],
    )
    sessions = table(("session", "environment", "constraints"), rows)
    return (
        f"{MACHINES}\n{machines}\n{SESSIONS}\n{sessions}\n{AFTERWARDS}\n"
        f"```yaml\n{render_workflow(matrix)}```\n"
    )


def _session_row(
    matrix: dict[str, Any], session: str, axis: str, name: str, device: str
) -> tuple[str, ...]:
    part = engine_of(matrix, name) if axis == "engine" else rollout_of(matrix, name)
    entry = matrix["environments"][environment_of(part, matrix, device)]
    files = [entry["constraints"], *([entry["overrides"]] if "overrides" in entry else [])]
    return (
        f"`nox -s \"{session}({axis}='{name}', device='{device}')\"`",
        entry["title"],
        ", ".join(f"`{file}`" for file in files),
    )


def _checkouts(matrix: dict[str, Any]) -> str:
    found = {
        f"`{part['clone']}` and `export {variable}=FOLDER`"
        for entry in matrix["environments"].values()
        for variable, part in entry.get("checkouts", {}).items()
    }
    return "; ".join(sorted(found))


def render_workflow(matrix: dict[str, Any]) -> str:
    """Return a workflow of CI with one job for each kind of machine, and one for the table."""
    devices = list(dict.fromkeys(device for _, device in engine_devices(matrix)))
    jobs = "".join(_job(matrix, device) for device in devices)
    return f"""\
name: certificates
on:
  workflow_dispatch:
  schedule:
    - cron: "0 3 * * 6"
jobs:
{jobs}\
  table:
    needs: [{", ".join(devices)}]
    # A machine that was not there leaves the other machines' reports.
    if: always()
    runs-on: ubuntu-24.04
    env:
      UV_TORCH_BACKEND: cpu
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: "3.11"
      - uses: actions/download-artifact@v5
        with:
          path: conformance/reports
          merge-multiple: true
      - run: python -m pip install "nox[uv]"
      - run: nox -s docs
      - uses: actions/upload-artifact@v4
        with:
          name: table
          path: |
            README.md
            conformance/reports
"""


def _job(matrix: dict[str, Any], device: str) -> str:
    own = [one for one in matrix["environments"].values() if one["device"] == device]
    python = next(one["python"] for one in own)
    variables = [name for one in own for name in one.get("checkouts", ())]
    runner = {"cpu": "ubuntu-24.04"}.get(device, f"[self-hosted, {device}]")
    lines = [
        f"{device}:",
        f"  runs-on: {runner}",
        *(["  env:", "    UV_TORCH_BACKEND: cpu"] if device == "cpu" else []),
        "  steps:",
        "    - uses: actions/checkout@v5",
        "    - uses: actions/setup-python@v6",
        "      with:",
        f'        python-version: "{python}"',
        '    - run: python -m pip install "nox[uv]"',
    ]
    for name in dict.fromkeys(variables):
        clone = next(one["checkouts"][name]["clone"] for one in own if "checkouts" in one)
        lines += [f'    - run: {clone} && echo "{name}=$PWD/MindSpeed" >> "$GITHUB_ENV"']
    setup = "source /usr/local/Ascend/ascend-toolkit/set_env.sh && " if device == "npu" else ""
    lines += [
        f'    - run: {setup}nox -k "certify and {device}"',
        "      shell: bash",
        "    - uses: actions/upload-artifact@v4",
        "      if: always()",
        "      with:",
        f"        name: {device}",
        f"        path: conformance/reports/*/{device}*",
    ]
    return "".join(f"  {line}\n" for line in lines)


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
