"""Server as its clients see it: errors of generations, and resources of the client's process."""

from __future__ import annotations

import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from background import Background
from transformers import AutoModelForCausalLM, Qwen3Config
from waiting import DEADLINE_S, until

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError
from engine_api.registry import Resolution
from engine_api.rollout import SamplingParams
from rollout_fp8.export.exporter import DTYPES
from rollout_fp8.plugin import SGLANG, VLLM
from rollout_fp8.remote import client
from rollout_fp8.remote.client import RemoteRollout, SglangServer, VllmServer
from rollout_fp8.remote.endpoint import ServerProcess
from rollout_fp8.remote.served import default_dtype
from rollout_fp8.remote.server import Server, Service
from rollout_fp8.sglang.rollout import SglangRollout
from rollout_fp8.transports.channel import secret

pytestmark = pytest.mark.distributed


class Ends(Background):
    """Rollout whose generations have all failed with an error of its own."""

    error: Exception = RolloutError(
        "no room", where="rollout 'ends'", why="the cache is full", remedy="lower batch_size"
    )

    def submit(self, prompt, sampling):
        self.go.set()
        return self

    def result(self, timeout_s=None):
        raise self.error


@contextmanager
def serving(service: Service) -> Iterator[str]:
    with Server(("127.0.0.1", 0), service) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield running.url
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def hosted() -> Iterator[tuple[Ends, str]]:
    rollout = Ends()
    with serving(Service(rollout, "cpu", name="ends", arguments={})) as url:
        yield rollout, url


@pytest.mark.parametrize(
    "error", [Ends.error, KeyError("a bug"), TimeoutError("of a lock of its own")]
)
def test_a_generation_that_failed_is_done_and_tells_why_as_often_as_it_is_asked(
    hosted, error
) -> None:
    rollout, url = hosted
    rollout.error = error
    made = RemoteRollout(name="ends", device="cpu", arguments={}, url=url)
    running = made.submit([4], SamplingParams())
    assert running.done()
    assert running.done()
    running.abort()  # it is over: nothing to do
    for _ in range(2):
        with pytest.raises(RolloutError, match=str(error.args[0])):
            running.result(DEADLINE_S)
    made.close()


def test_many_open_files_do_not_matter(hosted) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this host lets a process open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        made = RemoteRollout(name="ends", device="cpu", arguments={}, url=hosted[1])
        assert made.weight_version == 3
        made.close()
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_that_was_started_takes_one_descriptor_at_most(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(RolloutError, match="KeyError"):
        ServerProcess("local", "cpu", {}, gpus=0, timeout_s=DEADLINE_S)
    assert set(Path("/proc/self/fd").iterdir()) <= before


@pytest.mark.slow
def test_who_waits_for_a_server_that_another_thread_closes_is_told_so(tmp_path) -> None:
    CONFIG.save_pretrained(tmp_path)
    given = {"model": ModelSource(path=str(tmp_path)), "pad_token_id": 0, "dtype": "float32"}
    made = RemoteRollout(name="local", device="cpu", arguments=given, start_timeout_s=DEADLINE_S)
    with torch.random.fork_rng():
        made.update_weights(iter(AutoModelForCausalLM.from_config(CONFIG).state_dict().items()), 0)
    # More tokens than it makes while it is closed, however busy the machine is: it computes for
    # minutes.
    pending = made._server.start("generate", prompts=[[3]], sampling={"max_new_tokens": 30_000})
    made.close()  # the server ended well: its log is gone
    with pending, pytest.raises(RolloutError, match=r"does not respond|was closed"):
        pending.response()


class Torn(Background):
    """Rollout that breaks when it is closed under a generation, as a freed model does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.torn = threading.Event(), threading.Event()

    def generate(self, prompts, sampling):
        self.begun.set()
        assert self.torn.wait(DEADLINE_S)
        raise AttributeError("'NoneType' object has no attribute 'device'")

    def close(self):
        self.torn.set()


def test_a_call_that_the_end_of_the_server_cut_short_says_so() -> None:
    rollout = Torn()
    service = Service(rollout, "cpu", name="torn", arguments={})
    with serving(service) as url:
        made = RemoteRollout(name="torn", device="cpu", arguments={}, url=url)
        pending = made._server.start("generate", prompts=[[3]], sampling={})
        assert rollout.begun.wait(DEADLINE_S)
        service.close()
        with pending, pytest.raises(RolloutError, match="the server was closed during this call"):
            pending.response()
        made.close()


CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    tie_word_embeddings=False,
)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is the GPU here")
def test_the_device_auto_is_the_servers_own_choice_for_weights_too(tmp_path, monkeypatch) -> None:
    CONFIG.save_pretrained(tmp_path)
    source = ModelSource(path=str(tmp_path))
    with torch.random.fork_rng():
        weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()
    given: dict[str, Any] = {"pad_token_id": 0, "dtype": "float32"}
    secret("http")  # the same for both
    announce, command = (
        tmp_path / "news",
        [sys.executable, "-m", "rollout_fp8.remote.server", "--name", "local"],
    )
    config = json.dumps({**given, "model": asdict(source)})
    with subprocess.Popen([*command, "--config", config, "--announce", str(announce)]) as process:
        try:
            until(lambda: announce.exists() or process.poll() is not None)
            assert process.poll() is None
            url = json.loads(announce.read_text())["url"]
            made = RemoteRollout(
                name="local", device="auto", arguments={**given, "model": source}, url=url
            )
            assert made.update_weights(iter(weights.items()), 1).version == 1
            assert made.generate([[3]], SamplingParams(max_new_tokens=2))
            made.close()
        finally:
            process.terminate()


class MadeAsSglang(Background):
    def __init__(
        self, *, dtype: str = "bfloat16", quantization: str = "none", scales: str = "fp32"
    ) -> None:
        super().__init__()


class MadeAsVllm(Background):
    def __init__(
        self, *, dtype: str = "float32", quantization: str = "none", scales: str = "fp32"
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("kind", "hosts", "dtype"),
    [(SglangServer, MadeAsSglang, "bfloat16"), (VllmServer, MadeAsVllm, "float32")],
)
def test_a_client_that_names_no_dtype_goes_by_the_one_of_its_rollout(
    tmp_path, monkeypatch, kind, hosts, dtype
) -> None:
    name = hosts.__name__.removeprefix("MadeAs").lower()
    plugin = {"sglang": SGLANG, "vllm": VLLM}[name]
    here = Resolution(plugin=plugin, row=plugin.rows[1], device="cpu", source="test", trace=())
    given = {"model": ModelSource(path=str(tmp_path)), "pad_token_id": 0}
    monkeypatch.setattr(client, "collect_export", lambda export, **how: how)
    for own, other in ({}, "float16"), ({"dtype": "float16"}, dtype):
        made_with = {**given, "model": asdict(given["model"]), **own}
        with serving(Service(hosts(**own), "cpu", name=name, arguments=made_with)) as url:
            with pytest.raises(ConfigError, match="dtype: expected"):
                kind(resolution=here, url=url, **given, dtype=other)
            if "dtype" in own:
                with pytest.raises(ConfigError, match=f"dtype: expected '{dtype}', got 'float16'"):
                    kind(resolution=here, url=url, **given)
                continue
            made = kind(resolution=here, url=url, **given)
            sent: Any = made._stream(iter(()))
            assert sent["dtype"] == DTYPES[dtype]
            made.close()


def test_the_dtype_that_clients_go_by_is_the_rollouts() -> None:
    assert inspect.signature(SglangRollout).parameters["dtype"].default == default_dtype("sglang")
