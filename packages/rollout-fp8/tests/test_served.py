"""State that a server keeps for its clients, and refusal of servers with other settings."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from background import Background
from transformers import Qwen3Config

from engine_api.config import LoraConfig, ModelSource
from engine_api.errors import ConfigError, RolloutError
from engine_api.registry import RolloutRegistry
from rollout_fp8.options import VllmOptions
from rollout_fp8.remote import server
from rollout_fp8.remote.client import RemoteRollout
from rollout_fp8.remote.served import require_same, settings_of
from rollout_fp8.remote.server import Server, Service


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ).save_pretrained(folder)
    source = ModelSource(path=str(folder))
    return {
        "model": source,
        "pad_token_id": 0,
        "eos_token_ids": (1,),
        "batch_size": 4,
        "dtype": "float32",
    }


@pytest.fixture(scope="module")
def url(arguments: dict[str, Any]) -> Iterator[str]:
    """Return the URL of a server that was made with ``arguments``."""
    hosted = RolloutRegistry.create(name="local", device="cpu", **arguments)
    service = Service(
        hosted, "cpu", name="local", arguments=arguments | {"model": asdict(arguments["model"])}
    )
    with Server(("127.0.0.1", 0), service) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running.url
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"eos_token_ids": (2, 1)}, r"eos_token_ids: expected \[1, 2\], got \[1\]"),
        ({"eos_token_ids": ()}, r"eos_token_ids: expected \[\], got \[1\]"),
        ({"batch_size": 0}, "batch_size: expected 0, got 4"),
        ({"dtype": "bfloat16"}, "dtype: expected 'bfloat16', got 'float32'"),
        ({"quantization": "fp8"}, "quantization: expected 'fp8', got 'none'"),
        ({"model": ModelSource(path="/nowhere")}, "model: expected .*/nowhere.*, got "),
        ({"colour": 3}, "colour is not an argument that it takes"),
        ({"batchsize": 4}, "batchsize is not an argument that it takes .did you mean batch_size"),
    ],
)
def test_a_server_that_was_made_with_something_else_is_refused_by_name(
    url, arguments, other, said
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        RemoteRollout(name="local", device="cpu", arguments={**arguments, **other}, url=url)
    assert caught.value.field == "rollout.options.url"
    assert str(caught.value).count(": expected ") <= 1  # nothing else is said to differ


def test_a_server_of_another_rollout_is_refused_and_what_is_not_asked_for_is_the_servers(
    url, arguments
) -> None:
    with pytest.raises(ConfigError, match="name: expected 'vllm', got 'local'"):
        RemoteRollout(name="vllm", device="cpu", arguments=arguments, url=url)
    some = {
        key: value
        for key, value in arguments.items()
        if key in ("model", "pad_token_id", "eos_token_ids")
    }
    RemoteRollout(name="local", device="cpu", arguments=some, url=url).close()


def test_a_folder_is_the_same_by_whichever_path(url, arguments, monkeypatch) -> None:
    folder = Path(arguments["model"].path)
    monkeypatch.chdir(folder.parent)
    RemoteRollout(
        name="local",
        device="cpu",
        arguments={**arguments, "model": ModelSource(path=folder.name)},
        url=url,
    ).close()


def test_an_adapter_is_compared_with_its_defaults() -> None:
    settings = settings_of(Background(), "vllm", {"lora": {"rank": 4}})
    require_same("", "vllm", {"lora": LoraConfig(rank=4)}, settings)
    with pytest.raises(ConfigError, match=r"lora: expected .*'rank': 8.*, got .*'rank': 4"):
        require_same("", "vllm", {"lora": LoraConfig(rank=8)}, settings)
    with pytest.raises(ConfigError, match="lora: expected None, got "):
        require_same("", "vllm", {}, settings)


@pytest.mark.parametrize(
    ("option", "here", "there"), [("scales", "fp32", "pow2"), ("audit", True, False)]
)
def test_options_by_which_weights_are_sent_are_compared_with_the_runs_defaults(
    option, here, there
) -> None:
    """Check that missing options are compared with the defaults that the exporter uses."""

    class Optioned(Background):
        options = VllmOptions(**{option: there})

    settings = settings_of(Optioned(), "vllm", {})
    with pytest.raises(ConfigError, match=f"{option}: expected {here!r}, got {there!r}"):
        require_same("", "vllm", {}, settings)
    require_same("", "vllm", {option: there}, settings)


class Many(Background):
    """Rollout that makes a new object for each generation, to which tests hold weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Background]] = []

    def submit(self, prompt, sampling):
        one = Failing() if prompt == [13] else Background()
        self.made.append(weakref.ref(one))
        return one


class Failing(Background):
    def result(self, timeout_s=None):
        raise KeyError("a bug")


def test_generations_that_nobody_asks_for_are_let_go(monkeypatch) -> None:
    hosted = Many()
    service = Service(hosted, "cpu", name="background", arguments={})
    first, second = (service.submit(prompt=[4], sampling={})["id"] for _ in range(2))
    running = hosted.made[0]()
    assert running is not None
    now = time.monotonic()
    monkeypatch.setattr(server.time, "monotonic", lambda: now + server.KEPT_S / 2)
    assert service.result(id=second, wait_s=0.0) == {"done": False}
    monkeypatch.setattr(server.time, "monotonic", lambda: now + server.KEPT_S + 1)
    service.submit(prompt=[4], sampling={})
    assert running.aborted.is_set()  # its client is gone
    del running
    gc.collect()
    assert [one() is None for one in hosted.made] == [True, False, False]
    with pytest.raises(RolloutError, match="kept for 60 minutes"):
        service.result(id=first, wait_s=0.0)
    service.abort(id=second)
    assert service.result(id=second, wait_s=0.0)["done"]


def test_a_generation_that_failed_by_a_bug_is_let_go() -> None:
    hosted = Many()
    service = Service(hosted, "cpu", name="background", arguments={})
    number = service.submit(prompt=[13], sampling={})["id"]
    with pytest.raises(KeyError):
        service.result(id=number, wait_s=0.0)
    gc.collect()
    assert hosted.made[0]() is None
