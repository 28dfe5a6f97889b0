"""Functions that test_families runs inside ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_checks import SGD, Result, keep, keep_shards, run
from layout_ranks import create
from torch import Tensor

from engine_api import Batch, OptimizerConfig, sft_loss
from engine_api.config import LoraConfig, Memory
from engine_api.errors import EngineError


def compute(
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    documents: list[list[int]],
    experts: list[Tensor] | None = None,
    **config: Any,
) -> Result:
    """Return the results of an engine (see ``family_checks.run``)."""
    memory = Memory(max_tokens=128)
    engine = create(path, parallelism, options, optimizer=SGD, memory=memory, **config)
    return run(engine, documents, experts)


Adapted = dict[str, Any]


def adapt(
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    documents: list[list[int]],
    lora: LoraConfig,
) -> Adapted:
    """Return an adapter before and after each of two steps, and outputs and exports between them.

    Layers are recomputed.
    """
    engine = create(
        path,
        parallelism,
        options,
        optimizer=SGD,
        memory=Memory(max_tokens=128, recompute="full"),
        lora=lora,
    )
    engine.initialize()
    place = engine.topology
    own = range(place.dp_rank, len(documents), place.dp_size)
    batch = Batch.pack(
        [
            {"input_ids": documents[i], "loss_weight": [0.0] + [1.0] * (len(documents[i]) - 1)}
            for i in own
        ]
    )

    def export(adapter: str) -> dict[str, Tensor]:
        return keep(engine.get_per_tensor_param(adapter=adapter))

    def infer(*, adapter: bool) -> dict[int, Tensor]:
        outputs = engine.infer_batch(batch, adapter=adapter).log_probs.cpu()
        return dict(zip(own, outputs.split([len(documents[i]) for i in own]), strict=True))

    adapters = [export("only")]
    engine.train_batch(batch, sft_loss)
    adapters.append(export("only"))
    found = {
        "on": infer(adapter=True),
        "off": infer(adapter=False),
        "merged": export("merged"),
        "base": export("base"),
        "shards": keep_shards(engine),
    }
    engine.train_batch(batch, sft_loss)
    adapters.append(export("only"))
    engine.close()
    return found | {"adapters": adapters}


ADAMW = OptimizerConfig(lr=1e-2, clip_norm=None, eps=1e-4)


def pass_on(path: str, documents: list[list[int]], scratch: str) -> dict[str, dict[str, Tensor]]:
    """Return weights of one training that goes on in another engine, layout and format."""
    found: dict[str, dict[str, Tensor]] = {}
    folder = Path(scratch)

    def run(name: str, work: Any, backend: str = "megatron", **config: Any) -> None:
        engine = create(
            path, optimizer=ADAMW, memory=Memory(max_tokens=128), backend=backend, **config
        )
        engine.initialize()
        place = engine.topology
        rows = [
            {"input_ids": one, "loss_weight": [0.0] + [1.0] * (len(one) - 1)}
            for one in documents[place.dp_rank :: place.dp_size]
        ]
        work(engine, Batch.pack(rows))
        found[name] = keep(engine.get_per_tensor_param())
        engine.close()

    def begin(engine: Any, batch: Batch) -> None:
        engine.train_batch(batch, sft_loss)
        engine.save_checkpoint(folder / "one").result()
        found["one"] = keep(engine.get_per_tensor_param())
        engine.train_batch(batch, sft_loss)

    def elsewhere(engine: Any, batch: Batch) -> None:
        engine.load_checkpoint(folder / "one")
        found["one elsewhere"] = keep(engine.get_per_tensor_param())
        engine.train_batch(batch, sft_loss)
        engine.save_checkpoint(folder / "two").result()

    def back(engine: Any, batch: Batch) -> None:
        del batch
        engine.load_checkpoint(folder / "two")

    def convert(engine: Any, batch: Batch) -> None:
        del batch
        engine.load_checkpoint(folder / "one")
        engine.save_checkpoint(folder / "native").result()

    def go_on(engine: Any, batch: Batch) -> None:
        engine.load_checkpoint(folder / "native")
        engine.train_batch(batch, sft_loss)

    experts = {"parallelism": {"ep": 2}}
    native = {"checkpoint": "megatron"}
    run("two", begin, options={}, **experts)
    run("two elsewhere", elsewhere, backend="fsdp2", parallelism={}, options={})
    run("two in stages", back, parallelism={"pp": 2}, options={})
    run("one again", convert, options=native, **experts)
    run("two again", go_on, options=native, **experts)
    return found


def infer(path: str, documents: list[list[int]]) -> tuple[str, Tensor | None]:
    """Return the refusal of a model, or the log-probs of the documents in a training pass."""
    engine = create(path, {}, {}, optimizer=SGD, memory=Memory(max_tokens=128))
    try:
        engine.initialize()
    except EngineError as error:
        return str(error), None
    try:
        rows = [
            {"input_ids": one, "loss_weight": [0.0] + [1.0] * (len(one) - 1)} for one in documents
        ]
        return "", engine.infer_batch(Batch.pack(rows)).log_probs.cpu()
    finally:
        engine.close()
