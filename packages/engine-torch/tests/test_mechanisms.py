"""Caps, sinks, unequal widths, and what a head does, each against plain PyTorch in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_reference import random_inputs, random_sinks, reference
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from engine_torch import attention, flex, head, mechanisms, mixers, plain, varlen
from engine_torch.attention import build_packing, packed_attention, register_kernel
from engine_torch.head import chunked_log_probs

CPU = torch.device("cpu")
LENGTHS = [9, 1, 30, 2]


def compute(
    inputs: list[Tensor], kernel: str, lengths: list[int] = LENGTHS, **scores: Any
) -> Tensor:
    packing = build_packing(lengths, kernel, CPU)
    out, _ = packed_attention(torch.nn.Identity(), *inputs, None, packing=packing, **scores)
    return out.transpose(1, 2)


def require_equal_gradients(
    got: Tensor, want: Tensor, ours: list[Tensor], theirs: list[Tensor], atol: float
) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)
    grad = torch.linspace(-1, 2, got.numel(), dtype=got.dtype).reshape(got.shape)
    got.backward(grad)
    want.backward(grad)
    for own, exact in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(own.grad, exact.grad, atol=30 * atol, rtol=0)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("block", [3, 512])
def test_caps_and_sinks_with_a_window_and_unequal_widths(
    monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None, sinks: bool, block: int
) -> None:
    """Blocks of queries are shorter than documents in one of the two sizes."""
    monkeypatch.setattr(plain, "_BLOCK", block)
    ours = random_inputs(
        sum(LENGTHS), heads=4, kv_heads=2, width=8, value_width=5, dtype=torch.float64
    )
    if sinks:
        ours.append(random_sinks(4, torch.float64))
    theirs = copies(ours)
    asked: dict[str, Any] = {"sliding_window": window, "softcap": cap}
    got = compute(ours[:3], "sdpa", **asked, s_aux=ours[3] if sinks else None)
    want = reference(
        *theirs[:3], LENGTHS, window=window, cap=cap, sinks=theirs[3] if sinks else None
    )
    require_equal_gradients(got, want, ours, theirs, 1e-12)


def test_caps_and_sinks_in_bfloat16_are_computed_in_float32() -> None:
    inputs = random_inputs(
        sum(LENGTHS), heads=4, kv_heads=4, width=8, value_width=8, dtype=torch.bfloat16
    )
    sinks = random_sinks(4, torch.bfloat16)
    want = reference(
        *(x.detach().double() for x in inputs), LENGTHS, cap=2.0, sinks=sinks.detach().double()
    )
    got = compute(inputs, "sdpa", softcap=2.0, s_aux=sinks)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=0)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
    """Stand in for FlashAttention 2 on a CPU: the result, and the log-sum-exp ``[H, T]``."""
    window = options["window_size_left"] + 1
    out, sums = plain.plain_packed(q, k, v, None, rest[0].long(), options["scale"], 0.0, window)
    return out, sums.transpose(0, 1).contiguous()


def flash_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **o: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for the backward pass of FlashAttention 2 on a CPU."""
    bounds, window = rest[0].long(), o["window_size_left"] + 1
    sums = lse.transpose(0, 1).contiguous()
    return plain._backward_op(grad, q, k, v, out, sums, bounds, o["scale"], 0.0, window)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_correct_flash_attention(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """The kernel knows no sinks, and its backward pass is given the corrected result."""
    monkeypatch.setattr(varlen, "_forward", flash_forward)
    monkeypatch.setattr(varlen, "_gradient", flash_gradient)
    ours = random_inputs(
        sum(LENGTHS), heads=4, kv_heads=2, width=8, value_width=5, dtype=torch.float32
    )
    ours.append(random_sinks(4, torch.float32))
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    got = compute(ours[:3], "varlen", sliding_window=window, s_aux=ours[3]).double()
    want = reference(*theirs[:3], LENGTHS, window=window, sinks=theirs[3])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    (got * torch.linspace(-1, 2, 4)[:, None, None]).sum().backward()
    (want * torch.linspace(-1, 2, 4)[:, None, None]).sum().backward()
    for own, exact in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(own.grad.double(), exact.grad, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 1, 8, 7, 10, 2], [5, 5, 5]])
def test_wide_heads_run_on_batches_of_documents(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], window: int | None
) -> None:
    """FlashAttention 2 takes heads up to 256 wide."""
    monkeypatch.setattr(attention, "VARLEN_WIDTH", 4)
    ours = random_inputs(
        sum(lengths), heads=4, kv_heads=2, width=8, value_width=5, dtype=torch.float64
    )
    theirs = copies(ours)
    got = compute(ours, "cudnn", lengths, sliding_window=window)
    want = reference(*theirs, lengths, window=window)
    require_equal_gradients(got, want, ours, theirs, 1e-12)


