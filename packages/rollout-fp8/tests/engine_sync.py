"""Functions that test_engines runs inside ranks."""

from __future__ import annotations

import torch
from served_model import VOCAB, ServedModel
from sync_parts import InProcess, expected

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.registry import Resolution
from rollout_fp8.export.exporter import Exporter
from rollout_fp8.fp8.quantize import quantize
from rollout_fp8.install.session import SyncSession

DOCUMENT = {"input_ids": [*range(5, 21)], "loss_weight": [0.0] + [1.0] * 15}


def gather(path: str, backend: str, layout: dict[str, int]) -> list[str]:
    """Return the tensors of an engine's stream in FP8 that are not its whole weights quantized.

    A stream is taken before an update and after it.
    """
    source = ModelSource(path=path)
    config = EngineConfig(
        model=source,
        optimizer=OptimizerConfig(lr=1e-2),
        parallelism=Parallelism(**layout),
    )
    engine = EngineRegistry.create(backend=backend, device="cpu", config=config)
    engine.initialize()
    # Only the device is read.
    here = Resolution(plugin=None, row=None, device="cpu", source="", trace=())  # type: ignore[arg-type]
    exporter = Exporter(resolution=here, model=source, dtype="float32", quantization="fp8")
    differ: list[str] = []
    for version in range(2):
        if version:
            engine.train_batch(Batch.pack([DOCUMENT]), sft_loss)
        got = {name: tensor.clone() for name, tensor in exporter.export(engine)}
        whole = {n: t.clone() for n, t in engine.get_per_tensor_param(dtype=torch.float32)}
        want: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            want[name] = tensor
            if f"{name}_scale_inv" in got:
                want[name], want[f"{name}_scale_inv"] = quantize(tensor, scales="fp32")
        assert want.keys() == got.keys()
        assert any(".experts." in name and name.endswith("_scale_inv") for name in want)
        differ += [
            name
            for name, tensor in want.items()
            if not torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
        ]
    exporter.close()
    engine.close()
    return differ


def serve(path: str, backend: str, layout: dict[str, int]) -> list[tuple[bool, int, list[str]]]:
    """Sync an engine's shards in FP8 to a replica of each rank, before and after an update.

    Returns:
        Of each sync: whether it was audited, the number of quantized tensors, and the served
        parameters that are not the engine's whole weights as the server itself quantizes and loads
        them.
    """
    source = ModelSource(path=path)
    config = EngineConfig(
        model=source,
        optimizer=OptimizerConfig(lr=1e-2),
        parallelism=Parallelism(**layout),
    )
    engine = EngineRegistry.create(backend=backend, device="cpu", config=config)
    engine.initialize()
    # Only the device is read.
    here = Resolution(plugin=None, row=None, device="cpu", source="", trace=())  # type: ignore[arg-type]
    exporter = Exporter(resolution=here, model=source, dtype="float32", quantization="fp8")
    model = ServedModel(fp8=True)
    session = SyncSession(InProcess([model]))
    rows = []
    before: list[torch.Tensor] = []
    for version in range(2):
        if version:
            assert max(DOCUMENT["input_ids"]) < VOCAB
            engine.train_batch(Batch.pack([DOCUMENT]), sft_loss)
        result = session.run(exporter.export(engine), version)
        whole = {
            name: tensor.clone()
            for name, tensor in engine.get_per_tensor_param(dtype=torch.float32)
        }
        assert not any(map(torch.equal, before, whole.values())), "the update changes each tensor"
        before = list(whole.values())
        want = expected(whole, ServedModel(fp8=True), fp8=True)
        served = dict(model.named_parameters())
        differ = [
            name
            for name, tensor in want.items()
            if not torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8))
        ]
        rows.append((result.audited, result.num_quantized, differ))
    exporter.close()
    engine.close()
    return rows
