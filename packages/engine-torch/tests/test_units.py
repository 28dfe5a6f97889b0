"""The chunked head and attention over packs, without an engine."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torch import head
from engine_torch.attention import (
    build_context_packing,
    build_packing,
    check_heads,
    choose_kernel,
    packed_attention,
)
from engine_torch.context import build_context
from engine_torch.head import VocabularyShard, chunked_log_probs
from engine_torch.model import is_recomputing_blocks, recompute_blocks

TOKENS = 13
HIDDEN = 6
VOCABULARY = 17


def head_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T + (0.0 if bias is None else bias)) * scale
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 5, TOKENS, 100])
def test_chunked_head_equals_autograd(chunk: int, temperature: float) -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, entropy=True
    )
    assert entropy is not None
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    want = plain_head(exact_hidden, exact_weight, targets, temperature)
    for got, exact in zip((log_probs, entropy), want, strict=True):
        torch.testing.assert_close(got.double(), exact, atol=3e-6, rtol=0)
    a = torch.linspace(-1, 2, TOKENS)
    b = torch.linspace(1, -0.5, TOKENS)
    (log_probs @ a + entropy @ b).backward()
    (want[0] @ a.double() + want[1] @ b.double()).backward()
    for got, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert got is not None
        assert exact is not None
        torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=0)


def test_chunked_head_without_entropy_and_with_a_frozen_weight() -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    weight.requires_grad_(requires_grad=False)
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, temperature=1.0, chunk=4, entropy=False
    )
    assert entropy is None
    log_probs.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    plain_head(exact, weight.double(), targets, 1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=2e-5, rtol=0)
    assert weight.grad is None


@pytest.mark.parametrize(("chunk", "rows"), [(4, 2), (5, 5), (100, 50)])
def test_a_pass_without_gradients_takes_half_the_memory_and_rounds_alike(
    monkeypatch: pytest.MonkeyPatch, chunk: int, rows: int
) -> None:
    hidden, weight, targets = head_inputs(torch.bfloat16)
    products: list[int] = []
    memories: set[int] = set()
    compute = head.logits_of

    def watched(*given: Any, out: Tensor) -> Tensor:
        products.append(len(out))
        memories.add(out.untyped_storage().nbytes())
        return compute(*given, out=out)

    monkeypatch.setattr(head, "logits_of", watched)
    options: dict[str, Any] = {"temperature": 1.0, "chunk": chunk, "entropy": False}
    trained, _ = chunked_log_probs(hidden, weight, targets, **options)
    of_training, products, largest = products, [], max(memories)
    memories.clear()
    with torch.no_grad():
        inferred, _ = chunked_log_probs(hidden, weight, targets, **options)
    assert torch.equal(trained, inferred)
    assert products == of_training
    assert max(products) <= rows
    assert len(memories) == 1
    width = weight.shape[0] * weight.element_size()
    assert memories == {min(rows, TOKENS) * width}
    assert largest == min(chunk, TOKENS) * width


def test_chunked_head_of_no_tokens() -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    log_probs, _ = chunked_log_probs(
        hidden[:0], weight, targets[:0], temperature=1.0, chunk=4, entropy=True
    )
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


@dataclass
class Exchange:
    """Values that threads, which stand for ranks, give each other."""

    ranks: int
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=60)


@dataclass(frozen=True, kw_only=True)
class ThreadShard(VocabularyShard):
    """A part of the vocabulary in a thread."""

    rank: int

    def gather(self, values: Tensor) -> Tensor:
        self.group.values[self.rank] = values
        self.group.barrier.wait()
        found = torch.stack([self.group.values[rank] for rank in range(self.group.ranks)])
        self.group.barrier.wait()
        return found


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("bounds", [(0, 9, 17), (0, 1, 16, 17)])
@pytest.mark.parametrize("special", [{}, {"scale": 0.4}, {"scale": 0.4, "cap": 1.5}], ids=str)
@pytest.mark.parametrize("elementwise", ["eager", "as compiled"])
def test_a_divided_vocabulary_gives_the_log_probs_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[int, ...],
    chunk: int,
    known: bool,
    special: dict[str, float],
    elementwise: str,
) -> None:
    """Each rank's gradient of the hidden states is an addend, that of the weight its own part.

    A head with a scale or a cap is given a bias, too, of which each rank has its part.
    """
    if elementwise == "as compiled":
        # The gradient of devices with a compiler, without compiling it.
        monkeypatch.setattr(head, "_fused", lambda function, _: function)
    hidden, weight, targets = head_inputs(torch.float32)
    bias = torch.linspace(-1.0, 0.5, VOCABULARY) if special else None
    ranks = len(bounds) - 1
    exchange = Exchange(ranks)
    upstream = torch.linspace(-1, 2, TOKENS)
    found: dict[int, tuple[Tensor, ...]] = {}

    def run(rank: int) -> None:
        own_hidden = hidden.detach().clone().requires_grad_()
        rows = slice(bounds[rank], bounds[rank + 1])
        own = weight.detach()[rows].clone().requires_grad_()
        own_bias = None if bias is None else bias[rows].clone().requires_grad_()
        log_probs, entropy = chunked_log_probs(
            own_hidden,
            own,
            targets,
            temperature=0.6,
            chunk=chunk,
            entropy=True,
            coefficients=upstream if known else None,
            shard=ThreadShard(group=exchange, first=bounds[rank], rank=rank),
            bias=own_bias,
            **special,
        )
        assert entropy is not None
        loss = log_probs @ upstream
        # With known coefficients the entropy of several chunks is not trained on.
        (loss if known else loss + entropy.sum()).backward()
        assert own_hidden.grad is not None
        assert own.grad is not None
        found[rank] = (log_probs.detach(), entropy.detach(), own_hidden.grad, own.grad)
        if own_bias is not None:
            assert own_bias.grad is not None
            found[rank] += (own_bias.grad,)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == ranks

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact_bias = None if bias is None else bias.double().requires_grad_()
    want = plain_head(exact_hidden, exact_weight, targets, 0.6, bias=exact_bias, **special)
    loss = want[0] @ upstream.double()
    (loss if known else loss + want[1].sum()).backward()
    assert exact_hidden.grad is not None
    assert exact_weight.grad is not None
    for rank in range(ranks):
        assert torch.equal(found[rank][0], found[0][0])
        assert torch.equal(found[rank][1], found[0][1])
    torch.testing.assert_close(found[0][0].double(), want[0], atol=3e-6, rtol=0)
    torch.testing.assert_close(found[0][1].double(), want[1], atol=3e-6, rtol=0)
    d_hidden = torch.stack([one[2] for one in found.values()]).sum(0)
    d_weight = torch.cat([found[rank][3] for rank in range(ranks)])
    torch.testing.assert_close(d_hidden.double(), exact_hidden.grad, atol=2e-5, rtol=0)
    torch.testing.assert_close(d_weight.double(), exact_weight.grad, atol=2e-5, rtol=0)
    if exact_bias is not None:
        assert exact_bias.grad is not None
        d_bias = torch.cat([found[rank][4] for rank in range(ranks)])
        torch.testing.assert_close(d_bias.double(), exact_bias.grad, atol=2e-5, rtol=0)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[12], [1, 11], [3, 3, 6], [5, 1, 1, 1, 4], [1] * 12])
def test_a_part_of_a_pack_attends_to_the_documents_that_it_is_in(
    lengths: list[int], parts: int
) -> None:
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    whole = (document[:, None] == document[None, :]) & torch.ones(total, total).tril().bool()
    size = total // parts
    for part in range(parts):
        rows = slice(part * size, (part + 1) * size)
        context = build_context(
            lengths, "sdpa", torch.device("cpu"), group=None, parts=parts, part=part
        )
        assert context.mask is not None
        columns = slice(context.first, context.stop)
        assert torch.equal(context.mask[0, 0], whole[rows, columns])
        # No token outside of these columns is attended to.
        assert int(whole[rows].sum()) == int(context.mask.sum())
        assert int(context.cu_queries[-1]) == size
        assert int(context.cu_keys[-1]) == context.stop - context.first
        queries, keys = context.cu_queries.diff(), context.cu_keys.diff()
        assert (context.max_queries, context.max_keys) == (int(queries.max()), int(keys.max()))
        # The kernel for documents lets the last query attend to all keys of its document.
        at = context.cu_queries.tolist()
        for index, (first, stop) in enumerate(itertools.pairwise(at)):
            last = context.mask[0, 0, stop - 1]
            assert int(last.sum()) == int(keys[index])
            assert first < stop


HEADS = 4
KV_HEADS = 2
WIDTH = 8


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"sliding_window": 3}, "a sliding window"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(HEADS)}, "sinks"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_part_of_a_pack_refuses_what_its_attention_would_leave_out(
    extra: dict[str, Any], name: str
) -> None:
    packing = build_context_packing([6], "sdpa", torch.device("cpu"), group=None, parts=2, part=0)
    query = torch.zeros(1, HEADS, 3, WIDTH)
    key = torch.zeros(1, KV_HEADS, 3, WIDTH)
    with pytest.raises(UnsupportedCapability, match=f"{name} under context parallelism"):
        packed_attention(torch.nn.Module(), query, key, key, None, packing=packing, **extra)


def brute_force(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Compute attention ``[1, T, H, d]`` token by token."""
    out = torch.zeros(q.shape[2], HEADS, WIDTH, dtype=q.dtype)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window + 1)
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                scores = k[0, kv, first : t + 1] @ q[0, h, t] / math.sqrt(WIDTH)
                out[t, h] = scores.softmax(0) @ v[0, kv, first : t + 1]
        start += length
    return out[None]


