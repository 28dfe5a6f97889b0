"""Kernels and precision of CUDA against float64, skipped where there is no GPU.

They need torch and pytest alone. On a machine that cannot install the packages:
``PYTHONPATH=$(python tools/from_source.py /tmp/meta):tests python -m pytest -c /dev/null
--rootdir . --import-mode=importlib packages/engine-torch/tests/test_cuda.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_reference import random_inputs, random_sinks
from attention_reference import reference as exact_attention
from torch import Tensor

from engine_api.devices import move_tensor
from engine_torch.attention import (
    build_packing,
    build_tree_packing,
    choose_kernel,
    packed_attention,
)
from engine_torch.head import chunked_log_probs
from engine_torch.prefixes import mask_of

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


@pytest.mark.parametrize("kernel", ["flex", "sdpa"])
@pytest.mark.parametrize(("prompt", "answers"), [(512, [256] * 4), (129, [77, 1, 300, 5])])
@pytest.mark.filterwarnings("ignore")
def test_attention_in_a_tree_and_its_gradients(
    kernel: str, prompt: int, answers: list[int]
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    size = prompt + sum(answers)
    bounds = torch.tensor([prompt, *answers]).cumsum(0)
    ends = torch.repeat_interleave(bounds, torch.tensor([prompt, *answers]))
    # The prompt's tokens are seen by all of the answers.
    ends[:prompt] = size
    shapes = [(1, heads, size, 128) for heads in (8, 2, 2)]
    leaves = [
        torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    grad = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
    key, value = (x.repeat_interleave(4, 1) for x in exact[1:])
    scores = exact[0] @ key.transpose(-1, -2) / math.sqrt(128)
    hidden = ~mask_of(ends.to(device))
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    want.backward(grad.double())
    packing = build_tree_packing(ends, kernel, device)
    got, _ = packed_attention(torch.nn.Module(), *leaves, None, packing=packing)
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


# Mechanism → heads, heads of keys, width of keys, width of values, and arguments of the layer.
MECHANISMS: dict[str, tuple[tuple[int, int, int, int], dict[str, float]]] = {
    "softcap (Gemma 2)": ((8, 4, 256, 256), {"softcap": 5.0}),
    "softcap and window": ((8, 4, 128, 128), {"softcap": 5.0, "sliding_window": 100}),
    "sinks (gpt-oss)": ((16, 2, 64, 64), {"sinks": 1}),
    "sinks and window (gpt-oss)": ((16, 2, 64, 64), {"sinks": 1, "sliding_window": 128}),
    "unequal widths (MLA)": ((8, 8, 192, 128), {}),
    "unequal widths and sinks (MiMo)": ((8, 2, 192, 128), {"sinks": 1, "sliding_window": 128}),
    "heads of 256 (Gemma)": ((8, 4, 256, 256), {}),
    "heads of 256 and window": ((8, 4, 256, 256), {"sliding_window": 100}),
    "heads of 512 (Gemma 4)": ((8, 2, 512, 512), {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["equal", "odd"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.filterwarnings("ignore")
def test_each_mechanism_of_attention(mechanism: str, name: str, dtype: str, compiled: bool) -> None:
    """The kernel that ``auto`` takes in this dtype, with the gradients of all that goes into it."""
    (heads, kv_heads, width, value_width), asked = MECHANISMS[mechanism]
    lengths = PACKS[name]
    precision = getattr(torch, dtype)
    inputs = random_inputs(
        sum(lengths),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=value_width,
        dtype=precision,
        device="cuda",
    )
    window = asked.get("sliding_window")
    cap = asked.get("softcap")
    if "sinks" in asked:
        inputs.append(random_sinks(heads, precision, "cuda"))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = exact_attention(
        *exact[:3],
        lengths,
        window=None if window is None else int(window),
        cap=cap,
        sinks=exact[3] if "sinks" in asked else None,
    )
    grad = torch.randn(want.shape, device="cuda").to(precision)
    want.backward(grad.double())
    kernel = choose_kernel("auto", "cuda", dtype)
    packing = build_packing(lengths, kernel, torch.device("cuda"))
    attend = torch.compile(packed_attention) if compiled else packed_attention
    got, _ = attend(
        torch.nn.Identity(),
        *inputs[:3],
        None,
        packing=packing,
        sliding_window=window,
        softcap=cap,
        s_aux=inputs[3] if "sinks" in asked else None,
    )
    got.transpose(1, 2).backward(grad)
    near = 2e-2 if dtype == "bfloat16" else 1e-4
    assert relative(got.transpose(1, 2), want) < near
    for ours, theirs in zip(inputs, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < near


@pytest.mark.parametrize("chunk", [300, 4096])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.filterwarnings("ignore")
def test_a_head_with_a_scale_a_cap_and_a_bias(chunk: int, entropy: bool, dtype: str) -> None:
    torch.manual_seed(0)
    precision = getattr(torch, dtype)
    parts = [torch.randn(s, device="cuda") for s in ((1000, 256), (5000, 256), (5000,))]
    parts[1] *= 0.1
    ours = [x.to(precision).requires_grad_() for x in parts]
    exact = [x.detach().double().requires_grad_() for x in ours]
    targets = torch.randint(0, 5000, (1000,), device="cuda")
    a, b = (torch.randn(1000, device="cuda") for _ in range(2))
    scores = torch.tanh((exact[0] @ exact[1].T + exact[2]) * 0.5 / 4.0) * 4.0
    log_p = (scores / 0.7).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None])[:, 0]
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (want @ a.double() + (want_entropy @ b.double() if entropy else 0.0)).backward()
    got, got_entropy = chunked_log_probs(
        *ours[:2],
        targets,
        temperature=0.7,
        chunk=chunk,
        entropy=entropy,
        bias=ours[2],
        scale=0.5,
        cap=4.0,
    )
    (got @ a + (got_entropy @ b if got_entropy is not None else 0.0)).backward()
    near = 0.1 if dtype == "bfloat16" else 1e-3
    assert float((got.double() - want).abs().max()) < near
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert relative(mine.grad, theirs.grad) < (2e-2 if dtype == "bfloat16" else 1e-3)


def test_a_copy_to_the_device_does_not_wait_for_its_work() -> None:
    host = torch.arange(1 << 20)
    move_tensor(host, "cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    # About two seconds of work, of which a copy that waits would see the end.
    torch.cuda._sleep(4 << 30)
    done.record()
    there = move_tensor(host, "cuda")
    assert not done.query()
    # A copy back waits, so that its reader sees the values.
    assert torch.equal(move_tensor(there, "cpu"), host)
    assert done.query()
