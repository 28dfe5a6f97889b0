"""The chunked head beside Liger's and cut-cross-entropy's on one GPU, on the same work.

``python -m benchmarks.heads --hidden 1024 --tokens 16384`` prints one JSON line for each kernel and
each kind of work:

- *known*: forward and backward of a sum of log-probs with weights known beforehand, as in SFT;
- *any*: the same with weights that only the backward pass knows, as in RL;
- *none*: log-probs without gradients.

A line has the median milliseconds of ``--rounds`` passes after 3, the memory beyond inputs and
results, and the largest differences of log-probs (nats) and of the two gradients (share of the
largest element) from the same work in float32. Packages that are not installed (``liger-kernel``,
``cut-cross-entropy``) are left out, and the last line names them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine_torch.head import chunked_log_probs

VOCABULARY = 151936
KINDS = ("known", "any", "none")
# (hidden, weight, targets, weights of the tokens where they are known) → log-probs.
Head = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def compute_chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, known: Tensor | None, *, chunk: int
) -> Tensor:
    """Compute with engine-torch's head."""
    log_probs, _ = chunked_log_probs(
        hidden, weight, targets, temperature=1.0, chunk=chunk, entropy=False, coefficients=known
    )
    return log_probs


def compute_liger(hidden: Tensor, weight: Tensor, targets: Tensor, known: Tensor | None) -> Tensor:
    """Compute with Liger's fused head, gradients accumulated in float32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    del known
    apply: Any = LigerFusedLinearCrossEntropyFunction.apply
    # Bias, weights of classes, ignored id, z-loss, smoothing, reduction, cap, z-loss wanted, dtype.
    losses = apply(
        hidden, weight, targets, None, None, -100, 0.0, 0.0, "none", None, False, torch.float32
    )
    return -losses[0]


def compute_cut(hidden: Tensor, weight: Tensor, targets: Tensor, known: Tensor | None) -> Tensor:
    """Compute with cut-cross-entropy, without its filter, which drops small gradients."""
    from cut_cross_entropy import linear_cross_entropy

    del known
    losses: Tensor = linear_cross_entropy(
        hidden, weight, targets, reduction="none", filter_eps=None
    )
    return -losses


def run_once(
    head: Head, kind: str, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return the log-probs, and the gradients of hidden states and weight unless kind is none."""
    hidden, weight, targets, factors = inputs
    if kind == "none":
        with torch.no_grad():
            return (head(hidden, weight, targets, None),)
    log_probs = head(hidden, weight, targets, factors if kind == "known" else None)
    gradients = torch.autograd.grad((log_probs * factors).sum(), (hidden, weight))
    return (log_probs.detach(), *gradients)


def measure(head: Head, kind: str, inputs: Any, rounds: int) -> dict[str, float]:
    """Return the median time of a pass and its memory."""
    times: list[float] = []
    device = inputs[0].device
    for _ in range(rounds + 3):
        _wait(device)
        begin = time.perf_counter()
        results = run_once(head, kind, inputs)
        _wait(device)
        times.append(time.perf_counter() - begin)
        del results
    peak = 0.0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run_once(head, kind, inputs)
        kept = sum(one.nbytes for one in results)
        peak = (torch.cuda.max_memory_allocated() - before - kept) / 2**30
    return {"ms": round(statistics.median(times[3:]) * 1e3, 2), "extra_gib": round(peak, 2)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    """Return the largest difference of log-probs in nats, and of a gradient by its largest."""
    apart = [float((found[0].float() - wanted[0]).abs().max())]
    for one, other in zip(found[1:], wanted[1:], strict=False):
        apart.append(float((one.float() - other).abs().max() / other.abs().max()))
    return [round(one, 6) for one in apart]


def main() -> None:
    """Measure each head on each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    hidden = torch.randn(options.tokens, options.hidden, generator=generator)
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator) * 0.03
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    factors = torch.rand(options.tokens, generator=generator) / options.tokens
    given = [one.to(options.device, dtype).requires_grad_() for one in (hidden, weight)]
    inputs = (given[0], given[1], targets.to(options.device), factors.to(options.device))
    single = [one.detach().float().requires_grad_() for one in given]
    exact = (single[0], single[1], *inputs[2:])
    # The logits of a chunk take 1 GiB.
    chunk = max(256, (1 << 30) // (2 * options.vocabulary) // 256 * 256)
    heads: dict[str, Head] = {"engine-torch": partial(compute_chunked, chunk=chunk)}
    absent: list[str] = []
    for name, module, head in (
        ("liger", "liger_kernel", compute_liger),
        ("cut-cross-entropy", "cut_cross_entropy", compute_cut),
    ):
        if importlib.util.find_spec(module) is None or options.device == "cpu":
            absent.append(name)
        else:
            heads[name] = head
    wanted = run_once(partial(compute_chunked, chunk=1024), "any", exact)
    del exact, single
    for kind in KINDS:
        for name, head in heads.items():
            found = run_once(head, kind, inputs)
            row: dict[str, Any] = {"head": name, "work": kind}
            row |= {"tokens": options.tokens, "hidden": options.hidden, "chunk": chunk}
            row["apart"] = compare(found, wanted)
            del found
            row |= measure(head, kind, inputs, options.rounds)
            print(json.dumps(row), flush=True)
    print(json.dumps({"absent": absent, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
