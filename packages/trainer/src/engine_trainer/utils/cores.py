"""The cores of this machine, and the number of threads that a rank computes with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# torch's OpenMP reads it once, when it is loaded.
VARIABLE = "OMP_NUM_THREADS"
_CGROUPS = Path("/sys/fs/cgroup")


def count_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use.

    These are the cores of its affinity, and no more than a container's limit of processor time
    pays for, which ``os.cpu_count`` does not know.

    Args:
        cgroups: where Linux shows the limits of control groups, of version 1 or 2.
        membership: the file that names the groups of this process.
    """
    may_run_on = getattr(os, "sched_getaffinity", None)
    cores = len(may_run_on(0)) if may_run_on else os.cpu_count() or 1
    limits = [cores, *_limits(cgroups, membership)]
    return max(1, int(min(limits)))


def _limits(cgroups: Path, membership: Path) -> list[float]:
    """Return the limits, in cores, of this process's control group and of all groups above it."""
    found: list[float] = []
    if not membership.is_file():
        return found  # not Linux
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has no name of a controller. A container may see its group as the root.
        root = cgroups / controllers if controllers else cgroups
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            found += _limit(group)
            if group == root:
                break
    return found


def _limit(group: Path) -> list[float]:
    """Return the limit of one control group as a list of one, or an empty list without one."""
    if (group / "cpu.max").is_file():
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").is_file():
        quota = (group / "cpu.cfs_quota_us").read_text().strip()
        period = (group / "cpu.cfs_period_us").read_text().strip()
    else:
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def choose_threads(cores: int, ranks: int) -> int:
    """Return how many threads each of ``ranks`` ranks of a machine computes with.

    One core is left for all else that runs. OpenMP's threads wait for each other by computing:
    where one of them has no core, the others lose their time slices, and a step of a small model
    takes up to 57 times as long (docs/benchmarks.md).
    """
    return max(1, (cores - 1) // ranks)


def set_threads() -> str | None:
    """Set ``OMP_NUM_THREADS`` for this rank, unless it is set, and return a line that says so.

    Returns None where torch is loaded already, for which it is too late.
    """
    if "torch" in sys.modules:
        return None
    cores, ranks = count_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_given = VARIABLE in os.environ
    threads = os.environ.setdefault(VARIABLE, str(choose_threads(cores, ranks)))
    many = "one thread" if threads == "1" else f"{threads} threads"
    each = f" in each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{many} on the CPU{each}, of {cores} core{'s' if cores > 1 else ''}"
        f" ({VARIABLE} {'is set' if is_given else 'overrides'})"
    )
