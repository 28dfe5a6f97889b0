"""Kernels and precision of CUDA against float64, skipped where there is no GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from engine_api.batch import Batch
from engine_api.config import EngineConfig, Memory, ModelSource, OptimizerConfig
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry
from engine_fsdp.attention import build_packing, packed_attention
from engine_fsdp.head import chunked_log_probs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PACKS = {
    "equal": [512] * 4,
    "long": [1100, 2048, 1025],
    "odd": [777, 1301, 129, 3, 1, 64],
    "short": [5, 17, 1, 64, 3],
    "one": [1536],
}


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Compute attention ``[1, H, T, d]`` in float64, one document at a time."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for part in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        query = part[0]
        key = part[1].repeat_interleave(groups, 1)
        value = part[2].repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(q.shape[-1])
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        out.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value)
    return torch.cat(out, dim=2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kernel", ["varlen", "cudnn", "auto"])
@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.filterwarnings("ignore")
def test_attention_and_its_gradients(kernel: str, name: str, kv_heads: int) -> None:
    lengths = PACKS[name]
    device = torch.device("cuda")
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), 128) for heads in (8, kv_heads, kv_heads)]
    leaves = [
        torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    grad = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
    want = reference(*exact, lengths)
    want.backward(grad.double())
    got, _ = packed_attention(
        torch.nn.Module(), *leaves, None, packing=build_packing(lengths, kernel, device)
    )
    got.transpose(1, 2).backward(grad)
    assert relative(got.transpose(1, 2), want) < 1e-2
    for ours, theirs in zip(leaves, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 2e-2


@pytest.mark.parametrize("chunk", [512, 300, 4096])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_head_in_bfloat16(chunk: int, entropy: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(5000, 256, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, 5000, (1000,), device="cuda")
    a = torch.randn(1000, device="cuda")
    b = torch.randn(1000, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = ((exact[0] @ exact[1].T) / 0.7).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None])[:, 0]
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (want @ a.double() + (want_entropy @ b.double() if entropy else 0.0)).backward()
    got, got_entropy = chunked_log_probs(
        hidden, weight, targets, temperature=0.7, chunk=chunk, entropy=entropy
    )
    (got @ a + (got_entropy @ b if got_entropy is not None else 0.0)).backward()
    # The logits are about 10, in bfloat16.
    assert float((got.double() - want).abs().max()) < 0.1
    if got_entropy is not None:
        assert float((got_entropy.double() - want_entropy).abs().max()) < 0.05
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 1e-2


def small_engine(folder: Path, **memory: Any) -> Any:
    model = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaConfig(**model).save_pretrained(folder)
    config = EngineConfig(
        model=ModelSource(path=str(folder), init="random"),
        optimizer=OptimizerConfig(),
        memory=Memory(**memory),
    )
    engine = EngineRegistry.create(
        model_type="language_model", backend="fsdp2", device="cuda", config=config
    )
    engine.initialize()
    return engine


@pytest.mark.parametrize("offload", [False, True], ids=["between-calls", "optimizer-always"])
def test_a_checkpoint_that_is_loaded_while_the_engine_is_away_is_trained_on(
    tmp_path: Path, offload: bool
) -> None:
    batch = Batch.pack([{"input_ids": list(range(1, 40)), "loss_weight": [0.0] + [1.0] * 38}])
    engine = small_engine(tmp_path / "model", offload_optimizer=offload)
    engine.train_batch(batch, sft_loss)
    engine.save_checkpoint(tmp_path / "one")
    want = [engine.train_batch(batch, sft_loss).loss for _ in range(2)]
    engine.to("cpu")
    engine.load_checkpoint(tmp_path / "one")
    moments = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    # Not on the device, which other programs use meanwhile.
    assert {value.device.type for value in moments} == {"cpu"}
    engine.to("cuda")
    got = [engine.train_batch(batch, sft_loss).loss for _ in range(2)]
    engine.close()
    assert got == want


def test_what_moves_away_leaves_its_memory_to_others(tmp_path: Path) -> None:
    # Bytes of the embedding alone, in float32.
    size = 64 << 20
    model = {
        "vocab_size": 65536,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaConfig(**model).save_pretrained(tmp_path)
    config = EngineConfig(
        model=ModelSource(path=str(tmp_path), init="random"), optimizer=OptimizerConfig()
    )
    engine = EngineRegistry.create(
        model_type="language_model", backend="fsdp2", device="cuda", config=config
    )
    engine.initialize()
    before = torch.cuda.memory_reserved()
    engine.to("cpu")
    left = torch.cuda.memory_reserved()
    engine.to("cuda")
    engine.close()
    assert before - left > size, (before, left)