# A long document among short ones takes the block mask, documents of equal length the causal batch.
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[9, 1, 1, 2], [5, 5, 4], [7], [1]], ids=str)
def test_attention_over_a_pack(lengths: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, h, sum(lengths), WIDTH, generator=generator, dtype=torch.float64)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    packing = build_packing(lengths, "sdpa", torch.device("cpu"))
    out, weights = packed_attention(
        torch.nn.Identity(), q, k, v, None, packing=packing, sliding_window=window
    )
    assert weights is None
    torch.testing.assert_close(out, brute_force(q, k, v, lengths, window))


@pytest.mark.parametrize(
    "extra",
    [{"dropout": 0.1}, {"indices": torch.zeros(1)}],
    ids=lambda e: next(iter(e)),
)
def test_attention_refuses_what_it_would_leave_out(extra: dict[str, Any]) -> None:
    x = torch.zeros(1, HEADS, 4, WIDTH)
    packing = build_packing([4], "sdpa", torch.device("cpu"))
    with pytest.raises(UnsupportedCapability) as caught:
        packed_attention(torch.nn.Identity(), x, x, x, None, packing=packing, **extra)
    assert next(iter(extra)) in str(caught.value)


def test_attention_needs_a_packing() -> None:
    x = torch.zeros(1, HEADS, 4, WIDTH)
    with pytest.raises(UnsupportedCapability):
        packed_attention(torch.nn.Identity(), x, x, x, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [
        (8, 2, 1, True),
        (8, 2, 2, True),
        (8, 2, 4, True),
        (8, 8, 8, True),
        (8, 4, 3, False),
        (6, 4, 6, False),
        (8, 2, 16, False),
    ],
)
def test_heads_are_split_over_ranks_or_refused(
    heads: int, kv_heads: int, ranks: int, fits: bool
) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if fits:
        check_heads(config, ranks)
        return
    with pytest.raises(ConfigError, match="cannot be split"):
        check_heads(config, ranks)


