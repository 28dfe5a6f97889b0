"""Kernels and precision of CUDA against float64, skipped where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine_torch.attention import build_packing, packed_attention
from engine_torch.head import chunked_log_probs

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