def test_other_lengths_compile_no_wide_heads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "VARLEN_WIDTH", 4)
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def attend(q: Tensor, k: Tensor, v: Tensor, packing: attention.Packing) -> Tensor:
        scores = attention._Scores(scale=None, window=None)
        return attention._attend(q * 2, k, v, packing, scores) * 2

    counts: list[int] = []
    for lengths in ([6, 6], [3, 9], [1, 2, 9], [12]):
        packing = build_packing(lengths, "cudnn", CPU)
        attend(*(x[None] for x in torch.ones(3, 4, 12, 8)), packing)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


@pytest.mark.parametrize(("argument", "name"), [("softcap", "softcap"), ("s_aux", "sinks")])
def test_a_registered_kernel_refuses_what_it_would_leave_out(
    monkeypatch: pytest.MonkeyPatch, argument: str, name: str
) -> None:
    monkeypatch.setattr(attention, "_ADDED", {})
    register_kernel("other", lambda q, *_: q)
    inputs = random_inputs(
        sum(LENGTHS), heads=4, kv_heads=4, width=8, value_width=8, dtype=torch.float32
    )
    given = {"softcap": 2.0, "s_aux": random_sinks(4, torch.float32)}[argument]
    with pytest.raises(attention.UnsupportedCapability, match=name):
        compute(inputs, "other", **{argument: given})


# --- the head -----------------------------------------------------------------------------------

TOKENS = 13


