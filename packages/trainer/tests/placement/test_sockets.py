"""Sockets of real runs, as the kernel lists them.

Nothing in a run listens beyond this machine unless the configuration requests it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_runs import ON_RAY, start, tree
from sockets import Listening, listening

from engine_trainer.config.sections import RolloutSection
from engine_trainer.placement.loopback import loopback_variables, stay

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
REWARD = """
import pathlib, time

def score(sample):
    pathlib.Path({marks!r}).touch()
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    return float(len(sample.completion))
"""
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path, sums_model) -> Iterator[Begin]:
    """Starts a run that waits in its first reward, when all that it needs is there."""
    marks, go = tmp_path / "marks", tmp_path / "go"
    (tmp_path / "waits.py").write_text(REWARD.format(marks=str(marks), go=str(go)))
    made: list[subprocess.Popen[str]] = []

    def run(task: str, ranks: int = 1, **sections) -> subprocess.Popen[str]:
        reward = {
            "name": None,
            "function": f"{tmp_path}/waits.py:score",
            "timeout_s": None,
            "workers": 1,
        }
        config = tree(sums_model, tmp_path / "out", reward=reward, run={"steps": 1}, **sections)
        if task == "sft":
            del config["algorithm"]
            config |= {
                "batch_size": 8,
                "eval": {"source": str(sums_model / "test.jsonl"), "max_problems": 4},
            }
            config["data"]["columns"] = {"response": "answer"}
        else:
            del config["algorithm"]["correction"]
        made.append(start(config, tmp_path / "config.yaml", ranks=ranks, task=task))
        end = time.monotonic() + 240
        while not marks.exists():
            assert made[-1].poll() is None, made[-1].stdout.read()
            assert time.monotonic() < end, "it never judged"
            time.sleep(0.1)
        return made[-1]

    yield run
    go.touch()
    for process in made:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def beyond(found: set[Listening]) -> set[Listening]:
    return {one for one in found if not one.is_local}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "rl"])
def test_a_run_in_one_process_listens_on_loopback_alone(begin, task) -> None:
    found = listening(begin(task).pid)
    assert found, "gloo has a socket also where it has no peer"
    assert beyond(found) == set()


@pytest.mark.slow
def test_of_a_run_under_torchrun_its_launcher_alone_listens_beyond(begin) -> None:
    """torch gives no way to confine the stores of torchrun: docs/security.md."""
    found = listening(begin("rl", ranks=2).pid)
    ranks = {one for one in found if "torch.distributed.run" not in one.process}
    assert ranks
    assert beyond(ranks) == set()
    assert beyond(found), "torch can confine it now: so should the run, and the page be changed"


@pytest.mark.parametrize("rollouts", [None, 1])
@pytest.mark.nightly
def test_a_run_on_a_ray_cluster_of_its_own_listens_on_loopback_alone(begin, rollouts) -> None:
    pytest.importorskip("ray")
    section = {**ON_RAY, "imports": [], "engines": 2, "rollouts": rollouts, "cpus_per_worker": 0.25}
    process = begin("rl", launcher="ray", ray=section)
    found = listening(process.pid)
    assert {"gcs_server", "raylet"} <= {Path(one.process.split()[0]).name for one in found}
    assert beyond(found) == set()
    assert join(found, {"RAY_AUTH_MODE": "token"}) == "joined", (
        "so does who has the token of this user"
    )
    assert join(found, {"RAY_AUTH_MODE": "disabled", "HOME": "/nonexistent"}) == "refused"


# Another process on this machine; Ray keeps the token in a user's home directory.
STRANGER = """
import os, sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="FATAL", log_to_driver=False)
except BaseException:
    print("refused", flush=True)
else:
    print("joined", flush=True)
os._exit(0)
"""


def join(found: set[Listening], settings: dict[str, str]) -> str:
    (head,) = [one for one in found if Path(one.process.split()[0]).name == "gcs_server"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **settings}
    command = [sys.executable, "-c", STRANGER, f"127.0.0.1:{head.port}"]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    return (said.stdout.split() or ["nothing"])[-1]


@pytest.mark.parametrize("setting", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}])
def test_rays_token_is_made_for_this_user_alone(tmp_path, monkeypatch, setting, caplog) -> None:
    cluster = pytest.importorskip("engine_trainer.placement.ray.cluster", exc_type=ImportError)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    cluster._keep_token_private()
    file = tmp_path / ".ray" / "auth_token"
    if setting:
        assert not file.exists()
        return
    assert file.stat().st_mode & 0o777 == 0o600
    made = file.read_text()
    assert len(made) == 64
    file.chmod(0o644)
    cluster._keep_token_private()
    assert file.read_text() == made
    assert f"others may read {file}" in caplog.text


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_gloo_and_nccl_are_confined_where_all_of_a_run_is_here_and_nobody_has_said_otherwise(
    monkeypatch,
) -> None:
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    stay({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    stay({"WORLD_SIZE": "4"})
    assert not set(INTERFACES) & set(os.environ)
    stay({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    known = {name for _, name in socket.if_nameindex()}
    assert {name: os.environ[name].lstrip("=") in known for name in INTERFACES} == dict.fromkeys(
        INTERFACES, True
    )
    assert {name: os.environ[name] for name in INTERFACES} == loopback_variables()
    for name in INTERFACES:
        monkeypatch.setenv(name, "eth7")
    stay({})
    assert {os.environ[name] for name in INTERFACES} == {"eth7"}


@pytest.mark.parametrize(
    ("url", "here"),
    [
        (None, True),
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.7:8000", False),
        ("http://gpu7:8000", False),
        ("gpu7", False),
        ("http://[", False),
        (7, False),
    ],
)
def test_a_run_whose_rollout_is_on_another_host_is_not_confined(monkeypatch, url, here) -> None:
    """Weights go to it by gloo or NCCL, from this process."""
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    rollout = RolloutSection(name="vllm-server", options={} if url is None else {"url": url})
    stay({}, rollout)
    assert {name in os.environ for name in INTERFACES} == {here}


def test_a_store_listens_on_the_address_that_it_was_asked_for_alone() -> None:
    from engine_api.stores import reach_store, serve_store

    before = listening(os.getpid())
    store = serve_store("127.0.0.1", 2, 30.0)
    (made,) = listening(os.getpid()) - before
    assert (made.address, made.port) == ("127.0.0.1", store.port)
    other = reach_store("127.0.0.1", store.port, 2, 30.0)
    other.set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(OSError, match=r"assign|address"):
        serve_store("192.0.2.77", 2, 1.0)
