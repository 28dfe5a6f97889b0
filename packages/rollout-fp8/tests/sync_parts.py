"""Parts of a sync in one process: an export, workers, and the weights that they must serve."""

from __future__ import annotations

from typing import Any

import torch
from served_model import ServedModel
from torch import Tensor

from rollout_fp8.export.exporter import collect_export
from rollout_fp8.fp8.quantize import quantize
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.phases import Phases

CPU = torch.device("cpu")


class InProcess:
    """Workers of one process, one for each tensor-parallel rank."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.models, self.receivers = models, []

    def learn(self, plan):
        self.receivers = [Receiver(model, plan, model.load_weights) for model in self.models]
        return [receiver.boxes for receiver in self.receivers]

    def sync(self, stream):
        rows = []
        # A stream runs once; here there is one worker, or the stream is made for each.
        for receiver in self.receivers:
            phases = Phases(CPU)
            receiver.sync(stream, phases)
            rows.append((receiver.served().tolist() if stream.audit else [], phases.seconds()))
        return rows


def stream_of(
    weights: dict[str, Tensor], *, fp8: bool, dtype: torch.dtype = torch.float32, audit: bool = True
) -> Any:
    return collect_export(
        iter(weights.items()),
        device=CPU,
        dtype=dtype,
        architecture="Qwen3ForCausalLM" if fp8 else None,
        scales="fp32",
        audit=audit,
    )


def expected(weights: dict[str, Tensor], model: ServedModel, *, fp8: bool) -> dict[str, Tensor]:
    """Return the checkpoint in the served format, as the server's own loader loads it."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if fp8 and "_proj" in name:
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensor, scales="fp32")
        else:
            tensors[name] = tensor.to(model.dtype)
    model.load_weights(tensors.items())
    return {name: p.detach().clone() for name, p in model.named_parameters()}
