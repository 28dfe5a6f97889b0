"""Tests of the lanes in which commands run side by side on the GPUs of one host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from gpu_lanes import Job, Lanes, read_jobs

TELL = (
    "import os, sys, time; from pathlib import Path; p = Path(sys.argv[1]);"
    "p.write_text(f'{time.monotonic()} '); {};"
    "p.write_text(p.read_text() + f\"{time.monotonic()} {os.environ['CUDA_VISIBLE_DEVICES']}\")"
)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Job]:
    def make(name: str, does: str = "time.sleep(0.3)", **changes: Any) -> Job:
        program = TELL.replace("{};", f"{does};", 1)
        command = (sys.executable, "-c", program, str(tmp_path / name))
        return Job(**({"name": name, "command": command} | changes))

    return make


def run(tmp_path: Path, *jobs: Job, seconds: float = 300, **environments: dict[str, str]) -> Lanes:
    lanes = Lanes(
        waiting=list(jobs),
        environments=environments,
        output=tmp_path,
        devices=2,
        lanes=2,
        deadline=time.monotonic() + seconds,
    )
    lanes.run()
    return lanes


def told(tmp_path: Path, name: str) -> tuple[float, float, str]:
    begin, end, devices = (tmp_path / name).read_text().split(" ")
    return float(begin), float(end), devices


def test_jobs_that_share_gpus_run_first_and_see_all_of_them(
    tmp_path: Path, made: Callable[..., Job]
) -> None:
    alone = [made("one", gpus=1), made("both", gpus=2), made("other", gpus=1)]
    lanes = run(tmp_path, *alone, made("a"), made("b"), made("c"))
    assert lanes.failed == []
    assert [told(tmp_path, name)[2] for name in "abc"] == ["0,1", "1,0", "0,1"]
    assert told(tmp_path, "c")[0] > min(told(tmp_path, name)[1] for name in "ab")
    shared_end = max(told(tmp_path, name)[1] for name in "abc")
    assert min(told(tmp_path, job.name)[0] for job in alone) > shared_end
    one, both, other = (told(tmp_path, job.name) for job in alone)
    assert {one[2], other[2]} == {"0", "1"}
    assert both[2] == "0,1"
    assert both[0] > max(one[1], other[1])


def test_a_job_ends_at_its_time_and_what_it_had_started_too(
    tmp_path: Path, made: Callable[..., Job]
) -> None:
    lanes = run(tmp_path, made("long", "time.sleep(10**6)", seconds=1), made("wrong", "1 / 0"))
    assert lanes.failed == ["wrong", "long"]
    lines = [json.loads(line) for line in (tmp_path / "done.jsonl").read_text().splitlines()]
    assert {line["name"]: line["status"] for line in lines} == {"wrong": "1", "long": "stopped"}
    assert "ZeroDivisionError" in (tmp_path / "wrong.log").read_text()


def test_a_job_does_not_start_with_less_time_than_it_wants(
    tmp_path: Path, made: Callable[..., Job]
) -> None:
    lanes = run(tmp_path, made("late", least=301), made("short"))
    assert lanes.failed == ["late"]
    assert not (tmp_path / "late").exists()


def test_a_job_has_its_environment_and_its_limit(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import os; print(*map(os.environ.get, 'ABC'), {limit})")
    own = {"C": "4"}
    job = Job(name="told", command=command, environment="mine", variables=own, seconds=100)
    environments = {"": {"A": "1", "B": "2"}, "mine": {"B": "3", "C": "5"}}
    assert run(tmp_path, job, **environments).failed == []
    assert (tmp_path / "told.log").read_text() == "1 3 4 90\n"


@pytest.mark.parametrize(
    ("jobs", "told"),
    [
        ([{"name": "a", "command": [], "gpu": 1}], r"a: expected \[.*\], got \['gpu'\]"),
        ([{"name": "a", "command": []}] * 2, r"got \['a'\] twice"),
    ],
)
def test_a_wrong_list_of_jobs_is_refused(
    tmp_path: Path, jobs: list[dict[str, Any]], told: str
) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    with pytest.raises(ValueError, match=told):
        read_jobs(path)


def test_every_job_that_is_written_can_be_read_and_has_an_environment(tmp_path: Path) -> None:
    tools = Path(__file__).resolve().parent.parent / "tools"
    jobs = tmp_path / "jobs.json"
    subprocess.run(
        [
            *(sys.executable, str(tools / "gpu_jobs.py"), str(jobs), "--reports", str(tmp_path)),
            *("--commit", "0" * 40, "--certify", "megatron", "--parts", "2", "--renew", "fsdp2"),
            *("--tests", "fsdp2-gpu", "--steps", "mfu-8b-2-fsdp2,sync-8b-fp8,sync-engines-8b-fp8"),
        ],
        check=True,
    )
    written = {job.name: job for job in read_jobs(jobs)}
    assert {name: job.environment for name, job in written.items()} == {
        "fsdp2.float32": "fsdp2",
        "fsdp2.bfloat16": "fsdp2",
        **{
            f"megatron.{dtype}.{number:02d}": "megatron"
            for dtype in ("float32", "bfloat16")
            for number in (1, 2)
        },
        "fsdp2-gpu": "fsdp2",
        "mfu-8b-2-fsdp2": "fsdp2",
        "sync-8b-fp8": "vllm",
        "sync-engines-8b-fp8": "all",
    }
    assert (tmp_path / "fsdp2.float32" / "report.json").is_file()
    # What measures has its GPUs to itself, and reads what it is asked as its own program does.
    for name, gpus in (("mfu-8b-2-fsdp2", 2), ("sync-8b-fp8", 1)):
        assert written[name].gpus == gpus
        subprocess.run([*written[name].command, "--list"], check=True, cwd=tools.parent)
