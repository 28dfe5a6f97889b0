"""Layouts: hybrid sharding and sequence parallelism give the answers of one rank; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig, Parallelism
from engine_api.contract import Engine
from engine_api.errors import BatchError, ConfigError, EngineError
from engine_api.losses import sft_loss
from engine_api.results import Topology
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    outputs_match,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._ranks import InferCall, caught, infer, opened, to_batch, train
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases.export import shards, shards_make_the_whole
from engine_conformance.fixtures import LENGTHS, PackedDocuments
from engine_conformance.oracle import AdamWConfig

BOTH = ("float32", "bfloat16")


def _layout_holds(
    target: Target, model: Path, layout: Parallelism, *, loss_lengths: Sequence[str] = ("uneven", "skewed")
) -> float:
    """Inference on all sets of lengths and steps of clipped AdamW, against the oracle."""
    oracle = oracle_of(str(model))
    calls = [InferCall(documents=documents(70, lengths), entropy=True, temperature=0.8) for lengths in LENGTHS]
    memory = Memory(max_tokens=32, logit_chunk=7)
    ranks = target.run(infer, target.config(model, parallelism=layout, memory=memory), calls=calls)
    margins = [outputs_match(target, oracle, call, [row[i] for row in ranks]) for i, call in enumerate(calls)]
    batches = tuple(documents(71 + i, lengths) for i, lengths in enumerate(loss_lengths))
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=2.0)
    config = target.config(model, parallelism=layout, memory=memory, optimizer=optimizer)
    trained = target.run(train, config, batches=batches)
    want = oracle_training(str(model), batches, optimizer=AdamWConfig(weight_decay=0.0, max_grad_norm=2.0))
    return max(*margins, training_matches(target, trained, want, oracle))


@case(id="parallel.hsdp", requires=(Capability.HSDP,), world=(2, 4), dtypes=BOTH)
def hsdp(target: Target) -> float:
    """Hybrid sharding MUST NOT change loss, gradient norm, update or export, and its copies MUST count once.

    If this fails with a ratio: the gradient of the copies is averaged, or their norm is summed (torchtitan #2318).
    """
    model, layout = target.model(), Parallelism(dp_replicate=2)
    margin = _layout_holds(target, model, layout)
    shards_make_the_whole(target.run(shards, target.config(model, parallelism=layout)))
    return margin


@case(id="parallel.ulysses", requires=(Capability.ULYSSES,), world=(2, 4), dtypes=BOTH)
def ulysses(target: Target) -> float:
    """Sequence parallelism MUST NOT change a token's outputs, nor an update; its ranks MUST answer bit for bit the same.

    With documents that cross the split, and numbers of tokens that it does not divide.

    If this fails: targets are shifted within a rank, so that tokens at the split are wrong (verl PR 4250); the
    gradient is counted once a rank.
    """
    return _layout_holds(target, target.model(num_kv_heads=4), Parallelism(ulysses=target.world))


@case(id="parallel.ulysses_kv_heads", requires=(Capability.ULYSSES,), world=(2, 4))
def ulysses_kv_heads(target: Target) -> float:
    """Sequence parallelism over more ranks than there are KV heads MUST be right, or be refused.

    If this fails: ranks that share a KV head read another one, or its gradient is not summed.
    """
    model = target.model(num_kv_heads=target.world // 2, tied=False)
    return _layout_holds(target, model, Parallelism(ulysses=target.world))


@case(id="parallel.ulysses_with_data", requires=(Capability.ULYSSES, Capability.HSDP), world=(4,))
def ulysses_with_data(target: Target) -> float:
    """Sequence parallelism MUST compose with data parallelism, sharded and replicated.

    If this fails: the denominator or a metric counts a data-parallel rank as often as it has members.
    """
    model = target.model()
    layouts = (Parallelism(ulysses=2), Parallelism(ulysses=2, dp_replicate=2))
    margins = [_layout_holds(target, model, layout, loss_lengths=("skewed", "single")) for layout in layouts]
    for layout in layouts:
        shards_make_the_whole(target.run(shards, target.config(model, parallelism=layout)))
    return max(margins)


def topology(setup: Setup) -> Topology:
    """Where this rank stands."""
    with opened(setup) as engine:
        return engine.topology


@case(id="parallel.topology")
def topology_holds(target: Target) -> None:
    """Ranks, data-parallel ranks and primaries MUST be numbered without gaps, one primary a data-parallel rank.

    If this fails: a trainer gives two groups of ranks the same documents, or one none.
    """
    layouts = [Parallelism()]
    if target.world > 1 and Capability.ULYSSES in target.capabilities:
        layouts.append(Parallelism(ulysses=2))
    for layout in layouts:
        rows = target.run(topology, target.config(target.model(), parallelism=layout))
        must([row.rank for row in rows] == list(range(target.world)), "rank", f"{[row.rank for row in rows]}")
        must({row.world_size for row in rows} == {target.world}, "world_size", f"{rows[0].world_size}")
        sizes = {row.dp_size for row in rows}
        must(sizes == {target.world // layout.ulysses}, "dp_size", f"{sizes}")
        primaries = sorted(row.dp_rank for row in rows if row.is_primary)
        must(primaries == list(range(rows[0].dp_size)), "is_primary", f"primaries of data-parallel ranks {primaries}")


def other_documents(setup: Setup, batch: PackedDocuments) -> list[EngineError | None]:
    """Every rank brings another document; then all the same ones."""
    with opened(setup) as engine:
        own = _own(engine, batch, setup.device)
        errors = [caught(lambda: engine.train_batch(own, sft_loss)), caught(lambda: engine.infer_batch(own))]
        errors.append(caught(lambda: engine.infer_batch(to_batch(batch, setup.device))))
        return errors


def _own(engine: Engine, batch: PackedDocuments, device: str) -> Batch:
    return to_batch(batch.take([engine.topology.rank]), device)


@case(id="parallel.other_documents", requires=(Capability.ULYSSES,), world=(2, 4))
def other_documents_are_refused(target: Target) -> None:
    """Ranks of one data-parallel rank with different documents MUST raise ``BatchError`` or ``RankFailure`` on all of them.

    If this fails: the ranks compute one batch out of pieces of several.
    """
    config = target.config(target.model(), parallelism=Parallelism(ulysses=target.world))
    ranks = target.run(other_documents, config, batch=documents(72, "uneven"))
    for index, name in enumerate(("train_batch", "infer_batch")):
        raised_everywhere(name, [errors[index] for errors in ranks], BatchError, faulty=[])
    must(all(errors[2] is None for errors in ranks), "engine", f"is not usable afterwards: {ranks[0][2]}")


def initialize(setup: Setup) -> EngineError | None:
    """The error of building this configuration, if any."""
    engine = setup.create()
    try:
        return caught(engine.initialize)
    finally:
        engine.close()


@case(id="parallel.misfit")
def misfit(target: Target) -> None:
    """Sizes whose product is not the world MUST raise ``ConfigError`` on every rank, and leave the ranks usable.

    If this fails: some ranks are left out, or wait for others in a group that never forms.
    """
    sizes = [Parallelism(dp_shard=target.world + 1), Parallelism(dp_shard=3)]
    if Capability.ULYSSES in target.capabilities:
        sizes += [Parallelism(ulysses=2 * target.world)]
    for layout in sizes:
        errors = target.run(initialize, target.config(target.model(), parallelism=layout))
        raised_everywhere(f"{layout}", errors, ConfigError)
    must(
        target.run(initialize, target.config(target.model())) == [None] * target.world,
        "engine",
        "cannot be made afterwards",
    )
