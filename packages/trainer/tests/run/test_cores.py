"""The number of threads that a rank computes with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine_trainer.utils.cores import choose_threads, count_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (16, 2, 7), (2, 4, 1)]
)
def test_one_core_is_left_and_the_others_are_shared(cores, ranks, threads):
    assert choose_threads(cores, ranks) == threads


@pytest.fixture
def groups(tmp_path):
    """Make files of control groups, and return the arguments of ``count_cores``."""

    def make(membership: str, files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return tmp_path / "cgroup", tmp_path / "membership"

    return make


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}),
        ("0::/pod/one\n", {"pod/cpu.max": "150000 100000\n", "pod/one/cpu.max": "max 100000\n"}),
        # The group is named as the host sees it, and the container has its own group as the root.
        ("0::/kubepods/one\n", {"cpu.max": "50000 100000\n"}),
        (
            "4:cpu,cpuacct:/one\n2:memory:/one\n0::/\n",
            {
                "cpu,cpuacct/one/cpu.cfs_quota_us": "90000",
                "cpu,cpuacct/one/cpu.cfs_period_us": "90000",
            },
        ),
    ],
    ids=["root", "parent", "container", "version-1"],
)
def test_a_limit_of_processor_time_counts(groups, membership, files):
    assert count_cores(*groups(membership, files)) == 1


@pytest.mark.parametrize(
    "files", [{}, {"cpu.max": "max 100000\n"}, {"cpu.max": f"{10**9} 100000\n"}], ids=str
)
def test_without_a_limit_it_is_the_affinity(groups, files):
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert count_cores(*groups("0::/\n", files)) == cores


PROGRAM = """
from engine_trainer.utils.cores import set_threads
said = set_threads()
import torch
print(torch.get_num_threads(), said, set_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "1 one thread on the CPU in each of 2 ranks, of 1 core (OMP_NUM_THREADS overrides)"),
        ({"OMP_NUM_THREADS": "2"}, "2 2 threads on the CPU in each of 2 ranks, of 1 core "),
    ],
)
def test_torch_has_as_many_as_it_says(given, words):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    one = min(os.sched_getaffinity(0))
    said = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{one}])\n{PROGRAM}"],
        env=environment | {"LOCAL_WORLD_SIZE": "2"} | given,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(words)
    assert said.endswith("None\n"), "for a process that has torch it is too late"
