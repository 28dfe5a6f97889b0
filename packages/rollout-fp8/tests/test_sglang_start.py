"""Unfinished starts of the ``sglang`` rollout, of which nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import sglang_fakes
import torch
from sglang_fakes import Engine
from tiny_models import tiny_pictured_model
from transformers import (
    DeepseekV2Config,
    GptOssConfig,
    JambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from waiting import NEVER_S, until

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from rollout_fp8.sglang import options, private
from rollout_fp8.sglang.options import SglangOptions

engine, folder, make = sglang_fakes.engine, sglang_fakes.folder, sglang_fakes.make  # fixtures


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_a_start_that_does_not_come_to_its_end_leaves_no_process(make, monkeypatch, how):
    handler, old = signal.getsignal(signal.SIGQUIT), signal.signal(signal.SIGUSR1, interrupt)
    started: list[multiprocessing.Process] = []

    def begin(self: Engine, **_: object) -> None:
        started.extend(
            multiprocessing.get_context("spawn").Process(target=time.sleep, args=(NEVER_S,))
            for _ in range(2)
        )
        for process in started:
            process.start()
        if how == "error":
            raise RuntimeError("no memory left")
        os.kill(os.getpid(), signal.SIGUSR1)
        started[0].join()  # SGLang waits for its processes, and says so when one is gone
        raise EOFError

    monkeypatch.setattr(Engine, "__init__", begin)
    try:
        with pytest.raises(KeyboardInterrupt if how == "interrupt" else RolloutError):
            make()
        until(lambda: not any(process.is_alive() for process in started))
    finally:
        signal.signal(signal.SIGUSR1, old)
        for process in started:
            process.kill()
    assert signal.getsignal(signal.SIGQUIT) is handler
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "sglang"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_a_start_that_fails_once_sglang_is_up_ends_it(make, monkeypatch, error):
    handler = signal.getsignal(signal.SIGQUIT)
    monkeypatch.setattr(
        "rollout_fp8.sglang.rollout.Schedulers", lambda *_: (_ for _ in ()).throw(error)
    )
    with pytest.raises(error):
        make()
    assert Engine.made[0].calls == ["shutdown"]
    assert signal.getsignal(signal.SIGQUIT) is handler
    assert not Path(Engine.made[0].arguments["model_path"]).exists()


@pytest.mark.parametrize("value", ["1", "True", "yes"])
def test_log_probs_of_another_meaning_are_refused(make, monkeypatch, value):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    with pytest.raises(RolloutError, match=f"SGLANG_RETURN_ORIGINAL_LOGPROB={value}") as caught:
        make()
    assert "temperature" in caught.value.why
    assert "unset" in caught.value.remedy
    assert not Engine.made
    for harmless in ("0", "false", ""):
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", harmless)
        make()


def test_a_model_with_a_tower_is_refused_by_name(make, folder):
    tiny_pictured_model("qwen2_5_vl").config.save_pretrained(folder)
    with pytest.raises(UnsupportedCapability, match="vision tower") as caught:
        make()
    assert caught.value.capability == "vision"


def test_a_cache_for_the_batch_holds_whole_pages_of_all_its_sequences(make):
    limited = {"batch_size": 3, "max_model_len": 24}
    make(**limited)
    make(**limited, kv_cache_for_batch=True)
    whole, own = (engine.arguments for engine in Engine.made)
    assert "max_total_tokens" not in whole
    page = options.PAGE
    assert own["context_length"] <= page
    # And the two pages that SGLang's own limit leaves out.
    assert own["max_total_tokens"] == 3 * page + 2 * page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_float32_are_in_no_graph(make, tmp_path, dtype):
    """The graphs are captured before SGLang's kernel can be corrected."""
    for config in (Qwen3Config(), Qwen3MoeConfig(num_experts=4)):
        config.save_pretrained(tmp_path)
        make(dtype=dtype, model=ModelSource(path=str(tmp_path)))
    dense, experts = (engine.arguments for engine in Engine.made)
    assert dense["disable_cuda_graph"] is False
    assert experts["disable_cuda_graph"] is (dtype == "float32")
    assert ("cuda_graph_max_bs_decode" in experts) is not experts["disable_cuda_graph"]


def test_the_kernel_of_experts_writes_float32_where_its_input_is(monkeypatch):
    class FusedMoE(torch.nn.Module):
        pass

    given: list[object] = []
    names = ["sglang", "srt", "layers", "moe", "moe_runner", "triton_utils", "fused_moe"]
    paths = [".".join(names[: count + 1]) for count in range(len(names))]
    for path in (*paths, "triton", "triton.language"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules["triton.language"].float32 = "float32"
    sys.modules["triton"].language = sys.modules["triton.language"]
    kernels = sys.modules[paths[-1]]
    own = kernels.invoke_fused_moe_kernel = lambda *_, compute_type: given.append(compute_type)

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, paths[-1])
        private.keep_float32_of_experts(torch.nn.Linear(1, 1))
    assert kernels.invoke_fused_moe_kernel is own
    for model in (FusedMoE(), torch.nn.Sequential(FusedMoE()), torch.nn.Linear(1, 1)):
        private.keep_float32_of_experts(model)
        assert kernels.invoke_fused_moe_kernel.__wrapped__ is own
    for dtype in (torch.float32, torch.float16):
        kernels.invoke_fused_moe_kernel(torch.zeros(1, dtype=dtype), compute_type="float16")
    assert given == ["float32", "float16"]


@pytest.mark.parametrize(
    "config",
    [
        GptOssConfig(num_hidden_layers=2),
        Qwen3NextConfig(num_hidden_layers=4),
        JambaConfig(num_hidden_layers=4),
    ],
    ids=lambda config: config.model_type,
)
def test_a_cache_for_the_batch_is_refused_where_layers_have_caches_of_other_sizes(config):
    wanted = SglangOptions(kv_cache_for_batch=True)
    options.check_cache(wanted, Qwen3Config())
    options.check_cache(SglangOptions(), config)
    with pytest.raises(ConfigError, match=f"expected false for a {config.model_type}") as caught:
        options.check_cache(wanted, config)
    assert caught.value.field == "rollout.options.kv_cache_for_batch"


def test_an_fp8_cache_is_e4m3_and_refused_by_name_where_there_is_none(monkeypatch):
    fp8 = SglangOptions(kv_cache_dtype="fp8")
    arguments = {
        "dtype": "bfloat16",
        "quantization": "none",
        "batch_size": 1,
        "device": torch.device("cuda", 0),
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    options.check_arguments(SglangOptions(), **arguments)
    with pytest.raises(RolloutError, match=r"no FP8 cache(.|\n)*8\.0") as caught:
        options.check_arguments(fp8, **arguments)
    assert "kv_cache_dtype=auto" in caught.value.remedy
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    options.check_arguments(fp8, **arguments)
    latent = DeepseekV2Config(kv_lora_rank=512)
    options.check_cache(SglangOptions(), latent)
    options.check_cache(fp8, Qwen3Config())
    with pytest.raises(ConfigError, match="latent attention") as caught:
        options.check_cache(fp8, latent)
    assert "kv_cache_dtype=auto" in caught.value.remedy