def test_heads_of_each_layer_are_split_over_ranks_or_refused() -> None:
    layers = [
        SimpleNamespace(num_attention_heads=heads, num_key_value_heads=heads) for heads in (4, 2)
    ]
    config = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    check_heads(config, 2)
    with pytest.raises(ConfigError, match="2 heads and 2 KV heads cannot be split over 4 ranks"):
        check_heads(config, 4)


@pytest.mark.parametrize("kind", ["gradient", "activation"])
def test_recomputation_is_turned_on_by_the_name_that_transformers_has(kind: str) -> None:
    given: dict[str, Any] = {}
    model = SimpleNamespace(
        **{f"{kind}_checkpointing_enable": given.update, f"is_{kind}_checkpointing": True}
    )
    recompute_blocks(model)
    assert given == {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
    assert is_recomputing_blocks(model)


@pytest.mark.parametrize(
    ("lengths", "kernel"),
    [
        ([512, 512], "cudnn"),
        ([511, 511], "varlen"),
        ([4096, 4000], "varlen"),
        ([9000, 8000], "cudnn"),
        ([20000, 3, 5], "varlen"),
    ],
)
def test_plans_are_made_for_lengths_that_come_again_or_are_long(lengths, kernel):
    assert build_packing(lengths, "auto", torch.device("cpu")).kernel == kernel


def test_kernels_are_chosen_or_refused_by_name() -> None:
    assert choose_kernel("auto", "cpu", "bfloat16") == "sdpa"
    with pytest.raises(ConfigError, match="unknown kernel"):
        choose_kernel("flash", "cpu", "float32")
    with pytest.raises(ConfigError, match="varlen"):
        choose_kernel("varlen", "cpu", "float32")
