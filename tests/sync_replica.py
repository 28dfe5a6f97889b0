"""Functions that test_sync_benchmark runs inside ranks."""

from __future__ import annotations

from typing import Any

import torch
from sync_parts import InProcess
from torch import Tensor, nn

from engine_api.registry import Resolution
from rollout_fp8.export.exporter import Exporter
from rollout_fp8.install.session import SyncSession

HERE = Resolution(plugin=None, row=None, device="cpu", source="", trace=())  # type: ignore[arg-type]


class Plain(nn.Module):
    """A served model whose parameters are the tensors of the wire, under the same names."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        for name, tensor in plan.tensors.items():
            empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
            module: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        own: dict[str, Tensor] = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


class Replica:
    """A rollout that only takes weights."""

    def __init__(self, **_: Any) -> None:
        self.session: SyncSession | None = None

    def update_weights(self, stream: Any, version: int) -> Any:
        if self.session is None:
            self.session = SyncSession(InProcess([Plain(stream.plan)]))  # type: ignore[list-item]
        return self.session.run(stream, version)

    def close(self) -> None:
        pass


class Rollouts:
    """``RolloutRegistry`` with that rollout alone."""

    @staticmethod
    def create(*, name: str, device: str, **arguments: Any) -> Replica:
        assert (name, device) == ("vllm", "cpu")
        return Replica(**arguments)

    @staticmethod
    def create_exporter(*, name: str, device: str, **arguments: Any) -> Exporter:
        assert (name, device) == ("vllm", "cpu")
        return Exporter(resolution=HERE, **arguments)


def rows(arguments: list[str], folder: str) -> list[dict[str, Any]]:
    """Return what the command prints, with replicas that only take weights."""
    from benchmarks import sync

    sync.RolloutRegistry = Rollouts  # type: ignore[misc]
    return list(sync.measure_all(sync.parse(arguments), folder))
