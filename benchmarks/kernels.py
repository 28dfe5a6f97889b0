"""The rollout's kernels on one GPU, in GB/s over the weights of Qwen3-8B's decoder.

``python -m benchmarks.kernels`` measures quantization, cast and checksum over 36 layers (6.9
billion random weights). The output is one JSON line per row: the median of 20 passes over all
tensors by CUDA events, after 3 passes of warm-up; the bytes read and written; and the host's time
for one call of one layer's tensors while the device is busy. ``--layers 4`` is for a smaller GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.fp8.quantize import QuantizePlan, empty_like
from rollout_fp8.kernels.cast import CastPlan
from rollout_fp8.kernels.table import layouts
from rollout_fp8.wire.checksum import ChecksumPlan

HIDDEN, INTERMEDIATE, QUERIES, KEYS = 4096, 12288, 4096, 1024
LAYER = (
    (QUERIES, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, QUERIES),
    (INTERMEDIATE, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)
CALL = 9
"""Layers per call: they have about 60 tensors, as has a bucket of a sync."""
Work = Callable[[], None]


def median_ms(work: Work, repeats: int) -> float:
    """Return the median of the device's time for ``work``, in ms."""
    times = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(call: Work) -> float:
    """Return the host's time for one call that only queues work, the least of 50, in µs."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def num_bytes(*lists: list[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)


def chunks(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each call."""
    size = CALL * len(LAYER)
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]


def weights(layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random weights of ``layers`` layers."""
    return [
        torch.randn(shape, device="cuda", dtype=dtype) * 0.02
        for _ in range(layers)
        for shape in LAYER
    ]


def quantizing(layers: int, dtype: torch.dtype, policy: str) -> tuple[list[Work], int]:
    """Return the calls that quantize every weight, and the bytes that they move."""
    sources = weights(layers, dtype)
    results = [empty_like(w) for w in sources]
    outs, scales = [r.weight for r in results], [r.scales for r in results]
    calls: list[Work] = []
    for w, q, s in zip(chunks(sources), chunks(outs), chunks(scales), strict=True):
        plan = QuantizePlan(
            layouts(w),
            layouts(q),
            layouts(s),
            scales=policy,  # pyright: ignore[reportArgumentType]
        )
        calls.append(lambda plan=plan, w=w, q=q, s=s: plan.run(w, q, s))
    return calls, num_bytes(sources, outs, scales)


def casting(layers: int, source: torch.dtype, out: torch.dtype) -> tuple[list[Work], int]:
    """Return the calls that cast every weight, and the bytes that they move."""
    sources = weights(layers, source)
    outs = [torch.empty_like(w, dtype=out) for w in sources]
    calls: list[Work] = []
    for a, b in zip(chunks(sources), chunks(outs), strict=True):
        plan = CastPlan(layouts(a), layouts(b))
        calls.append(lambda plan=plan, a=a, b=b: plan.run(a, b))
    return calls, num_bytes(sources, outs)


def summing(layers: int, dtype: torch.dtype) -> tuple[list[Work], int]:
    """Return the calls that add up every weight's checksum, and the bytes that they read."""
    parts = [w.to(dtype) for w in weights(layers, torch.bfloat16)]
    out = torch.zeros(len(parts), dtype=torch.int64, device="cuda")
    calls: list[Work] = []
    for i, p in enumerate(chunks(parts)):
        first = i * CALL * len(LAYER)
        groups = range(first, first + len(p))
        plan = ChecksumPlan(layouts(p), [ShardSpec.whole(x.shape) for x in p], groups)
        calls.append(lambda plan=plan, p=p: plan.run(p, out))
    return calls, num_bytes(parts)


def cases(layers: int) -> Iterator[tuple[str, list[Work], int]]:
    """Yield name, calls and bytes of one case after the other, so that only one holds memory."""
    for dtype in (torch.float32, torch.bfloat16):
        for policy in ("fp32", "pow2"):
            yield f"quantize {dtype} scales={policy}", *quantizing(layers, dtype, policy)
    yield "cast torch.float32 torch.bfloat16", *casting(layers, torch.float32, torch.bfloat16)
    yield "copy torch.bfloat16", *casting(layers, torch.bfloat16, torch.bfloat16)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        yield f"checksum {dtype}", *summing(layers, dtype)


def main() -> None:
    """Print one JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    for name, calls, size in cases(options.layers):

        def everything(calls: list[Work] = calls) -> None:
            for call in calls:
                call()

        ms = median_ms(everything, options.repeats)
        row = {
            "case": name,
            "layers": options.layers,
            "gb": round(size / 1e9, 2),
            "ms": round(ms, 3),
            "gb_per_s": round(size / ms / 1e6),
            "host_us_per_call": round(host_us(calls[0]), 1),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
        }
        print(json.dumps(row), flush=True)
        calls.clear()


if __name__ == "__main__":
    main()
