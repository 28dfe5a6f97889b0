"""The host's work of a weight sync, without the device's: milliseconds of CPU time.

``python -m benchmarks.sync_host`` runs on any machine. A sync reads an engine's export, prepares
the launches of each bucket, and compares checksums. Here the launches do nothing, so that what
remains is Python's time for thousands of tensors, which sets the pace of a model with many experts
on a GPU. The model has the layers and experts of Qwen3-30B-A3B, cut to 12 layers, with tiny
matrices. The output is one JSON line: the least and the median of the syncs after two.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from engine_api import EngineConfig, EngineRegistry, ModelSource, OptimizerConfig
from engine_api.registry import Resolution
from engine_api.weights import ShardSpec
from rollout_fp8.export.exporter import EngineStream, Exporter
from rollout_fp8.install.session import SyncSession
from rollout_fp8.wire.audit import Boxes
from rollout_fp8.wire.format import WirePlan, WireStream

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
# Two buckets, as the model of the true sizes has many.
BUCKET_BYTES = 4 << 20


class Counting:
    """Workers that take each bucket and do nothing with it."""

    def __init__(self) -> None:
        self._count = 0

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """Return each tensor whole."""
        self._count = len(plan.tensors)
        return [[(name, ShardSpec.whole(tensor.shape)) for name, tensor in plan.tensors.items()]]

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """Take the buckets. No checksum was computed, so that all are 0."""
        for _ in stream.buckets():
            pass
        return [([0] * self._count, {})]


def launch_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a launch."""


@contextmanager
def without_launches() -> Iterator[None]:
    """Prepare launches as on CUDA, and make none."""
    kernels = {}
    for name in ("quantize", "copy", "checksum"):
        kernels[f"rollout_fp8.kernels.{name}"] = module = ModuleType(name)
        module.launch = launch_nothing  # type: ignore[attr-defined]
    users = ("rollout_fp8.fp8.quantize", "rollout_fp8.kernels.cast", "rollout_fp8.wire.checksum")
    with mock.patch.dict(sys.modules, kernels), ExitStack() as patched:
        for user in users:
            patched.enter_context(mock.patch(f"{user}.has_kernels", return_value=True))
        yield


def measure(layers: int, repeats: int) -> dict[str, Any]:
    """Return the CPU time of a sync's host work, and what it was measured on."""
    with tempfile.TemporaryDirectory() as folder, without_launches():
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        model = ModelSource(path=folder, init="random")
        config = EngineConfig(model=model, optimizer=OptimizerConfig(lr=1e-5))
        engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
        engine.initialize()
        resolution: Resolution = EngineRegistry.resolve(
            model_type="language_model", backend="fsdp2", device="cpu"
        )
        exporter = Exporter(
            resolution=resolution,
            model=model,
            dtype="bfloat16",
            quantization="fp8",
            bucket_bytes=BUCKET_BYTES,
        )
        session = SyncSession(Counting())
        times = []
        for version in range(repeats + 2):
            begin = time.thread_time()
            stream = exporter.export(engine)
            assert isinstance(stream, EngineStream)
            result = session.run(stream, version)
            times.append(1e3 * (time.thread_time() - begin))
        engine.close()
    return {
        "layers": layers,
        "tensors": result.num_tensors + result.num_quantized,
        "least_ms": round(min(times[2:]), 1),
        "median_ms": round(median(times[2:]), 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Parse the arguments, measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(json.dumps(measure(options.layers, options.repeats)))


if __name__ == "__main__":
    main()
