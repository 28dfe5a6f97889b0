"""Watch on the processes of an engine that lives in other processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from engine_api.errors import RolloutError
from rollout_fp8.vllm.processes import Processes

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="this Python was built without handles of processes"
)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) for _ in range(2)
    ]
    yield started
    for child in started:
        child.kill()
        child.wait()


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_end_of_one_ends_all(children: list[subprocess.Popen[bytes]]) -> None:
    before, ended = handles(), queue.SimpleQueue[str]()
    watch = Processes([child.pid for child in children], ended.put)
    children[0].kill()
    assert f"process {children[0].pid} has ended" in ended.get(timeout=DEADLINE_S)
    assert children[1].wait(timeout=DEADLINE_S) == -signal.SIGKILL
    watch.close()
    assert handles() == before


@pytest.mark.parametrize("lacks", ["open", "signals", "permission"])
def test_where_there_are_no_handles_they_are_unwatched_and_this_is_told(
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacks: str,
) -> None:
    """Check the warning where handles are missing, as in conda's Python and some containers."""
    before, numbers, pidfd_open = handles(), [child.pid for child in children], os.pidfd_open

    def refuse(number: int) -> int:
        if number == numbers[1]:
            raise PermissionError("not here")
        return pidfd_open(number)

    if lacks == "open":
        monkeypatch.delattr(os, "pidfd_open")
    elif lacks == "signals":
        monkeypatch.delattr(signal, "pidfd_send_signal")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    watch = Processes(numbers, lambda _: None)
    assert "noticed late" in caplog.text
    assert ("not here" if lacks == "permission" else "pidfd") in caplog.text
    assert watch.call(lambda: 3) == 3
    with pytest.raises(RolloutError, match="a call of vLLM failed"):
        watch.call(lambda: 1 // 0)
    assert [child.poll() for child in children] == [None, None]
    watch.close()
    assert handles() == before


def test_one_that_is_gone_before_is_told(children: list[subprocess.Popen[bytes]]) -> None:
    children[1].kill()
    children[1].wait()
    before = handles()
    with pytest.raises(RolloutError, match=f"process {children[1].pid} has ended"):
        Processes([child.pid for child in children], lambda _: None)
    assert handles() == before
