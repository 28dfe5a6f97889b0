"""A rollout that serves FP8 on the CPU, which the tests' workers import (``ray.imports``).

vLLM needs other kernels for FP8 than a CPU has. The served weights lie in a "server" under the
wire's own names, and are installed and audited as in vLLM's and SGLang's workers; ``local``
generates with their dequantized values. ``fp8-whole`` is the same rollout without a wire, which
quantizes the weights that it receives. A sync has several buckets, so that a fault can occur in the
middle of one.
"""

from __future__ import annotations

from typing import Any

import ray_faults
import torch
from torch import nn

from engine_api.registry import RolloutRegistry
from engine_trainer.rollouts.local import LocalRollout
from rollout_fp8.export.exporter import Exporter, collect_export
from rollout_fp8.fp8.quantize import dequantize
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.install.session import SyncSession
from rollout_fp8.model import architecture_of
from rollout_fp8.phases import Phases
from rollout_fp8.transports.collective import CollectiveIncoming, CollectiveOutgoing
from rollout_fp8.transports.weight_wire import Wire
from rollout_fp8.wire.format import SCALE_SUFFIX

CPU = torch.device("cpu")


class SmallBuckets(Exporter):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, bucket_bytes=400_000)


class Server:
    """One worker, as ``rollout_fp8.install.session.Workers``."""

    def __init__(self) -> None:
        self.weights: dict[str, nn.Parameter] = {}

    def learn(self, plan):
        model = nn.Module()
        for name, tensor in plan.tensors.items():
            parameter = nn.Parameter(
                torch.zeros(tensor.shape, dtype=tensor.dtype), requires_grad=False
            )
            self.weights[name] = parameter
            model.register_parameter(name.replace(".", "/"), parameter)
        self.receiver = Receiver(model, plan, self._load)
        return [self.receiver.boxes]

    def sync(self, stream):
        self.receiver.sync(stream, Phases(CPU))
        return [(self.receiver.served().tolist(), {})]

    def meaning(self):
        for name, weight in self.weights.items():
            scales = self.weights.get(name + SCALE_SUFFIX)
            if not name.endswith(SCALE_SUFFIX):
                yield name, weight if scales is None else dequantize(weight, scales, torch.float32)

    def _load(self, tensors) -> None:
        for name, tensor in tensors:
            self.weights[name].data.copy_(tensor)


class Fp8Rollout(LocalRollout):
    def __init__(self, *, quantization: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        assert quantization == "fp8"
        self._server = Server()
        self._session = SyncSession(self._server)

    def update_weights(self, export, version):
        self._not_ready = "the last weight sync failed"
        if not hasattr(export, "plan"):
            export = collect_export(
                export,
                device=CPU,
                dtype=torch.float32,
                architecture=architecture_of(self._source),
                scales="fp32",
                audit=True,
            )
        result = self._session.run(export, version)
        super().update_weights(self._server.meaning(), version)
        return result


class WholeFp8Rollout(Fp8Rollout):
    """To be found under a name of its own."""


EXPORTER, WIRE = f"{__name__}:SmallBuckets", "rollout_fp8.transports.weight_wire:Wire"
RolloutRegistry.register(backend="fp8", device="cpu", exporter=EXPORTER, wire=WIRE)(Fp8Rollout)
RolloutRegistry.register(backend="fp8-whole", device="cpu", exporter=EXPORTER)(WholeFp8Rollout)
if ray_faults.NAME:  # in a worker: each bucket that comes or goes may be one's last
    STRUCK = {"take": CollectiveIncoming, "put": CollectiveOutgoing, "receive": Wire}
    for name, cls in STRUCK.items():
        setattr(cls, name, ray_faults._with_faults(name, getattr(cls, name)))