def exact_head(
    parts: list[Tensor], targets: Tensor, temperature: float, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    hidden, weight, *bias = parts
    logits = hidden @ weight.T + (bias[0] if bias else 0.0)
    scores = logits * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    log_p = (scores / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=["eager", "as compiled"])
def gradient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the gradient that devices without a compiler use, or the other without compiling it."""
    if request.param == "as compiled":
        monkeypatch.setattr(head, "_fused", lambda function, _: function)


@pytest.mark.usefixtures("gradient")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_head_with_a_scale_a_cap_and_a_bias(
    bias: bool, cap: float | None, scale: float, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, 6), (17, 6), (17,)][: 3 if bias else 2]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    targets = torch.randint(17, (TOKENS,), generator=generator)
    a = torch.linspace(-1, 2, TOKENS)
    b = torch.linspace(1, -0.5, TOKENS)
    want, want_entropy = exact_head(theirs, targets, 0.7, scale, cap)
    (want @ a.double() + want_entropy @ b.double()).backward()
    options: dict[str, Any] = {
        "temperature": 0.7,
        "chunk": chunk,
        "bias": ours[2] if bias else None,
        "scale": scale,
        "cap": cap,
    }
    got, got_entropy = chunked_log_probs(ours[0], ours[1], targets, entropy=True, **options)
    assert got_entropy is not None
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got_entropy.double(), want_entropy, atol=1e-5, rtol=0)
    (got @ a + got_entropy @ b).backward()
    for own, exact in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(own.grad.double(), exact.grad, atol=3e-5, rtol=0)


@pytest.mark.usefixtures("gradient")
def test_a_known_gradient_of_a_head_with_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [
        torch.randn(s, generator=generator).requires_grad_() for s in ((TOKENS, 6), (17, 6), (17,))
    ]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    targets = torch.randint(17, (TOKENS,), generator=generator)
    a = torch.linspace(-1, 2, TOKENS)
    (exact_head(theirs, targets, 1.0, 0.4, 2.0)[0] @ a.double()).backward()
    got, _ = chunked_log_probs(
        *ours[:2],
        targets,
        temperature=1.0,
        chunk=4,
        entropy=False,
        coefficients=2 * a,
        bias=ours[2],
        scale=0.4,
        cap=2.0,
    )
    (got @ a).backward()
    for own, exact in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(own.grad.double(), exact.grad, atol=3e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_caps_by_flex_attention(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """It has no backward pass on a CPU: test_cuda has that."""
    monkeypatch.setattr(flex, "_compiled", lambda function, **_: function)
    inputs = random_inputs(
        sum(LENGTHS), heads=4, kv_heads=2, width=16, value_width=16, dtype=torch.float32
    )
    bare = [x.detach() for x in inputs]
    got = compute(bare, "varlen", sliding_window=window, softcap=0.7)
    want = reference(*(x.detach().double() for x in inputs), LENGTHS, window=window, cap=0.7)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=0)


# --- layers that carry a state ------------------------------------------------------------------


class ShortConvolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3, groups=4, padding=2)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return self.conv(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]].transpose(
            1, 2
        )


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 9, 8, 7, 2, 10], [5, 5, 5]])
def test_a_mixer_computes_each_document_as_if_it_were_alone(lengths: list[int]) -> None:
    lm = torch.nn.ModuleDict({"conv": ShortConvolution()})
    assert list(mixers.find_mixers(lm)) == ["conv"]
    x = torch.randn(1, sum(lengths), 4, requires_grad=True)
    slopes = torch.randn(1, sum(lengths), 4)
    parameters = [x, *lm.parameters()]
    want = torch.cat([lm["conv"](part) for part in x.split(lengths, dim=1)], dim=1)
    exact = torch.autograd.grad((want * slopes).sum(), parameters)
    documents = mixers.divide_mixers(lm, None)
    documents.set(build_packing(lengths, "sdpa", CPU))
    got = lm["conv"](hidden_states=x)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.autograd.grad((got * slopes).sum(), parameters), exact)
    documents.set(None)
    assert not torch.allclose(lm["conv"](x), want)


class Counting(ShortConvolution):
    """A mixer that notes the shapes of its batches, and returns further outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        self.shapes.append(tuple(hidden_states.shape))
        return super().forward(hidden_states), position_ids, None


def test_documents_of_about_one_length_are_one_batch() -> None:
    lm = torch.nn.ModuleDict({"conv": Counting()})
    lengths = [7, 100, 8, 99, 75, 74, 8]
    mixers.divide_mixers(lm, None).set(build_packing(lengths, "sdpa", CPU))
    x = torch.randn(1, sum(lengths), 4)
    hidden, positions, nothing = lm["conv"](x, position_ids=torch.arange(sum(lengths))[None])
    assert lm["conv"].shapes == [(3, 100, 4), (1, 74, 4), (3, 8, 4)]
    assert hidden.shape == x.shape
    assert positions.tolist() == [[at for length in lengths for at in range(length)]]
    assert nothing is None


def test_a_mixer_with_a_mask_of_tokens_is_refused() -> None:
    lm = torch.nn.ModuleDict({"conv": ShortConvolution()})
    mixers.divide_mixers(lm, None).set(build_packing([3], "sdpa", CPU))
    with pytest.raises(attention.UnsupportedCapability, match="mask"):
        lm["conv"](torch.zeros(1, 3, 4), mask=torch.ones(1, 3))


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_layers_that_select_tokens_are_known_by_both_of_their_names(kind: str) -> None:
    text = SimpleNamespace(layer_types=["full_attention", kind])
    assert mechanisms.selects_tokens(text)
    assert [one.name for one in mechanisms.MECHANISMS if one.find(text, None, None)] == [
        "sparse_attention"
    ]
    text.layer_types.append("qwen_sparse_attention")
    found = {one.name: one.find(text, None, None) for one in mechanisms.MECHANISMS}
    assert found["other_layers"] == "layers of type qwen_sparse_attention"


class GatedDelta(torch.nn.Module):
    """A mixer by the names of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "is_refused"),
    [
        ("3.6.0", (9, 0), None, True),
        ("3.6.0", (9, 0), "there", False),
        ("3.6.0", (8, 0), None, False),
        ("3.7.1", (9, 0), None, False),
        ("3.3.1", (9, 0), None, False),
    ],
)
def test_gradients_that_triton_miscompiles_are_refused(
    triton: str,
    capability: tuple[int, int],
    tilelang: str | None,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = torch.nn.ModuleDict({"mixer": GatedDelta()})
    monkeypatch.setattr(mixers.importlib.util, "find_spec", lambda _: tilelang)
    monkeypatch.setattr(mixers, "version", lambda _: triton)
    gpu = SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    mixers.refuse_wrong_gradients(lm, "cpu", "engine")
    if not is_refused:
        mixers.refuse_wrong_gradients(lm, "cuda", "engine")
        return
    with pytest.raises(attention.UnsupportedCapability, match=r"Triton 3\.6\.0") as caught:
        mixers.refuse_wrong_gradients(lm, "cuda", "engine")
    assert "tilelang" in caught.value.remedy


def test_a_mixer_on_cuda_needs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = torch.nn.ModuleDict({"conv": ShortConvolution()})
    monkeypatch.setattr(mixers.importlib.util, "find_spec", lambda _: None)
    mixers.refuse_without_kernels(lm, "cpu", "engine")
    with pytest.raises(attention.UnsupportedCapability) as caught:
        mixers.refuse_without_kernels(lm, "cuda", "engine")
    assert caught.value.capability == "linear_attention"
    assert caught.value.remedy == "pip install causal-conv1d"
