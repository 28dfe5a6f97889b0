"""The divergence to a teacher, in chunks and over shards, against float64 and autograd."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from engine_api.distillation import OutputHead, Teaching
from engine_torch.divergence import Taught, chunked_divergence
from engine_torch.head import VocabularyShard

ROWS, WIDTH, TOKENS = 7, 5, 10
STUDENT, TEACHER, TEACHER_WIDTH = 12, 13, 4  # both have rows of padding
TEMPERATURE, BETA = 0.7, 0.3
KINDS = ("reverse_kl", "forward_kl", "jsd")


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEAD = OutputHead(
    weight=draw(TEACHER, TEACHER_WIDTH, seed=1, scale=2.0),
    bias=draw(TEACHER, seed=2),
    scale=1.3,
    cap=4.0,
)
STATES = draw(ROWS, TEACHER_WIDTH, seed=3)
STUDENTS = (
    draw(ROWS, WIDTH, seed=4),
    draw(STUDENT, WIDTH, seed=5, scale=2.0),
    draw(STUDENT, seed=6),
)


def teacher_log_probs() -> Tensor:
    assert HEAD.bias is not None
    z = (STATES.double() @ HEAD.weight.double().T + HEAD.bias.double()) * 1.3
    return (4 * (z / 4).tanh() / TEMPERATURE)[:, :TOKENS].log_softmax(-1)


def best_tokens() -> Tensor:
    """Three of each row, one of them or all of them missing in some rows."""
    ids = teacher_log_probs().topk(3).indices
    ids[2, 1] = -1
    ids[3] = -1
    return ids


def classes_of(log_p: Tensor, ids: Tensor) -> list[Tensor]:
    """Each row's log-probs of the named tokens and of all others together."""
    found = []
    for row, chosen in zip(log_p, ids.tolist(), strict=True):
        named = [one for one in chosen if one >= 0]
        rest = [one for one in range(TOKENS) if one not in named]
        found.append(torch.cat([row[named], row[rest].logsumexp(0)[None]]))
    return found


def exact(kind: str, ids: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The divergence of each row in float64, with a cap of 5 and a scale of 0.9."""
    z = 5 * ((hidden @ weight.T + bias) * 0.9 / 5).tanh() / TEMPERATURE
    log_p = z[:, :TOKENS].log_softmax(-1)
    log_q = teacher_log_probs()
    pairs = zip(log_p, log_q, strict=True)
    if ids is not None:
        pairs = zip(classes_of(log_p, ids), classes_of(log_q, ids), strict=True)
    found = []
    for p, q in pairs:
        middle = (BETA * q.exp() + (1 - BETA) * p.exp()).log()
        reverse = (p.exp() * (p - q)).sum()
        forward = (q.exp() * (q - p)).sum()
        to_middle = BETA * (q.exp() * (q - middle)).sum()
        jsd = to_middle + (1 - BETA) * (p.exp() * (p - middle)).sum()
        found.append({"reverse_kl": reverse, "forward_kl": forward, "jsd": jsd}[kind])
    return torch.stack(found)


def taught_by(kind: str, *, top: bool) -> tuple[Taught, Tensor | None]:
    teaching = Teaching(vocabulary=TOKENS, divergence=kind, beta=BETA, top=top)
    if not top:
        return Taught(teaching=teaching, head=HEAD, states=STATES), None
    ids = best_tokens()
    log_probs = torch.zeros(ROWS, 4)
    for row, (chosen, own) in enumerate(
        zip(ids.tolist(), classes_of(teacher_log_probs(), ids), strict=True)
    ):
        columns = [column for column, one in enumerate(chosen) if one >= 0]
        log_probs[row, [*columns, 3]] = own.float()
    return Taught(teaching=teaching, ids=ids, log_probs=log_probs), ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("chunk", [3, 99])
def test_value_and_gradient_are_those_of_float64(kind: str, top: bool, chunk: int) -> None:
    taught, ids = taught_by(kind, top=top)
    ours = [one.clone().requires_grad_() for one in STUDENTS]
    got = chunked_divergence(
        ours[0],
        ours[1],
        taught,
        temperature=TEMPERATURE,
        chunk=chunk,
        bias=ours[2],
        scale=0.9,
        cap=5.0,
    )
    theirs = [one.double().requires_grad_() for one in STUDENTS]
    want = exact(kind, ids, *theirs)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert (got.detach() > -1e-6).all()
    weights = draw(ROWS, seed=7)
    gradients = torch.autograd.grad((weights * got).sum(), ours)
    wanted = torch.autograd.grad((weights.double() * want).sum(), theirs)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    assert not gradients[1][TOKENS:].any(), "padding of the vocabulary has a gradient"


def test_named_tokens_are_at_most_the_vocabulary() -> None:
    """A sum over classes is no larger than the sum over their parts."""
    options = {"temperature": TEMPERATURE, "chunk": 4, "bias": STUDENTS[2]}
    for kind in KINDS:
        few, many = (
            chunked_divergence(*STUDENTS[:2], taught_by(kind, top=top)[0], **options)
            for top in (True, False)
        )
        assert (few <= many + 1e-6).all()
        assert few[3] == pytest.approx(0.0, abs=1e-6), "no token is named"


def both_ranks(
    taught: Taught, bounds: tuple[int, int, int], upstream: Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Return value and gradients of two ranks, which are threads and divide the vocabulary."""
    barrier = threading.Barrier(2)
    rank_of = threading.local()
    rows = [torch.empty(0)] * 2

    def gather(shard: VocabularyShard, values: Tensor) -> Tensor:
        del shard
        rows[rank_of.rank] = values.detach().clone()
        barrier.wait()
        found = torch.stack(rows)
        barrier.wait()
        return found

    monkeypatch.setattr(VocabularyShard, "gather", gather)

    def run(rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        rank_of.rank = rank
        first, last = bounds[rank : rank + 2]
        hidden, weight = STUDENTS[0], STUDENTS[1][first:last]
        own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        shard = VocabularyShard(group=None, first=first)
        got = chunked_divergence(*own, taught, shard=shard, temperature=TEMPERATURE, chunk=4)
        return got.detach(), torch.autograd.grad((upstream * got).sum(), own)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [False, True])
def test_shards_of_the_vocabulary_add_up(
    kind: str, top: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the ranks may have few of the tokens that count, or none."""
    taught, _ = taught_by(kind, top=top)
    upstream = draw(ROWS, seed=8)
    whole = [one.clone().requires_grad_() for one in STUDENTS[:2]]
    want = chunked_divergence(*whole, taught, temperature=TEMPERATURE, chunk=4)
    wanted = torch.autograd.grad((upstream * want).sum(), whole)
    for bounds in ((0, 9, 12), (0, 4, 12), (0, 10, 12)):
        (one, first), (other, second) = both_ranks(taught, bounds, upstream, monkeypatch)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, want.detach(), rtol=1e-5, atol=1e-5)
        # Each rank's gradient of the hidden states is an addend.
        torch.testing.assert_close(first[0] + second[0], wanted[0], rtol=0, atol=1e-4)
        both = torch.cat([first[1], second[1]])
        torch.testing.assert_close(both, wanted[1], rtol=0, atol=1e-4)
