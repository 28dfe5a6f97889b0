"""Runs of engine-train on the simulated device, compared with the same runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from waiting import DEADLINE_S

from engine_api import RolloutRegistry
from engine_api.devices import SIMULATED_NPU
from engine_api.errors import PluginUnavailable
from engine_npu import probe
from engine_npu.ascend import Host
from engine_npu.device import Npu

pytest.importorskip("engine_trainer")

HERE = Path(__file__).parent
RUN = "import sys, npu_trainer; from engine_trainer.cli import main; sys.exit(main(sys.argv[1:]))"
CONFIG = {
    "engine": {"backend": "fsdp2", "optimizer": {"lr": 0.003}},
    "run": {
        "steps": 3,
        "seed": 3,
        "save_every": 3,
        "progress": False,
        "report": False,
        "tensorboard": False,
    },
}
RL = {
    "reward": {"name": "sevens", "workers": 0, "timeout_s": None},
    "rollout": {"n": 4, "max_new_tokens": 4},
    "algorithm": {"prompts_per_step": 8},
}
# Ray does not know the simulated device, so its workers request no GPU.
RAY = {
    "launcher": "ray",
    "ray": {"gpus_per_worker": 0, "cpus_per_worker": 0.5, "imports": ["npu_trainer"]},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"batch_size": 8}),
    "rl": ("rl", RL),
    # With Ray, weights are sent to another process.
    "ray": ("rl", RL | RAY | {"ray": {**RAY["ray"], "engines": 2, "rollouts": 1}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Qwen3 of two layers, a tokenizer of sixteen characters, and questions."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model")
    characters = ["<pad>", "<eos>", "+", "=", "#", " ", *"0123456789"]
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.2)).save_pretrained(path)
    rows = [
        {"prompt": f"{a}+{b}=", "response": str((a + b) % 10)} for a in range(8) for b in range(8)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(
    kind: str, device: str, model: Path, out: Path
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the metrics of each step, and the weights and moments after the last step."""
    command, sections = KINDS[kind]
    tree = CONFIG | sections | {"data": {"source": str(model / "rows.jsonl")}}
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(tree))
    given = [f"engine.model.path={model}", f"engine.device={device}", f"run.output_dir={out}"]
    # An NPU would compute in bfloat16 by itself.
    given.append("engine.precision.compute=float32")
    path = os.pathsep.join(entry for entry in (str(HERE), os.environ.get("PYTHONPATH")) if entry)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        SIMULATED_NPU: "1" if device == "npu" else "",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, command, str(file), *given],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in logged if "train/loss" in row]
    state: dict[str, torch.Tensor] = {}
    for file in sorted(out.rglob("*.safetensors")):
        if file.is_relative_to(out / "checkpoints"):
            state |= {f"{file.name} {key}": tensor for key, tensor in load_file(file).items()}
    return rows, state


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["sft", "rl", pytest.param("ray", marks=pytest.mark.nightly)])
def test_a_run_is_the_cpu_s(kind: str, model: Path, tmp_path: Path) -> None:
    if kind == "ray":
        pytest.importorskip("ray")
    (here, wanted), (there, found) = (
        train(kind, device, model, tmp_path / device) for device in ("cpu", "npu")
    )
    assert len(here) == len(there) == 3
    for row, other in zip(here, there, strict=True):
        assert other["train/loss"] == pytest.approx(row["train/loss"], rel=1e-4, abs=1e-6)
        assert other["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=1e-4)
    assert wanted.keys() == found.keys()
    # The weights, and two moments of each.
    assert len(wanted) > 60
    for key, tensor in wanted.items():
        assert torch.allclose(tensor, found[key], rtol=1e-3, atol=1e-5), key


def test_ranks_under_ray_join_the_device_s_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device needs no such group, because gloo alone serves it in torch."""
    pytest.importorskip("ray")
    from engine_trainer.placement.ray.workers import EngineWorker

    joined: list[str] = []
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda groups, **_: joined.append(groups)
    )
    monkeypatch.setattr("engine_trainer.placement.ray.workers.reach_store", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    fake = SimpleNamespace(device_count=lambda: 1, set_device=lambda _: None)
    monkeypatch.setattr(Npu, "module", fake)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    os.environ.pop(SIMULATED_NPU, None)
    for device in ("cpu", "npu"):
        EngineWorker("engine-1").join(("127.0.0.1", 1), 1, 2, device, 5.0)
    assert joined == ["gloo", "cpu:gloo,npu:hccl"]


def test_the_local_rollout_says_what_an_npu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIMULATED_NPU, raising=False)
    monkeypatch.setattr(
        probe, "look", lambda: Host(npus=8, driver=True, visible=8, torch="2.12.0+cpu")
    )
    with pytest.raises(PluginUnavailable, match="cannot run on device 'npu' here") as caught:
        RolloutRegistry.resolve(backend="local", device="npu")
    assert "8 NPUs, but torch_npu is not installed" in caught.value.trace[0]
    assert "torch_npu==2.12.0" in caught.value.remedy
