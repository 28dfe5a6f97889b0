"""Engine with SGLang's interface over real loaders and real parameters, and a rollout on it."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import served_model
import torch
from served_model import VOCAB, ServedModel, checkpoint
from torch import Tensor

from engine_api.config import ModelSource
from engine_api.plugin import CONTRACT, EnginePlugin, Row
from engine_api.registry import Resolution
from engine_api.rollout import SamplingParams
from rollout_fp8.fp8.quantize import quantize
from rollout_fp8.sglang import loader
from rollout_fp8.sglang.rollout import SglangRollout

CONFIG = {**served_model.CONFIG, "max_position_embeddings": 64, "eos_token_id": 7}
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)


class Engine:
    """Engine with those parts of ``sglang.Engine`` that are called.

    A token is the one before plus one; its log-prob is minus a hundredth of it.
    """

    made: ClassVar[list[Engine]] = []

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.config = json.loads((Path(arguments["model_path"]) / "config.json").read_text())
        self.inherited = dict(os.environ)  # by the processes that SGLang starts here
        # SGLang does all this for its processes.
        os.environ |= {
            "NCCL_ALGO": "allreduce:tree",
            "NCCL_DEBUG": "TRACE",
        }
        logging.basicConfig(level=logging.ERROR, force=True)
        multiprocessing.set_start_method("spawn", force=True)
        self.loop = asyncio.new_event_loop()
        self.model = ServedModel(fp8="quantization_config" in self.config)
        self.requests: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.hold: asyncio.Event | None = None  # generation waits for it
        self.refuse: dict[str, Any] | None = None
        self.load: Any = loader.load  # what the only scheduler runs
        self.idle_after = 0  # flush_cache fails that often
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)
        Engine.made.append(self)

    def get_server_info(self) -> dict[str, Any]:
        return {
            "max_req_input_len": self.arguments["context_length"] - 6,
            "max_total_num_tokens": 10_000,
            "page_size": 1,
        }

    async def async_generate(
        self, *, input_ids: Any, sampling_params: Any, return_logprob: bool, rid: Any
    ) -> list[dict[str, Any]]:
        assert return_logprob
        rows = list(zip(input_ids, sampling_params, rid, strict=True))
        return list(await asyncio.gather(*(self._one(*row) for row in rows)))

    async def _one(self, prompt: list[int], params: dict[str, Any], rid: str) -> dict[str, Any]:
        self.requests.append(params)
        await asyncio.sleep(0.01)  # not yet known to the scheduler
        self.running.add(rid)
        tokens: list[int] = []
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        while len(tokens) < params["max_new_tokens"]:
            tokens.append(((tokens or prompt)[-1] + 1) % VOCAB)
            if tokens[-1] in params["stop_token_ids"] and len(tokens) < params["max_new_tokens"]:
                reason = {"type": "stop", "matched": tokens[-1]}
                break
            while self.hold is not None and not self.hold.is_set() and rid not in self.aborted:  # noqa: ASYNC110 - two things end it
                await asyncio.sleep(0.005)
            if rid in self.aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None}
                break
        self.running.discard(rid)
        told = self.refuse or reason
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": told,
                "output_token_logprobs": [(-t / 100, t, None) for t in tokens],
            },
        }

    def _abort(self, rid: str) -> None:
        if rid in self.running:  # SGLang passes over others
            self.aborted.add(rid)

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str, flush_cache: bool
    ) -> tuple[bool, str]:
        assert (load_format, flush_cache) == ("rollout_fp8.sglang.loader.load", False)
        assert all(tensor.numel() == 0 for _, tensor in named_tensors)
        return self.loop.run_until_complete(self._update(named_tensors))

    async def _update(self, named: Any) -> tuple[bool, str]:
        try:
            await self.loop.run_in_executor(None, self.load, self.model, named)
        except Exception:  # noqa: BLE001 - whatever leaves the loader ends the scheduler
            os.kill(os.getpid(), signal.SIGQUIT)
            await asyncio.Event().wait()  # no answer comes any more
        return True, "Success"

    def flush_cache(self) -> Any:
        self.loop.run_until_complete(asyncio.sleep(0))
        self.calls.append("flush")
        self.idle_after -= 1
        return SimpleNamespace(success=self.idle_after < 0)

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(("release", tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(("resume", tags))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    module = ModuleType("sglang")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    for name in ("NCCL_ALGO", "NCCL_DEBUG"):  # the engine below sets them
        monkeypatch.setenv(name, "")
    # The rank of the scheduler, which is a thread here.
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("rollout_fp8.versions.check", lambda *args, **kwargs: None)
    Engine.made.clear()
    # An engine that a test makes by itself takes the root logger, as SGLang's does: for that test
    # alone.
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield Engine
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8]}))
    return tmp_path


@pytest.fixture
def make(folder):
    made: list[SglangRollout] = []

    def build(**options: Any) -> SglangRollout:
        row = Row(backends=("sglang",), devices=("cuda",), target="x:y")
        plugin = EnginePlugin(name="sglang", contract=CONTRACT, rows=(row,))
        resolution = Resolution(plugin=plugin, row=row, device="cpu", source="test", trace=())
        given = {
            "dtype": "float32",
            "eos_token_ids": (9,),
            "model": ModelSource(path=str(folder)),
        } | options
        made.append(SglangRollout(resolution=resolution, pad_token_id=0, **given))
        return made[-1]

    yield build
    for rollout in made:
        rollout.close()


def export(seed: int = 0) -> Any:
    return iter(checkpoint(seed).items())


def served(seed: int, *, fp8: bool = False, **kwargs: Any) -> dict[str, Tensor]:
    """Return the checkpoint in the served format, as the server's own loader loads it."""
    model, tensors = ServedModel(fp8=fp8, **kwargs), dict[str, Tensor]()
    for name, tensor in checkpoint(seed).items():
        tensors[name] = tensor
        if fp8 and "_proj" in name:
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensor, scales="fp32")
    model.load_weights(tensors.items())
    return dict(model.named_parameters())


def same(model: ServedModel, want: dict[str, Tensor]) -> bool:
    own = dict(model.named_parameters())
    return own.keys() == want.keys() and all(
        torch.equal(own[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want
    )
