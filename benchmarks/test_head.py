"""Chunked against full logits (time and peak memory), and the import time of engine_api."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from typing import Any

HEAD = r"""
import re, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from engine_torch.head import chunked_log_probs

torch.set_num_threads(2)
torch.manual_seed(0)
tokens, width, vocabulary = 2048, 256, 32768
hidden = torch.randn(tokens, width, requires_grad=True)
weight = (torch.randn(vocabulary, width) * 0.05).requires_grad_()
targets = torch.randint(0, vocabulary, (tokens,))

def peak():
    # Unlike ru_maxrss it does not begin with the size of the process that started this one.
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()

def full():
    return -F.cross_entropy(hidden @ weight.T, targets, reduction="none").sum()

def chunked():
    return chunked_log_probs(hidden, weight, targets, temperature=1.0, chunk=256,
        entropy=False)[0].sum()

run = {"full": full, "chunked": chunked}[sys.argv[1]]
times = []
for _ in range(4):
    start = time.perf_counter()
    run().backward()
    times.append(time.perf_counter() - start)
print(min(times), (peak() - before) / 1024)
"""


def _head(kind: str) -> tuple[float, float]:
    out = subprocess.run(
        [sys.executable, "-c", HEAD, kind], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(out[0]), float(out[1])


def test_chunked_logits(benchmark: Any) -> None:
    """Forward and backward of the head; the peak is the growth of the memory of its own process."""
    (chunked, chunked_mib), (full, full_mib) = _head("chunked"), _head("full")
    benchmark.extra_info.update(
        shape="2048 tokens, hidden 256, vocabulary 32768, chunks of 256",
        ratio=f"{chunked / full:.2f} (chunked / full time)",
        memory=f"{chunked_mib:.0f} MiB against {full_mib:.0f} MiB",
    )
    benchmark.pedantic(lambda: _head("chunked"), rounds=1)


def _import_seconds(module: str) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        times.append(time.perf_counter() - start)
    return median(times)


def test_import_time(benchmark: Any) -> None:
    """Start of a process that imports the contract, compared with nothing and with torch."""
    api, empty, torch = (
        _import_seconds(m)
        for m in ("engine_api, engine_api.registry, engine_api.base", "sys", "torch")
    )
    benchmark.extra_info.update(
        shape="one process",
        ratio=f"{api / torch:.3f} (engine_api / torch)",
        memory=f"{(api - empty) * 1000:.0f} ms above an empty process",
    )
    benchmark.pedantic(lambda: _import_seconds("engine_api"), rounds=1)
