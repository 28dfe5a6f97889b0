"""Tests of the lanes in which commands run side by side on the GPUs of one host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import gpu_lanes
from gpu_jobs import TESTS
from gpu_lanes import Job, Lanes, Running, check_environments, read_jobs

kill = Running.kill

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


def run(
    tmp_path: Path,
    *jobs: Job,
    seconds: float = 300,
    devices: Sequence[str] = ("0", "1"),
    **environments: dict[str, str],
) -> Lanes:
    lanes = Lanes(
        waiting=list(jobs),
        environments=environments,
        output=tmp_path,
        devices=devices,
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


def test_lanes_have_the_gpus_that_this_process_may_use(
    tmp_path: Path, made: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lanes.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1")
    devices = gpu_lanes.find_devices()
    assert devices == ["3", "GPU-1"]
    run(tmp_path, made("shares"), made("alone", gpus=1), made("both", gpus=2), devices=devices)
    seen = [told(tmp_path, name)[2] for name in ("shares", "alone", "both")]
    assert seen == ["3,GPU-1", "3", "3,GPU-1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_lanes.find_devices() == ["0", "1"]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("apart", [False, True], ids=["its group", "a group of its own"])
def test_a_job_ends_at_its_time_and_what_it_had_started_too(
    tmp_path: Path, made: Callable[..., Job], apart: bool
) -> None:
    ignores = (
        "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(10**6)"
    )
    child = tmp_path / "child"
    command = [sys.executable, "-c", ignores, str(child)]
    starts = f"import subprocess; subprocess.Popen({command}, start_new_session={apart}).wait()"
    long = made("long", starts, seconds=3)
    lanes = run(tmp_path, long, made("wrong", "1 / 0"))
    assert lanes.failed == ["wrong", "long"]
    pid = int(child.read_text())
    while not is_gone(pid):
        time.sleep(0.01)
    lines = [json.loads(line) for line in (tmp_path / "done.jsonl").read_text().splitlines()]
    assert {line["name"]: line["status"] for line in lines} == {"wrong": "1", "long": "stopped"}
    assert "ZeroDivisionError" in (tmp_path / "wrong.log").read_text()


def test_a_job_does_not_start_with_less_time_than_it_wants(
    tmp_path: Path, made: Callable[..., Job]
) -> None:
    lanes = run(tmp_path, made("late", least=301), made("short"))
    assert lanes.failed == ["late"]
    assert not (tmp_path / "late").exists()


def test_a_job_that_wants_more_gpus_than_there_are_is_not_waited_for(
    tmp_path: Path, made: Callable[..., Job]
) -> None:
    lanes = run(tmp_path, made("large", gpus=3), made("small", gpus=1), seconds=10**6)
    assert lanes.failed == ["large"]
    assert told(tmp_path, "small")


def test_an_error_in_between_ends_the_jobs(
    tmp_path: Path, made: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Job(name="absent", command=(str(tmp_path / "no such program"),))
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        "gpu_lanes.Running.kill", lambda one: started.append(one.process) or kill(one)
    )
    with pytest.raises(FileNotFoundError):
        run(tmp_path, made("long", "time.sleep(10**6)"), absent)
    [process] = started
    assert process.wait() < 0


def test_a_job_without_its_environment_is_refused_before_any_starts() -> None:
    job = Job(name="one", command=(), environment="megatron")
    check_environments([job], {"megatron"})
    with pytest.raises(ValueError, match=r"job one: .*\(fsdp2\), got 'megatron'"):
        check_environments([job], {"", "fsdp2"})


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


def test_the_tests_of_every_job_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    for name, (_, arguments, _) in TESTS.items():
        paths = [one for one in arguments if "/" in one]
        assert paths, name
        assert not [one for one in paths if not (root / one.partition("::")[0]).exists()], name


@pytest.mark.slow
def test_every_job_that_is_written_can_be_read_and_has_an_environment(tmp_path: Path) -> None:
    tools = Path(__file__).resolve().parent.parent / "tools"
    jobs = tmp_path / "jobs.json"
    subprocess.run(
        [
            *(sys.executable, str(tools / "gpu_jobs.py"), str(jobs), "--reports", str(tmp_path)),
            *("--commit", "0" * 40, "--certify", "megatron,vllm", "--parts", "2"),
            *("--worlds", "1", "--renew", "fsdp2"),
            *("--tests", "megatron-families"),
            *("--steps", "mfu-8b-2-fsdp2,sync-8b-fp8,sync-engines-8b-fp8,sglang-smoke,mechanisms"),
        ],
        check=True,
    )
    written = {job.name: job for job in read_jobs(jobs)}
    assert {name: job.environment for name, job in written.items()} == {
        "fsdp2.float32": "fsdp2",
        "fsdp2.bfloat16": "fsdp2",
        **{
            f"{name}.{dtype}.{number:02d}": name
            for name in ("megatron", "vllm")
            for dtype in ("float32", "bfloat16")
            for number in (1, 2)
        },
        "megatron-families": "megatron",
        "mfu-8b-2-fsdp2": "fsdp2",
        "sync-8b-fp8": "vllm",
        "sync-engines-8b-fp8": "all",
        "sglang-smoke": "sglang",
        "mechanisms-attention": "mixers",
        "mechanisms-state": "mixers",
    }
    assert written["megatron-families"].variables == {"ENGINE_TEST_DEVICE": "cuda"}
    assert (tmp_path / "fsdp2.float32" / "report.json").is_file()
    for name in ("megatron", "fsdp2"):
        given = next(job.command for job in written.values() if job.environment == name)
        assert given[given.index("--world") + 1] == "1"
    assert "gpu_memory_utilization=0.05" in written["vllm.float32.01"].command
    # What measures has its GPUs to itself, and reads what it is asked as its own program does.
    for name, gpus in (("mfu-8b-2-fsdp2", 2), ("sync-8b-fp8", 1)):
        assert written[name].gpus == gpus
        subprocess.run([*written[name].command, "--list"], check=True, cwd=tools.parent)
