"""Fixtures: ranks as threads, plug-ins as folders, and a bigram model as an engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import DEADLINE_S

from engine_api import BaseEngine, Batch, EngineConfig, Memory, ModelSource, OptimizerConfig
from engine_api.comm import Comm, SingleComm
from engine_api.manifest import Entry
from engine_api.plugin import CONTRACT, EnginePlugin, Row
from engine_api.registry import Resolution
from engine_api.results import TokenOutputs, Topology
from engine_api.weights import ShardSpec

VOCABULARY = 11


class ThreadComm:
    """The control plane of one of several ranks that are threads of this process."""

    def __init__(self, rank: int, rows: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(rows)
        self._rows = rows
        self._barrier = barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._rows[self.rank] = value
        self._barrier.wait()
        gathered = list(self._rows)
        self._barrier.wait()
        return gathered

    def close(self) -> None:
        pass


def run_ranks(count: int, work: Callable[[Comm], Any]) -> list[Any]:
    """Return the result of ``work``, or the exception that it raised, by rank."""
    rows: list[Any] = [None] * count
    barrier = threading.Barrier(count, timeout=DEADLINE_S)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, ThreadComm(rank, rows, barrier)) for rank in range(count)]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture
def ranks() -> Callable[[int, Callable[[Comm], Any]], list[Any]]:
    return run_ranks


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Return a function that makes a batch of documents of the given lengths.

    Ids are drawn from a seed. All but first tokens carry loss of the given weight.
    """

    def make(lengths: Sequence[int], *, seed: int = 0, weight: float = 1.0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        documents = []
        for length in lengths:
            ids = torch.randint(VOCABULARY, (length,), generator=generator)
            documents.append({"input_ids": ids, "loss_weight": [0.0] + [weight] * (length - 1)})
        return Batch.pack(documents)

    return make


@pytest.fixture
def add_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that fakes an installed distribution.

    The distribution is a dist-info folder with entry points, and modules.
    """

    def add(
        name: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str],
        *,
        group: str = "test.engines",
    ) -> Path:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(f"{key} = {value}" for key, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
        for module, text in modules.items():
            (site / f"{module}.py").write_text(text)
            # Another test may have imported a module of that name.
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(site)
        return site

    return add


class BigramEngine(BaseEngine):
    """An engine whose log p(next | previous) is a table.

    Its ranks are data-parallel, and gradients are summed over the control plane.
    """

    vocab_size = VOCABULARY

    def __init__(
        self, config: EngineConfig, *, resolution: Resolution, comm: Comm | None = None
    ) -> None:
        super().__init__(config, resolution=resolution)
        self.comm = comm or SingleComm()
        self.topology = Topology(
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            dp_rank=self.comm.rank,
            dp_size=self.comm.world_size,
            sizes={"dp": self.comm.world_size},
        )
        self.released = 0
        self.forwards: list[int] = []

    def _build(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        self.weight = torch.randn(VOCABULARY, VOCABULARY, generator=generator).requires_grad_()
        self.momentum = torch.zeros_like(self.weight)

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: torch.Tensor | None = None,
    ) -> TokenOutputs:
        self.forwards.append(batch.num_tokens)
        previous = batch.input_ids.roll(1)
        rows = torch.log_softmax(self.weight[previous] / temperature, dim=-1)
        value = rows.gather(1, batch.input_ids[:, None])[:, 0]
        first = torch.zeros(batch.num_tokens, dtype=torch.bool).index_fill(
            0, batch.cu_seqlens[:-1], value=True
        )
        entropy = None
        if "entropy" in needs:
            entropy = -(rows.exp() * rows).sum(-1).masked_fill(first, 0.0)
        return TokenOutputs(log_probs=value.masked_fill(first, 0.0), entropy=entropy)

    def _clip_gradients(self, max_norm: float | None) -> float:
        assert self.weight.grad is not None
        self.weight.grad = torch.stack(self.comm.all_gather(self.weight.grad)).sum(0)
        norm = float(self.weight.grad.norm())
        if max_norm is not None and norm > max_norm:
            self.weight.grad *= max_norm / norm
        return norm

    def _apply_optimizer(self, lr: float) -> None:
        with torch.no_grad():
            self.momentum.mul_(0.9).add_(self.weight.grad)
            self.weight.sub_(lr * self.momentum)

    def _zero_grad(self) -> None:
        self.weight.grad = None

    def state_shards(self) -> dict[str, tuple[torch.Tensor, ShardSpec]]:
        size = -(-VOCABULARY // self.comm.world_size)
        low = min(size * self.comm.rank, VOCABULARY)
        high = min(low + size, VOCABULARY)
        spec = ShardSpec(
            global_shape=(VOCABULARY,) * 2, offset=(low, 0), shape=(high - low, VOCABULARY)
        )
        parts = {"model.weight": self.weight, "optim.weight.momentum": self.momentum}
        return {key: (tensor.detach()[low:high], spec) for key, tensor in parts.items()}

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        whole = ShardSpec.whole((VOCABULARY,) * 2)
        return {
            "model.weight": (whole, torch.float32),
            "optim.weight.momentum": (whole, torch.float32),
        }

    def _install_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.weight.copy_(tensors["model.weight"])
            self.momentum.copy_(tensors["optim.weight.momentum"])

    def _rng_state(self) -> dict[str, Any]:
        return {"seed": self.topology.rank}

    def _set_rng_state(self, state: Mapping[str, Any]) -> None:
        self.restored = state["seed"]

    def _release(self) -> None:
        self.released += 1


@pytest.fixture
def make_engine() -> Callable[..., BigramEngine]:
    """Return a function that makes an initialized bigram engine.

    Arguments go to ``EngineConfig``, capabilities to its descriptor.
    """

    def make(
        *,
        comm: Comm | None = None,
        max_tokens: int = 64,
        capabilities: Sequence[str] = (),
        **config: Any,
    ) -> BigramEngine:
        row = Row(backends=("bigram",), devices=("cpu",), target="conftest:BigramEngine")
        plugin = EnginePlugin(
            name="bigram",
            contract=CONTRACT,
            rows=(row,),
            capabilities=frozenset({"dp", *capabilities}),
        )
        resolution = Resolution(plugin=plugin, row=row, device="cpu", source="test", trace=())
        config.setdefault("optimizer", OptimizerConfig(lr=0.1, clip_norm=None))
        config.setdefault("memory", Memory(max_tokens=max_tokens))
        engine = BigramEngine(
            EngineConfig(model=ModelSource(path="none"), **config), resolution=resolution, comm=comm
        )
        engine.initialize()
        return engine

    return make
