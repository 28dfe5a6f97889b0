"""The environment of a run, kept in ``environment.json``: a row for each start of the run.

A row has the versions, the hardware, the commit and the command line, without secrets.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from engine_api.devices import device_of
from engine_api.folders import write_text
from engine_api.plugin import ENGINE_GROUP, ROLLOUT_GROUP
from engine_trainer.config.secrets import masked
from engine_trainer.errors import DataError

log = logging.getLogger("engine_trainer")

FILE = "environment.json"
PACKAGES = (
    "enginehouse",
    "engine-trainer",
    "engine-api",
    "engine-torch",
    "torch",
    "transformers",
    "numpy",
    "pyarrow",
    "ray",
    "vllm",
    "sglang",
    "megatron-core",
    "transformer-engine",
    "torch-npu",
    "mindspeed",
    "reasoning-gym",
    "math-verify",
)
"""Distributions whose versions are kept, in addition to those that bring plug-ins."""
# Seconds after which git's answer is not waited for, such as on a slow network disk.
_GIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """The environment of one start of a run."""

    task: str
    """Name of the task: sft, rl, dpo, kto or rm."""
    after: int
    """Step that the run continued after, 0 for a new run."""
    steps: int
    """Number of steps that the run is to have."""
    date: str
    """Time of the start in ISO 8601, in UTC."""
    command: str
    """Command line as a shell takes it."""
    ranks: int
    """Number of processes that train."""
    launcher: str
    """``none`` where every rank runs the loop, or ``ray``."""
    backend: str
    """Name of the engine."""
    device: str
    """Type of device that the engine computes on."""
    model: str
    """Path or name of the model."""
    hardware: tuple[str, ...]
    """Devices, processors and memory of the machine of the loop's first process."""
    commit: str | None
    """Commit of the git repository that the run was started in, or None outside of one."""
    versions: dict[str, str]
    """Versions of Python and of packages."""
    resolved: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the engine does of what it was asked for, by the key of its section
    (``Engine.resolved``).
    """


def record(folder: Path, start: Start) -> None:
    """Add a start to the run's ``environment.json``.

    The first start of a run replaces the file.

    Starts after the step that the run continues from belong to steps that are trained again, and
    stay: they say how often the run was started. A file of another version is replaced, too.
    """
    former: list[Start] = []
    if start.after:
        try:
            former = read_starts(folder)
        except DataError as error:
            log.warning("the run's earlier starts are not known: %s", error)
    rows = [asdict(row) for row in [*former, start]]
    write_text(folder / FILE, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of the run in ``folder``, which is empty for a run of a former version.

    Raises ``DataError`` for a file that is not one of starts.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Start(**row | {"hardware": tuple(row["hardware"])}) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "it does not describe the starts of a run",
            file=str(path),
            why=f"{type(error).__name__}: {error}",
            remedy="remove the file",
        ) from error


def describe_start(
    *,
    task: str,
    after: int,
    steps: int,
    ranks: int,
    launcher: str,
    backend: str,
    device: str,
    model: str,
    resolved: Mapping[str, Any],
) -> Start:
    """Return the environment of this process."""
    return Start(
        task=task,
        after=after,
        steps=steps,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv),
        ranks=ranks,
        launcher=launcher,
        backend=backend,
        device=device,
        model=str(masked(model)),
        hardware=hardware(device),
        commit=commit(Path.cwd()),
        versions=versions(),
        resolved=dict(resolved),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line for a shell, with secrets as ``***``."""
    program, *rest = arguments or [""]
    path = Path(program)
    # `python -m engine_trainer` names the module by its file.
    is_command = path.name == "engine-train" or path.parts[-2:] == ("engine_trainer", "__main__.py")
    shown = ["engine-train"] if is_command else ["python", program]
    before = ""
    for argument in rest:
        shown.append(_without_secrets(argument, before))
        before = argument
    return shlex.join(shown)


def commit(folder: Path) -> str | None:
    """Return the commit of the git repository of ``folder``, and whether its files differ from it.

    Outside of a repository it is the commit that engine-trainer was installed from, where pip has
    noted one, or else None.
    """
    found = _git(folder, "rev-parse", "HEAD")
    if found is None:
        return _installed_commit()
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{found} with changes" if changed else found


def hardware(device: str) -> tuple[str, ...]:
    """Return the devices, the processors and the memory of this machine."""
    found = [*_devices(device)] if device != "cpu" else []
    cores = len(os.sched_getaffinity(0))
    found.append(f"{cores} {'core' if cores == 1 else 'cores'} of {_processor()}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (*found, f"{memory / 2**30:.0f} GiB of memory", platform.platform())


def versions() -> dict[str, str]:
    """Return the versions of Python, of ``PACKAGES`` and of packages with plug-ins."""
    points = importlib.metadata.entry_points()
    plugins = {
        point.dist.name
        for group in (ENGINE_GROUP, ROLLOUT_GROUP)
        for point in points.select(group=group)
        if point.dist is not None
    }
    found = {"python": platform.python_version()}
    for name in [*PACKAGES, *sorted(plugins - set(PACKAGES))]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices(device: str) -> list[str]:
    if not device_of(device).probe().ok:
        return []  # a controller may have no device while its workers have some
    module = device_of(device).module
    names = [str(module.get_device_name(i)) for i in range(module.device_count())]
    return [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command, None without git, a repository or an answer."""
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str | None:
    """Return the commit in the note that pip leaves for an installation from a repository."""
    installed = next(iter(importlib.metadata.distributions(name="engine-trainer")), None)
    note = installed.read_text("direct_url.json") if installed is not None else None
    found = json.loads(note).get("vcs_info", {}).get("commit_id") if note else None
    return f"{found} of engine-trainer" if found else None


def _without_secrets(argument: str, before: str) -> str:
    """Return an argument that follows ``before``, with its secrets as ``***``."""
    key, equals, value = argument.partition("=")
    if not equals:
        # `--api-key VALUE`
        name = before.lstrip("-") if before.startswith("--") and "=" not in before else ""
        return str(masked(argument, name))
    name = key.lstrip("-").rpartition(".")[2]
    try:
        tree = yaml.safe_load(value)
    except yaml.YAMLError:
        tree = value
    if isinstance(tree, Mapping | list):
        clean: Any = masked(tree, name)
        if clean != tree:
            value = yaml.safe_dump(clean, default_flow_style=True, width=10**6).strip()
        return f"{key}={value}"
    return f"{key}={masked(value, name)}"
