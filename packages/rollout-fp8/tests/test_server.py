"""Rollout in another process: equal answers to one in this process, and errors in time."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from background import Background
from local_model import CONFIG, PROMPTS, SAMPLING, weights
from safetensors.torch import load_file
from tiny_models import tiny_pictured_model
from tiny_rollouts import draw_prompts
from waiting import DEADLINE_S, NEVER_S, runs, until

from engine_api.config import ModelSource
from engine_api.errors import (
    ConfigError,
    EngineError,
    PluginNotFound,
    RolloutError,
    UnsupportedCapability,
)
from engine_api.hf_vision import read_vision
from engine_api.registry import RolloutRegistry
from engine_api.rollout import AsyncRollout, Rollout, SamplingParams, VisionRollout
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.remote import client, endpoint
from rollout_fp8.remote import server as server_module
from rollout_fp8.remote.client import RemoteRollout
from rollout_fp8.remote.messages import images_to_json
from rollout_fp8.remote.server import MAX_UNPROVEN, Server, Service
from rollout_fp8.transports.channel import secret
from rollout_fp8.transports.sender import Sender

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Return a folder for the logs of servers that fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("logs")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return {
        "model": ModelSource(path=str(folder)),
        "pad_token_id": 0,
        "eos_token_ids": (1,),
        "batch_size": 4,
        "dtype": "float32",
    }


@pytest.fixture(scope="module")
def started(arguments):
    made = RemoteRollout(
        name="local",
        device="cpu",
        arguments=arguments,
        silence_s=NEVER_S,
        timeout_s=NEVER_S,
        start_timeout_s=DEADLINE_S,
    )
    yield made
    made.close()


@pytest.fixture
def rollout(started):
    """Return a rollout whose versions count from the start in each test, as in a run."""
    started._sent = -1
    return started


@pytest.fixture
def own(arguments):
    """Return a server that a test may break."""
    made = RemoteRollout(
        name="local",
        device="cpu",
        arguments=arguments,
        silence_s=NEVER_S,
        timeout_s=NEVER_S,
        start_timeout_s=DEADLINE_S,
    )
    made.update_weights(iter(weights(0).items()), 0)
    yield made
    made.close()


@pytest.mark.slow
def test_it_generates_what_the_same_rollout_generates_in_this_process(rollout, arguments) -> None:
    assert isinstance(rollout, Rollout)
    here = RolloutRegistry.create(name="local", device="cpu", **arguments)
    for version in (4, 5):
        result = rollout.update_weights(iter(weights(version).items()), version)
        want = here.update_weights(iter(weights(version).items()), version)
        assert (result.version, result.num_tensors, result.num_bytes) == (
            version,
            want.num_tensors,
            want.num_bytes,
        )
        assert rollout.weight_version == version
        assert rollout.generate(PROMPTS, SAMPLING) == here.generate(PROMPTS, SAMPLING)


@pytest.mark.slow
def test_images_reach_the_rollout_in_the_server(tmp_path) -> None:
    """Its completions behind them are those of the same rollout in this process."""
    model = tiny_pictured_model("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    vision = read_vision(model.config, "test")
    assert vision is not None
    prompts, images = draw_prompts(vision)
    given = {"model": ModelSource(path=str(tmp_path)), "pad_token_id": 0, "batch_size": 8}
    found = []
    with ExitStack() as stack:
        here = RolloutRegistry.create(name="local", device="cpu", **given)
        stack.callback(here.close)
        there = RemoteRollout(
            name="local", device="cpu", arguments=given, silence_s=NEVER_S, timeout_s=NEVER_S
        )
        stack.callback(there.close)
        for one in (here, there):
            assert isinstance(one, VisionRollout)
            one.update_weights(iter(load_file(tmp_path / "model.safetensors").items()), 1)
            found.append(one.generate(prompts, SAMPLING, images=images))
    assert found[0] == found[1]


def test_a_server_whose_rollout_takes_no_images_refuses_them() -> None:
    class Texts:
        weight_version = 1

        def generate(self, prompts: Any, sampling: Any) -> list[Any]:
            del prompts, sampling
            return []

    service = Service(cast("Rollout", Texts()), "cpu", name="texts", arguments={})
    asked = {"prompts": [[5]], "sampling": {}}
    assert service.generate(**asked) == {"completions": []}
    with pytest.raises(UnsupportedCapability, match="server of Texts") as caught:
        service.generate(**asked, images=images_to_json([None]))
    assert caught.value.capability == "vision"


def test_an_exporters_stream_and_one_over_a_collective(rollout, arguments, monkeypatch) -> None:
    here = RolloutRegistry.create(name="local", device="cpu", **arguments)
    stream = collect_export(
        iter(weights(8).items()),
        device=torch.device("cpu"),
        dtype=torch.float32,
        architecture=None,
        scales="fp32",
        audit=True,
    )
    here.update_weights(iter(weights(8).items()), 8)
    rollout.update_weights(stream, 8)
    assert rollout.generate(PROMPTS, SAMPLING) == here.generate(PROMPTS, SAMPLING)
    monkeypatch.setattr(client, "LOCAL", ())  # as if it were on another host
    far = RemoteRollout(name="local", device="cpu", arguments=arguments, url=rollout._server.url)
    for version in (9, 10):
        here.update_weights(iter(weights(version).items()), version)
        far.update_weights(iter(weights(version).items()), version)
        assert far.generate(PROMPTS, SAMPLING) == here.generate(PROMPTS, SAMPLING)
    assert far._sender.address.startswith("tcp:127.0.0.1:")
    far.close()


@pytest.fixture
def background():
    hosted = Background()
    with Server(
        ("127.0.0.1", 0), Service(hosted, "cpu", name="background", arguments={})
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        made = RemoteRollout(name="background", device="cpu", arguments={}, url=server.url)
        yield hosted, made
        made.close()
        server.shutdown()
        thread.join()


def test_generation_in_the_background(background, monkeypatch) -> None:
    hosted, made = background
    monkeypatch.setattr(client, "WAIT_S", 0.1)
    assert isinstance(made, AsyncRollout)
    running = made.submit((4, 5), SamplingParams(stop_token_ids=(9,)))
    assert hosted.prompt == [4, 5]
    assert hosted.sampling == SamplingParams(stop_token_ids=(9,))
    assert not running.done()
    with pytest.raises(TimeoutError):
        running.result(0.3)
    threading.Timer(0.3, hosted.go.set).start()
    (completion,) = running.result()
    assert (completion.tokens, completion.finish_reason) == ([7], "stop")
    assert running.done()
    assert running.result() == [completion]
    running.abort()
    assert not hosted.aborted.is_set()  # it was over


def test_aborting_in_the_background(background) -> None:
    hosted, made = background
    running = made.submit([4], SAMPLING)
    running.abort()
    assert hosted.aborted.is_set()
    assert running.result(DEADLINE_S)[0].finish_reason == "abort"


def test_a_bug_in_the_hosted_rollout_is_an_error_with_its_text(background) -> None:
    with pytest.raises(RolloutError, match="KeyError: 'a bug'"):
        background[1].generate([[1]], SAMPLING)


def test_errors_come_as_what_they_were_and_the_server_goes_on(rollout) -> None:
    rollout.update_weights(iter(weights(0).items()), 1)
    with pytest.raises(RolloutError, match="prompt 1 is empty") as caught:
        rollout.generate([[3], []], SAMPLING)
    assert caught.value.where == "rollout 'local'"
    assert caught.value.remedy == "give it at least one token"
    with pytest.raises(RolloutError, match="cannot generate in the background"):
        rollout.submit([3], SAMPLING)
    assert len(rollout.generate([[3]], SAMPLING)) == 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight: missing"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(5)}),
            r"model.norm.weight: expected shape \[32\], got \[5\]",
        ),
        (lambda w: w["model.norm.weight"].fill_(float("nan")), "not finite: model.norm.weight"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}),
            "model.norm.weight",
        ),
    ],
    ids=["missing", "shape", "nan", "integers"],
)
def test_a_sync_that_fails_says_why_and_nothing_is_generated_until_a_good_one(
    rollout, spoil, said
) -> None:
    bad = {name: tensor.clone() for name, tensor in weights(0).items()}
    spoil(bad)
    with pytest.raises(RolloutError, match=said):
        rollout.update_weights(iter(bad.items()), 2)
    with pytest.raises(RolloutError, match="the last weight sync failed"):
        rollout.generate([[3]], SAMPLING)
    assert rollout.update_weights(iter(weights(0).items()), 3).version == 3
    assert len(rollout.generate([[3]], SAMPLING)) == 2


def test_asleep_it_refuses_weights_at_once(rollout) -> None:
    rollout.sleep()
    with pytest.raises(RolloutError, match="it sleeps"):
        rollout.update_weights(iter(weights(0).items()), 2)
    rollout.wake_up()
    with pytest.raises(RolloutError, match="cannot generate"):
        rollout.generate([[3]], SAMPLING)
    rollout.update_weights(iter(weights(0).items()), 3)


def test_two_clients_take_turns(rollout, arguments) -> None:
    rollout.update_weights(iter(weights(0).items()), 6)
    other = RemoteRollout(name="local", device="cpu", arguments=arguments, url=rollout._server.url)
    assert other.weight_version == 6
    want, found = rollout.generate(PROMPTS, SAMPLING), {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update(
                {i: (rollout, other)[i % 2].generate(PROMPTS, SAMPLING)}
            )
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == [want] * 4
    with pytest.raises(RolloutError, match="version 5 is stale"):
        rollout.update_weights(iter(weights(1).items()), 5)
    other.update_weights(iter(weights(1).items()), 3)  # of another run
    rollout.update_weights(iter(weights(0).items()), 6)
    assert rollout.generate(PROMPTS, SAMPLING) == want
    other.update_weights(iter(weights(1).items()), 7)
    assert rollout.generate(PROMPTS, SAMPLING) != want
    other.close()
    # A client that did not start the server does not end it.
    assert rollout._server.health()["weight_version"] == 7


def test_an_answer_that_comes_while_the_weights_are_sent_is_that_of_the_sync(
    rollout, monkeypatch
) -> None:
    """A server may have all of them, and answer, before the sender has seen it."""
    ended = threading.Event()
    response = endpoint.Pending.response
    send_weights = Sender.send_weights

    def note(self: endpoint.Pending) -> dict[str, Any]:
        found = response(self)
        ended.set()
        return found

    def send_and_watch(self: Sender, stream: Any, watch: Callable[[], None]) -> Any:
        delivery = send_weights(self, stream, watch)
        until(lambda: ended.is_set() or watch())
        return delivery

    monkeypatch.setattr(endpoint.Pending, "response", note)
    monkeypatch.setattr(Sender, "send_weights", send_and_watch)
    assert rollout.update_weights(iter(weights(3).items()), 3).version == 3


def test_an_error_of_a_server_is_raised_each_time_that_its_answer_is_read(rollout) -> None:
    with rollout._server.start("update_weights", version="no number") as pending:
        with pytest.raises(EngineError) as first:
            pending.response()
        assert pending.has_response(0)
        with pytest.raises(EngineError) as again:
            pending.response()
    assert again.value is first.value


@pytest.mark.slow
def test_a_server_that_was_killed_is_an_error_with_its_log_and_leaves_nothing(own) -> None:
    pid = own._process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"the server does not respond[^$]*its log is"):
        own.generate(PROMPTS, SAMPLING)
    with pytest.raises(RolloutError, match="the server does not respond"):
        own.update_weights(iter(weights(1).items()), 1)
    own.close()
    own.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["generate", "update_weights"])
def test_a_server_that_hangs_is_an_error_in_time_and_ends(own, call, monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "GRACE_S", 0.5)
    pid = own._process.pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(own._server, "silence_s", 2)
    calls = {
        "generate": lambda: own.generate(PROMPTS, SAMPLING),
        "update_weights": lambda: own.update_weights(iter(weights(1).items()), 1),
    }
    with pytest.raises(RolloutError, match="the server hangs"):
        calls[call]()
    own.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_closing_ends_the_server_and_what_it_started_and_its_log(own, monkeypatch) -> None:
    # A server that is killed, as on a busy machine after the usual time, leaves its log.
    monkeypatch.setattr(endpoint, "GRACE_S", DEADLINE_S)
    pid, log = own._process.pid, own._process.log
    assert runs(pid)
    assert log.exists()
    own.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not log.exists()
    for call in (
        lambda: own.generate(PROMPTS, SAMPLING),
        lambda: own.update_weights(iter(weights(1).items()), 1),
        own.sleep,
    ):
        with pytest.raises(RolloutError, match="the rollout is closed"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "kill", "hang"])
def test_a_client_that_ends_without_closing_leaves_no_server(arguments, how) -> None:
    own = {key: value for key, value in arguments.items() if key != "model"}
    code = f"""
