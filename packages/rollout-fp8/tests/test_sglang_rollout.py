"""Rollout ``sglang`` over an engine with SGLang's interface: start, requests, loop, failures."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import sglang_fakes
from sglang_fakes import GREEDY, VOCAB, Engine, export, same, served
from waiting import DEADLINE_S

from engine_api.errors import ConfigError, PluginUnavailable, RolloutError
from engine_api.rollout import AsyncRollout, SamplingParams
from rollout_fp8.transports import channel

engine, folder, make = sglang_fakes.engine, sglang_fakes.folder, sglang_fakes.make  # fixtures


def test_the_server_is_started_with_what_was_asked_for(make, folder):
    rollout = make(
        batch_size=16,
        gpu_memory_utilization=0.5,
        attention_backend="flashinfer",
        deterministic=False,
    )
    assert isinstance(rollout, AsyncRollout)
    server = Engine.made[0]
    got = server.arguments
    assert got["max_running_requests"] == got["cuda_graph_max_bs_decode"] == 16
    assert got["mem_fraction_static"] == pytest.approx(0.42)
    assert got["attention_backend"] == "flashinfer"
    assert got["enable_deterministic_inference"] is False
    assert got["context_length"] == 64 + 8
    assert "sampling_backend" not in got
    assert server.inherited["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in os.environ
    # Its own ends of sequence would end completions that no request asked to end.
    assert server.config["eos_token_id"] is None
    assert not (Path(got["model_path"]) / "generation_config.json").exists()


def test_the_trainers_own_process_stays_as_it_was(make, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.delenv(channel.KEY, raising=False)
    method, root = multiprocessing.get_start_method(allow_none=True), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    make()
    inherited = Engine.made[0].inherited
    assert channel.KEY in inherited  # the secret that opens the sender's channel
    assert "TORCHELASTIC_USE_AGENT_STORE" not in inherited  # SGLang would look for torchrun's store
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert "NCCL_ALGO" not in os.environ
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert (root.handlers, root.level) == (handlers, level)


def test_fp32_does_not_take_an_attention_that_has_no_fp32(make):
    make()
    assert Engine.made[0].arguments["attention_backend"] == "triton"


@pytest.mark.parametrize(
    ("dtype", "given", "want"),
    [("float32", None, "ieee"), ("float32", "tf32x3", "tf32x3"), ("bfloat16", None, None)],
)
def test_float32_is_not_rounded_to_tf32_in_the_servers_processes(
    make, monkeypatch, dtype, given, want
):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if given is not None:
        monkeypatch.setenv("TRITON_F32_DEFAULT", given)
    make(dtype=dtype)
    assert Engine.made[0].inherited.get("TRITON_F32_DEFAULT") == want
    assert os.environ.get("TRITON_F32_DEFAULT") == given


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_backnd": "fa3"}, "attention_backend"),
        ({"attention_backend": "fa9"}, "fa3"),
        ({"cuda_graph": 1}, "flag"),
        ({"max_model_len": 65}, "64 positions"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"quantization": "fp4"}, "fp8"),
        ({"quantization": "fp8"}, "float32"),
        ({"batch_size": 0}, "at least 1"),
        ({"attention_backend": "torch_native"}, "deterministic=false"),
        ({"sampling_backend": "flashinfer"}, "deterministic=false"),
    ],
)
def test_options_that_are_none_are_refused(make, options, said):
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_fp8_without_its_kernels_is_refused(make):
    with pytest.raises(RolloutError, match=r"8\.9"):
        make(quantization="fp8", dtype="bfloat16")


def test_a_server_that_does_not_start_says_why(make, monkeypatch):
    handler = signal.getsignal(signal.SIGQUIT)
    monkeypatch.setattr(
        Engine, "__init__", lambda self, **_: (_ for _ in ()).throw(RuntimeError("no memory left"))
    )
    with pytest.raises(RolloutError, match="no memory left") as caught:
        make()
    assert "gpu_memory_utilization" in caught.value.remedy
    assert signal.getsignal(signal.SIGQUIT) is handler


def test_a_timeout_inside_sglang_is_an_error_of_the_contract(make, monkeypatch):
    rollout = make()
    rollout.update_weights(export(), 1)

    async def late(self, *_: object) -> None:
        raise TimeoutError("of its own")

    monkeypatch.setattr(Engine, "_one", late)
    with pytest.raises(RolloutError, match="of its own"):
        rollout.generate([[1]], GREEDY)


def test_an_untested_version_is_refused(make, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(PluginUnavailable, match=r"0\.5\.16"):
        make()


def test_completions_come_in_order_with_their_log_probs_versions_and_ends(make):
    rollout = make()
    rollout.update_weights(export(), 3)
    asked = SamplingParams(n=2, max_new_tokens=3, stop_token_ids=(22,), seed=1)
    got = rollout.generate([[1, 20], [5], [18]], asked)
    assert [c.prompt_index for c in got] == [0, 0, 1, 1, 2, 2]
    assert [c.tokens for c in got[::2]] == [[21, 22], [6, 7, 8], [19, 20, 21]]
    assert [c.finish_reason for c in got[::2]] == ["stop", "length", "length"]
    assert all(c.log_probs == [-t / 100 for t in c.tokens] for c in got)
    assert all(c.weight_versions == [3] * len(c.tokens) for c in got)
    assert rollout.generate([], asked) == []


def test_a_stop_token_at_the_last_place_is_a_stop_although_sglang_says_length(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    (got,) = rollout.generate([[6]], SamplingParams(max_new_tokens=3))
    assert (got.tokens, got.finish_reason) == ([7, 8, 9], "stop")


def test_seeds_are_one_a_completion_and_repeat(make):
    rollout = make()
    rollout.update_weights(export(), 1)

    def drawn(seed: int | None) -> list[int]:
        Engine.made[0].requests.clear()
        rollout.generate([[1], [2], [1]], SamplingParams(n=2, seed=seed, max_new_tokens=1))
        return [request["sampling_seed"] for request in Engine.made[0].requests]

    first = drawn(5)
    assert len(set(first)) == 6
    assert drawn(5) == first
    assert not {*drawn(6)} & {*first}
    assert drawn(None) != drawn(None)
    assert all(0 <= seed < 2**63 for seed in first)


def test_top_k_1_keeps_the_temperature_in_its_log_probs(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    rollout.generate([[1]], SamplingParams(top_k=1, temperature=1.5, max_new_tokens=1))
    rollout.generate([[1]], SamplingParams(top_k=1, temperature=0.0, max_new_tokens=1))
    rollout.generate([[1]], SamplingParams(top_k=3, top_p=0.5, max_new_tokens=1))
    likeliest, greedy, cut = Engine.made[0].requests
    assert (likeliest["top_k"], likeliest["temperature"]) == (-1, 1.5)
    assert 0 < likeliest["top_p"] < 1e-6
    assert (greedy["temperature"], greedy["top_p"]) == (0.0, 1.0)
    assert (cut["top_k"], cut["top_p"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("prompts", "sampling", "said"),
    [
        ([[1], []], GREEDY, "prompt 1 is empty"),
        ([[1], [VOCAB]], GREEDY, "prompt 1"),
        ([[-1]], GREEDY, "prompt 0"),
        ([[1], [1], [1] * 61], GREEDY, "prompt 2"),
        ([[1]], SamplingParams(n=0), "n=0"),
        ([[1]], SamplingParams(temperature=-1.0), "temperature"),
        ([[1]], SamplingParams(temperature=1e-7), "greedily"),
        ([[1]], SamplingParams(top_p=0.0), "top_p"),
        ([[1]], SamplingParams(top_k=-1), "top_k"),
    ],
)
def test_bad_requests_are_refused_before_any_is_sent(make, prompts, sampling, said):
    rollout = make()
    rollout.update_weights(export(), 1)
    with pytest.raises(RolloutError, match=said):
        rollout.generate(prompts, sampling)
    assert not Engine.made[0].requests
    assert rollout.generate([[1] * 60], GREEDY)


@pytest.mark.parametrize(
    "told",
    [
        {"max_req_input_len": 11, "max_total_num_tokens": 17, "page_size": 1},
        # The last page need not be free.
        {"max_req_input_len": 132, "max_total_num_tokens": 138, "page_size": 64},
    ],
)
def test_a_server_with_less_room_than_the_context_refuses_what_it_would_cut_off(
    make, monkeypatch, told
):
    monkeypatch.setattr(Engine, "get_server_info", lambda self: told)
    rollout = make()
    rollout.update_weights(export(), 1)
    assert len(rollout.generate([[1] * 6], GREEDY)[0].tokens) == 4
    with pytest.raises(RolloutError, match="holds at most 10 tokens"):
        rollout.generate([[1] * 7], GREEDY)


def test_a_request_that_the_server_gives_up_on_is_an_error(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    Engine.made[0].refuse = {"type": "abort", "message": "out of cache", "status_code": 500}
    with pytest.raises(RolloutError, match="out of cache"):
        rollout.generate([[1]], GREEDY)


def test_a_token_that_the_server_made_up_is_an_error(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    # SGLang puts a stop token in its place.
    Engine.made[0].refuse = {
        "type": "stop",
        "matched": "NaN happened",
    }
    with pytest.raises(RolloutError, match="NaN happened"):
        rollout.generate([[1]], GREEDY)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_prob_that_is_none_is_refused(make, monkeypatch, value):
    rollout = make()
    rollout.update_weights(export(), 1)
    answer = Engine._one

    async def spoilt(self, *request):
        told = await answer(self, *request)
        if told["output_ids"][0] == 6:
            told["meta_info"]["output_token_logprobs"][2] = (value, 8, None)
        return told

    monkeypatch.setattr(Engine, "_one", spoilt)
    assert rollout.generate([[1]], GREEDY)
    with pytest.raises(
        RolloutError, match=f"prompt 1: token 2 was drawn with log-prob {value}"
    ) as caught:
        rollout.generate([[1], [5]], GREEDY)
    assert "dtype" in caught.value.remedy
    with pytest.raises(RolloutError, match="prompt 0: token 2"):
        rollout.submit([5], GREEDY).result(DEADLINE_S)


def test_what_a_call_of_the_server_raises_is_an_error_of_the_contract(make, monkeypatch):
    rollout = make()
    rollout.update_weights(export(), 1)
    monkeypatch.setattr(
        Engine,
        "release_memory_occupation",
        lambda self, tags: (_ for _ in ()).throw(KeyError("weights")),
    )
    with pytest.raises(RolloutError, match="KeyError"):
        rollout.sleep()
    assert rollout.generate([[1]], GREEDY)


def test_a_process_that_dies_while_generating_is_an_error_and_nothing_hangs(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    Engine.made[0].hold = asyncio.Event()
    before = rollout.submit([1], GREEDY)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGQUIT)).start()
    with pytest.raises(RolloutError, match="processes failed"):
        rollout.generate([[1]], GREEDY)
    with pytest.raises(RolloutError, match="processes failed"):
        before.result(DEADLINE_S)
    with pytest.raises(RolloutError):
        rollout.update_weights(export(1), 2)


def test_generation_in_the_background_and_abort(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    server = Engine.made[0]
    got = rollout.submit([3], SamplingParams(n=2, max_new_tokens=2, temperature=0.0)).result(
        DEADLINE_S
    )
    assert [(c.prompt_index, c.tokens) for c in got] == [(0, [4, 5])] * 2
    server.hold = asyncio.Event()
    slow = rollout.submit([3], SamplingParams(n=3, max_new_tokens=30))
    with pytest.raises(TimeoutError):
        slow.result(0.05)
    assert not slow.done()
    quick = rollout.submit([3], GREEDY)
    quick.abort()  # before the server knows of it
    assert [c.finish_reason for c in quick.result(DEADLINE_S)] == ["abort"]
    slow.abort()
    ends = slow.result(DEADLINE_S)
    assert [(c.tokens, c.finish_reason, c.weight_versions) for c in ends] == [
        ([4], "abort", [1])
    ] * 3
    slow.abort()
    rollout.close()
    slow.abort()


def test_sleep_and_wake_up_each_part_once(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    calls = Engine.made[0].calls
    rollout.wake_up()
    rollout.sleep(weights=False)
    with pytest.raises(RolloutError, match="caches sleep"):
        rollout.generate([[1]], GREEDY)
    rollout.sleep()
    rollout.sleep()
    with pytest.raises(RolloutError, match="sleeps"):
        rollout.generate([[1]], GREEDY)
    with pytest.raises(RolloutError, match="sleeps"):
        rollout.update_weights(export(), 2)
    rollout.wake_up(kv_cache=False)
    rollout.update_weights(export(4), 2)
    with pytest.raises(RolloutError, match="caches sleep"):
        rollout.generate([[1]], GREEDY)
    rollout.wake_up()
    rollout.wake_up()
    assert rollout.generate([[1]], GREEDY)[0].weight_versions == [2] * 4
    assert same(Engine.made[0].model, served(4))
    assert calls == [
        ("release", ["kv_cache"]),
        ("release", ["weights"]),
        ("resume", ["weights"]),
        ("resume", ["kv_cache"]),
    ]
    with pytest.raises(RolloutError, match="memory_saver=true"):
        make(memory_saver=False).sleep()


def test_closed_is_closed(make):
    handler = signal.getsignal(signal.SIGQUIT)
    rollout = make()
    assert signal.getsignal(signal.SIGQUIT) is not handler
    rollout.update_weights(export(), 1)
    folder = Path(Engine.made[0].arguments["model_path"])
    rollout.close()
    rollout.close()
    assert Engine.made[0].calls == ["shutdown"]
    assert signal.getsignal(signal.SIGQUIT) is handler
    assert not folder.exists()
    for call in (
        lambda: rollout.generate([[1]], GREEDY),
        lambda: rollout.submit([1], GREEDY),
        rollout.sleep,
        rollout.wake_up,
        lambda: rollout.update_weights(export(), 2),
    ):
        with pytest.raises(RolloutError, match="closed"):
            call()


def test_nothing_before_the_first_sync(make):
    rollout = make()
    with pytest.raises(RolloutError, match="no weights"):
        rollout.generate([[1]], GREEDY)
    with pytest.raises(RolloutError, match="no weights"):
        rollout.submit([1], GREEDY)
