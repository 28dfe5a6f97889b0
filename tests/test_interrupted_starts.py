"""A start that is interrupted, at any line, leaves no process, no thread and no signal handler."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang_fakes
from interrupts import interrupted_at, places_of
from sglang_fakes import Engine
from waiting import NEVER_S, children, runs, until

from engine_api.config import ModelSource
from engine_conformance import rank_templates, ranks
from engine_conformance.ranks import RankPool, close_pools
from engine_trainer.rewards import worker_pool as workers
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import Sample
from rollout_fp8.remote import client, endpoint
from rollout_fp8.remote.client import RemoteRollout
from rollout_fp8.sglang import host, rollout

# pytest finds these fixtures by their names in this module.
engine, folder, make = sglang_fakes.engine, sglang_fakes.folder, sglang_fakes.make
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    # A folder whose owner is interrupted while it starts is removed when the owner is collected.
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
    # A connection that only this process has seen is closed when it is collected.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    # A process that was lost within the statement that starts it ends when its pipe is collected.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]


# These servers and ranks are ready as soon as they run: the tests are about the code that starts
# them, and start them dozens of times.
SERVER = """#!{python} -S
import http.server, json, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"arguments": {{}}, "weight_version": 0}}).encode())

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Health)
announce = sys.argv[sys.argv.index("--announce") + 1]
with open(announce + ".partial", "w") as file:
    json.dump({{"url": f"http://127.0.0.1:{{server.server_port}}"}}, file)
import os
os.rename(announce + ".partial", announce)
server.serve_forever()
"""
TEMPLATE = """
from multiprocessing.connection import Connection
from engine_conformance._rank_template import serve
from engine_conformance._rank_worker import RankReply

def run(descriptor):
    pipe = Connection(descriptor)
    try:
        pipe.recv_bytes()
        pipe.send(RankReply(kind="returned"))
        pipe.recv_bytes()
    except EOFError:
        pass

serve({}, run)
"""
REWARDS = """#!{python} -S
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
try:
    for answers in ([{first!r}], [{outcome!r}, {end!r}]):
        pipe.recv_bytes()
        for answer in answers:
            pipe.send_bytes(answer)
    pipe.recv_bytes()
except EOFError:
    pass
"""


def program(path: Path, text: str) -> SimpleNamespace:
    """Write a program and return a replacement of ``sys`` that runs it instead of Python."""
    path.write_text(text)
    path.chmod(0o700)
    return SimpleNamespace(executable=str(path), path=[])


# CI tries each third place, which takes a minute of computation less; the nights try all.
EVERY = pytest.mark.parametrize(
    "every", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.nightly)]
)


def check(
    start: Callable[[], Callable[[], None]],
    *modules: ModuleType,
    every: int,
    pids: Callable[[], set[int]] = children,
) -> None:
    """Interrupt ``start`` at its places, each or ``every`` so many.

    ``start`` returns the function that ends everything it has started, and ``pids`` returns the
    running processes.
    """
    signals = (signal.SIGQUIT, signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in signals]
    before, threads = pids(), set(threading.enumerate())

    def whole() -> None:
        ends.append(start())

    ends: list[Callable[[], None]] = []
    places = places_of(whole, *modules)
    assert len(places) > 10
    ends.pop()()
    for place in places[::every]:
        if not interrupted_at(place, whole, *modules):
            # Some places are not passed each time, such as those in a loop that waits.
            ends.pop()()
        gc.collect()
        until(
            lambda: pids() <= before, missing=lambda place=place: f"{place}: left {pids() - before}"
        )
        until(
            lambda: (
                not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
            ),
            missing=f"{place}: a thread is left",
        )
        assert [signal.getsignal(number) for number in signals] == handlers, (
            f"{place}: a signal handler is left"
        )


@EVERY
def test_of_sglang(make: Any, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    context = multiprocessing.get_context("forkserver")
    plain, started = Engine.__init__, list[Any]()

    def begin(self: Engine, **given: Any) -> None:
        self.process = context.Process(target=time.sleep, args=(NEVER_S,))
        started.append(self.process)
        self.process.start()
        plain(self, **given)

    def end(self: Engine) -> None:
        self.process.kill()
        self.process.join()

    monkeypatch.setattr(Engine, "__init__", begin)
    monkeypatch.setattr(Engine, "shutdown", end)
    check(
        lambda: make().close,
        host,
        rollout,
        every=every,
        pids=lambda: {p.pid for p in started if p.pid and runs(p.pid)},
    )


@EVERY
def test_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    monkeypatch.setattr(
        endpoint, "sys", program(tmp_path / "server.py", SERVER.format(python=sys.executable))
    )
    given = {"model": ModelSource(path=str(tmp_path)), "pad_token_id": 0}
    check(
        lambda: RemoteRollout(name="local", device="cpu", arguments=given).close,
        client,
        endpoint,
        every=every,
    )


@EVERY
def test_of_a_pool_of_ranks(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    monkeypatch.setattr(rank_templates, "_COMMAND", TEMPLATE)
    # Of other tests in this process.
    others = children()

    def start() -> Callable[[], None]:
        pool = RankPool(2)
        pool.start()
        return pool.close

    def pids() -> set[int]:
        """Return the ranks, and the templates that no later start would use."""
        started = children()
        kept = {template.process.pid for template in ranks._templates._running.values()}
        return (started - kept).union(*(children(pid) for pid in started))

    try:
        check(start, ranks, rank_templates, every=every, pids=pids)
    finally:
        close_pools()
    until(lambda: children() <= others, missing="a template is left")


@EVERY
def test_of_reward_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    answers = {
        "first": pickle.dumps([False]),  # no coroutine function
        "outcome": pickle.dumps((0, 1.0, "", None)),
        "end": pickle.dumps(None),
    }
    made_of = REWARDS.format(python=sys.executable, **answers)
    monkeypatch.setattr(workers, "sys", program(tmp_path / "rewards.py", made_of))
    sample = Sample(prompt="", completion="4", answer="4")

    def start() -> Callable[[], None]:
        made = workers.Workers([RewardSpec(name="exact")], count=1, concurrency=1)
        try:
            assert len(list(made.run(0, [sample]))) == 1
        except KeyboardInterrupt:
            # The owner closes it as well in this case, and close() finds everything that had begun.
            made.close()
            raise
        return made.close

    check(start, workers, every=every)
