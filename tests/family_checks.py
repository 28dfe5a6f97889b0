"""Engines on whole families beside transformers in float64, one document at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tested_device import DEVICE
from tiny_models import documents, oracle, tiny_model
from torch import Tensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.config import Memory
from engine_api.hf_names import saved_buffers
from engine_api.hf_routers import Routers
from engine_api.weights import ShardSpec, assemble

# One step moves a weight by its gradient.
SGD = OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)

Shards = list[tuple[str, Tensor, ShardSpec]]
Result = tuple[dict[int, Tensor], dict[str, Tensor], Shards, dict[str, Tensor]]


def keep(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


def keep_shards(engine: Any) -> Shards:
    """Return copies of a rank's shards on the CPU."""
    shards = engine.get_per_tensor_param_shard()
    return [(name, part.to("cpu", copy=True), spec) for name, part, spec in shards]


def run(engine: Any, documents: list[list[int]], experts: list[Tensor] | None = None) -> Result:
    """Return log-probs by document, exported weights whole and as shards, and the moved weights.

    ``experts`` are replayed, by document. The engine's optimizer must be ``SGD``.
    """
    engine.initialize()
    place = engine.topology
    own = range(place.dp_rank, len(documents), place.dp_size)
    rows = [
        {"input_ids": documents[i], "loss_weight": [0.0] + [1.0] * (len(documents[i]) - 1)}
        for i in own
    ]
    batch = Batch.pack(rows)
    if experts is not None:
        batch = batch.with_fields(routed_experts=torch.cat([experts[i] for i in own]))
    log_probs = engine.infer_batch(batch).log_probs.cpu().split([len(documents[i]) for i in own])
    before = keep(engine.get_per_tensor_param())
    shards = keep_shards(engine)
    engine.train_batch(batch, sft_loss)
    after = keep(engine.get_per_tensor_param())
    engine.close()
    return dict(zip(own, log_probs, strict=True)), before, shards, after


def compute(
    backend: str,
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    documents: list[list[int]],
    **memory: Any,
) -> Result:
    """Return the results of a backend (see ``run``), inside a rank.

    ``memory`` are fields of ``engine_api.Memory``.
    """
    config = EngineConfig(
        model=ModelSource(path=path),
        parallelism=Parallelism(**parallelism),
        options=options,
        optimizer=SGD,
        memory=Memory(max_tokens=128, **memory),
    )
    return run(EngineRegistry.create(backend=backend, device=DEVICE, config=config), documents)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The folder of a model, its tensors, and what transformers computes in float64."""

    path: str
    saved: dict[str, Tensor]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]


def write(folder: Path, family: str, keys: Mapping[str, Any]) -> str:
    """Write a model, with saved buffers that change its results."""
    made = tiny_model(family, **keys)
    generator = torch.Generator().manual_seed(3)
    for buffer in saved_buffers(made).values():
        buffer.normal_(std=0.3, generator=generator)
    made.save_pretrained(folder)
    return str(folder)


def score(model: Any, ids: Tensor, total: int) -> Tensor:
    """Return a document's log-probs, and add the gradient of its loss over ``total`` tokens."""
    scores = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    picked = scores[:-1].gather(-1, ids[1:, None])[:, 0]
    (-picked.sum() / total).backward()
    return torch.cat([picked.new_zeros(1), picked.detach()])


def drawn_experts(path: str) -> list[Tensor]:
    """Return experts for each token and layer by document, and for some tokens none."""
    routing = Routers(oracle(path), where="transformers").routing
    generator = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    for one in documents():
        scores = torch.rand(len(one), routing.layers, routing.experts, generator=generator)
        experts = scores.argsort(-1)[..., : routing.top_k]
        experts[::5] = -1
        found.append(experts)
    return found


def expected(
    folder: Path, family: str, keys: Mapping[str, Any], *, replays: bool = False
) -> Expected:
    """Write a model and compute it, with the experts of `drawn_experts` if ``replays``."""
    path = write(folder, family, keys)
    exact = oracle(path)
    ids = documents()
    routers = Routers(exact, where="transformers") if replays else None
    experts = drawn_experts(path) if replays else [None] * len(ids)
    total = sum(len(one) - 1 for one in ids)
    log_probs: list[Tensor] = []
    for one, selected in zip(ids, experts, strict=True):
        if routers is not None:
            routers.replay(selected)
        log_probs.append(score(exact, one, total))
    # Gradients are named as weights are once they are saved in the place of these.
    with torch.no_grad():
        for tensor in exact.state_dict(keep_vars=True).values():
            tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    exact.save_pretrained(f"{path}-gradients")
    return Expected(
        path=path,
        saved=load_file(folder / "model.safetensors"),
        log_probs=log_probs,
        gradients=load_file(Path(f"{path}-gradients", "model.safetensors")),
    )


def compare(results: list[Any], want: Expected, about: str) -> None:
    """Compare the results of all ranks."""
    norm = float(torch.stack([g.norm() for g in want.gradients.values()]).norm())
    for outputs, before, _, after in results:
        for number, got in outputs.items():
            apart = (got.double() - want.log_probs[number]).abs().max()
            assert float(apart) < 1e-4, f"{about}: log-probs of document {number}: {apart:.1e}"
        assert set(before) == set(want.saved), f"{about}: {set(before) ^ set(want.saved)}"
        for name, tensor in before.items():
            assert torch.equal(tensor, want.saved[name]), f"{about}: {name} is exported differently"
            gradient = want.gradients[name]
            apart = (tensor.double() - after[name].double() - gradient).norm()
            size = max(float(gradient.norm()), 1e-3 * norm)
            assert float(apart) < 1e-3 * size, f"{about}: gradient of {name}: {apart / size:.1e}"
    for parts in zip(*(shards for _, _, shards, _ in results), strict=True):
        name = parts[0][0]
        whole = assemble([(part, spec) for _, part, spec in parts])
        assert torch.equal(whole, want.saved[name]), f"{about}: {name} in shards"