import os, signal
from engine_api.config import ModelSource
from rollout_fp8.remote.client import RemoteRollout
model = ModelSource(path={arguments["model"].path!r})
arguments = {{**{own!r}, "model": model}}
rollout = RemoteRollout(name="local", device="cpu", arguments=arguments)
print(rollout._process.pid, flush=True)
if {how!r} == "hang":
    os.kill(rollout._process.pid, signal.SIGSTOP)  # it can look after nothing itself
if {how!r} != "exit":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [os.sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    pid = int(done.stdout.split()[0])
    until(lambda: not runs(pid))


@pytest.mark.slow
def test_a_rollout_that_does_not_start_says_why(arguments) -> None:
    with pytest.raises(
        ConfigError, match=r"config rollout.batch_size: expected at least 1, got 0"
    ) as caught:
        RemoteRollout(name="local", device="cpu", arguments={**arguments, "batch_size": 0})
    assert caught.value.field == "rollout.batch_size"
    with pytest.raises(PluginNotFound, match="no rollout is called 'locla'"):
        RemoteRollout(name="locla", device="cpu", arguments=arguments)
    with pytest.raises(RolloutError, match="unexpected keyword argument 'colour'"):
        RemoteRollout(name="local", device="cpu", arguments={**arguments, "colour": 3})


@pytest.mark.parametrize(
    ("method", "path", "body", "token", "status", "said"),
    [
        ("POST", "/generate", b"{}", "guessed", 401, "token"),
        ("GET", "/health", b"", "", 401, "token"),
        ("POST", "/nothing", b"{}", None, 404, "no POST /nothing"),
        ("GET", "/generate", b"", None, 404, "no GET /generate"),
        ("POST", "/generate", b"{", None, 400, "not JSON"),
        ("POST", "/generate", b"[]", None, 400, "is a list"),
        (
            "POST",
            "/generate",
            b'{"prompts": []}',
            None,
            400,
            "missing a required argument: 'sampling'",
        ),
        ("POST", "/generate", b'{"prompts": [], "sampling": {"colour": 3}}', None, 422, "colour"),
        ("POST", "/generate", b'{"prompts": [[]], "sampling": {}}', None, 422, "prompt 0 is empty"),
        ("POST", "/result", b'{"id": 99, "wait_s": 0}', None, 422, "no generation 99"),
    ],
)
def test_requests_that_are_refused(rollout, method, path, body, token, status, said) -> None:
    rollout.update_weights(iter(weights(0).items()), 1)
    connection = http.client.HTTPConnection(
        rollout._server.host, rollout._server.port, timeout=DEADLINE_S
    )
    token = secret("http").hex() if token is None else token
    connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == status
    assert said in answer["what"]
    assert answer["class"] == "RolloutError"


def test_nobody_else_can_make_the_server_fetch_weights(rollout) -> None:
    connection = http.client.HTTPConnection(
        rollout._server.host, rollout._server.port, timeout=DEADLINE_S
    )
    connection.request(
        "POST", "/update_weights", b'{"address": "tcp:127.0.0.1:9#0", "version": 1, "timeout_s": 1}'
    )
    assert connection.getresponse().status == 401
    connection.close()
    with pytest.raises(RolloutError, match="cannot reach the sender"):
        rollout._server.call(
            "update_weights", address="unix:/nowhere/weights#0", version=1, timeout_s=1
        )
    rollout.update_weights(iter(weights(0).items()), 1)


# A process without the token: connections that say nothing, and some that send a request byte by
# byte.
ATTACK = """
import socket, sys, time
dial = lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])))
silent = [dial() for _ in range(30)]
dripping = [dial() for _ in range(10)]
for one in dripping:
    one.send(b"POST /generate HTTP/1.1\\r\\nContent-Length: 9\\r\\nX: ")
print("connected", flush=True)
ended = set()
while len(ended) < len(dripping):
    time.sleep(0.1)
    for one in dripping:
        try:
            one.send(b"x")
        except OSError:
            ended.add(one)
print("hung up", flush=True)
"""


@pytest.mark.slow
def test_strangers_that_drip_hold_no_one_and_are_hung_up_on(rollout) -> None:
    rollout.update_weights(iter(weights(0).items()), 1)
    command = [sys.executable, "-c", ATTACK, str(rollout._server.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        try:
            assert attack.stdout is not None
            assert attack.stdout.readline() == "connected\n"
            assert rollout.generate([[3, 4]], SAMPLING)
            assert attack.stdout.readline() == "hung up\n"
        finally:
            attack.kill()
    assert rollout.generate([[3, 4]], SAMPLING)


def test_the_arguments_of_a_rollout_are_not_on_a_command_line_that_everyone_can_read(
    rollout, arguments
) -> None:
    pid = rollout._process.pid
    said = Path(f"/proc/{pid}/cmdline").read_text()
    assert "rollout_fp8.remote.server" in said
    assert arguments["model"].path not in said
    health = rollout._server.health()
    assert health["arguments"]["model"]["path"] == arguments["model"].path


@pytest.mark.slow
def test_connections_without_a_token_are_never_many(rollout) -> None:
    place = (rollout._server.host, rollout._server.port)
    with ExitStack() as stack:
        dialled = [
            stack.enter_context(socket.create_connection(place, timeout=600))
            for _ in range(MAX_UNPROVEN + 5)
        ]
        assert [one.recv(1) for one in dialled[:5]] == [b""] * 5


@pytest.mark.slow
def test_shutdown(arguments) -> None:
    made = RemoteRollout(name="local", device="cpu", arguments=arguments)
    made._server.call("shutdown")
    assert endpoint._exit_code(made._process._process, DEADLINE_S) == 0
    made.close()


def test_a_server_answers_before_it_stops(monkeypatch) -> None:
    """The process ends with its last answer half written otherwise."""
    done: list[str] = []
    stopped = threading.Event()
    serve = server_module._Handler._serve

    def answer(handler, calls):
        serve(handler, calls)
        done.append("answered")

    def stop(_):
        done.append("stopped")
        stopped.set()

    monkeypatch.setattr(server_module._Handler, "_serve", answer)
    listening = Server(("127.0.0.1", 0), cast("Any", SimpleNamespace(calls={}, closed=False)))
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr(Server, "shutdown", stop)
        asking = http.client.HTTPConnection(listening.server_name, listening.server_port)
        asking.request("POST", "/shutdown", headers={"Authorization": f"Bearer {listening.token}"})
        assert asking.getresponse().read() == b"{}"
        asking.close()
        assert stopped.wait(DEADLINE_S)
    assert done == ["answered", "stopped"]
    listening.shutdown()
    listening.server_close()
    thread.join()


def test_a_url_that_is_none_or_where_nobody_listens(arguments) -> None:
    for url, said in [
        ("localhost:80", "expected the address of a server"),
        ("http://127.0.0.1:9", "does not respond"),
    ]:
        with pytest.raises(RolloutError, match=said):
            RemoteRollout(name="local", device="cpu", arguments=arguments, url=url)


def test_the_server_is_reached_by_its_former_name() -> None:
    with pytest.deprecated_call(match="use rollout_fp8.remote.server"):
        former = importlib.import_module("rollout_fp8.server")
    assert former.main is server_module.main
