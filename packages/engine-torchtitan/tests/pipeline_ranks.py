"""Functions that the ranks of test_pipeline and test_families run."""

from __future__ import annotations

import gc
from typing import Any

import torch
from tested_device import DEVICE
from torch import Tensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LossOutput,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    TokenOutputs,
    sft_loss,
)
from engine_api.errors import EngineError

# Documents of different lengths, in micro-batches with different numbers of tokens.
LENGTHS = (5, 13, 1, 12, 9, 3, 7, 2)
TIMEOUT_S = 60


class WithEntropy:
    """A loss of two outputs that is linear in neither."""

    needs = ("log_probs", "entropy")

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        assert outputs.log_probs is not None
        assert outputs.entropy is not None
        weight = batch.loss_weight
        loss = (weight * (outputs.log_probs.square() - 0.1 * outputs.entropy)).sum()
        return LossOutput(loss=loss, metrics={"squares": loss.detach()})


class BreaksOnce:
    """A loss that raises in its first micro-batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("a field")
        return sft_loss(outputs, batch)


def make_documents() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(5, 100, (length,), generator=generator).tolist()
        weight = torch.rand(length, generator=generator)
        weight[0] = 0.0
        rows.append({"input_ids": ids, "loss_weight": weight.tolist()})
    return rows


def create(
    path: str,
    sizes: dict[str, int],
    *,
    options: dict[str, Any] | None = None,
    clip_norm: float | None = None,
    compute: str = "float32",
    **memory: Any,
) -> Any:
    # The step of SGD at the rate 1 is the gradient.
    optimizer = OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=clip_norm)
    config = EngineConfig(
        model=ModelSource(path=path),
        parallelism=Parallelism(**sizes),
        optimizer=optimizer,
        precision=Precision(compute=compute),
        memory=Memory(**{"max_tokens": 16, "logit_chunk": 7} | memory),
        options={"timeout_s": TIMEOUT_S} | (options or {}),
    )
    engine = EngineRegistry.create(backend="torchtitan", device=DEVICE, config=config)
    engine.initialize()
    return engine


def export(engine: Any) -> dict[str, Tensor]:
    return {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}


def compute(
    path: str, sizes: dict[str, int], *, alone: bool = False, **settings: Any
) -> dict[str, Any]:
    """Return outputs by document, and loss, norm and gradient of a step.

    Documents are divided over the data-parallel ranks. With ``alone`` the first of these has all of
    them, and the other ones have none.
    """
    engine = create(path, sizes, **settings)
    place = engine.topology
    whole = Batch.pack(make_documents())
    mine = list(range(place.dp_rank, len(LENGTHS), place.dp_size))
    if alone:
        mine = [] if place.dp_rank else list(range(len(LENGTHS)))
    batch = whole.select(mine)
    outputs = engine.infer_batch(batch, entropy=True, temperature=0.7)
    states = engine.infer_states(batch)
    head = engine.output_head().weight.cpu().float()
    before = export(engine)
    step = engine.train_batch(batch, WithEntropy())
    after = export(engine)
    ends = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    found = {
        document: torch.stack([outputs.log_probs, outputs.entropy])[:, ends[i] : ends[i + 1]].cpu()
        for i, document in enumerate(mine)
    }
    hidden = {document: states[ends[i] : ends[i + 1]] for i, document in enumerate(mine)}
    engine.close()
    return {
        "outputs": found,
        "states": hidden,
        "head": head,
        "gradients": {name: before[name] - after[name] for name in before},
        "loss": step.loss,
        "metrics": step.metrics,
        "norm": step.grad_norm,
        "micro_batches": step.num_micro_batches,
    }


def export_in_bfloat16(path: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return the whole export of masters in bfloat16 after a step, and check the shards' dtypes."""
    config = EngineConfig(
        model=ModelSource(path=path),
        parallelism=Parallelism(**sizes),
        optimizer=OptimizerConfig(lr=0.1),
        precision=Precision(master="bfloat16", compute="bfloat16", reduce="bfloat16"),
    )
    engine: Any = EngineRegistry.create(backend="torchtitan", device=DEVICE, config=config)
    engine.initialize()
    rows = [
        row | {"input_ids": [one % engine.vocab_size for one in row["input_ids"]]}
        for row in make_documents()
    ]
    engine.train_batch(Batch.pack(rows), sft_loss)
    whole = export(engine)
    shards = {name: one.dtype for name, one, _ in engine.get_per_tensor_param_shard()}
    engine.close()
    assert shards == {name: one.dtype for name, one in whole.items()}
    return whole


def train_after_an_error(path: str, sizes: dict[str, int]) -> tuple[str, float]:
    """Return the type of a loss's error, and the gradient norm of the step after it."""
    engine = create(path, sizes)
    batch = Batch.pack(make_documents())
    raised = ""
    try:
        engine.train_batch(batch, BreaksOnce())
    except (KeyError, EngineError) as error:
        raised = type(error).__name__
    norm = engine.train_batch(batch, sft_loss).grad_norm
    engine.close()
    return raised, norm


def fail_in_a_block(path: str, sizes: dict[str, int], rank: int, call: str) -> str:
    """Return the error of each rank, where one rank's block fails in the second micro-batch."""
    engine = create(path, sizes)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no memory in the second micro-batch")

    if engine.topology.rank == rank:
        next(iter(engine.module.lm.layers.values())).register_forward_pre_hook(fail)
    batch = Batch.pack(make_documents())
    try:
        if call == "train_batch":
            engine.train_batch(batch, sft_loss)
        else:
            engine.infer_batch(batch)
    except (MemoryError, EngineError) as error:
        return type(error).__name__
    return ""


def refuse(path: str, sizes: dict[str, int]) -> tuple[str, str]:
    """Return field and text of the refusal of sizes."""
    try:
        create(path, sizes)
    except EngineError as error:
        return getattr(error, "field", ""), str(error)
    return "", ""


def count_kept(path: str, sizes: dict[str, int]) -> int:
    """Return the number of tensors that a closed engine keeps."""
    # The meshes that all engines of a process share stay.
    create(path, sizes).close()
    gc.collect()
    before = {id(one) for one in gc.get_objects() if isinstance(one, Tensor)}
    engine = create(path, sizes)
    engine.close()
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, Tensor) and id(one) not in before]
    # The engine lives until here.
    return len(kept) if engine.capabilities else -1
