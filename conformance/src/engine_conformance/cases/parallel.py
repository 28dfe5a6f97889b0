"""Several ranks, which give the outputs of one in every arrangement.

An arrangement that does not fit is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.contract import Engine
from engine_api.errors import BatchError, ConfigError, EngineError
from engine_api.results import Topology
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._layouts import (
    ADAMW,
    MODEL_PARALLEL,
    OPTIMIZER,
    initialize,
    layout_holds,
    right_or_refused,
)
from engine_conformance.cases._losses import default_loss
from engine_conformance.cases._prefixes import holds_with_prefixes
from engine_conformance.cases._ranks import Trained, caught, opened, to_batch, train
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_scalar_close, assert_weights_close
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import TrainResult
from engine_conformance.tolerances import weight_tolerance

BOTH = (LM, VALUE)
DATA = ("dp_replicate", "dp_shard")
_FIELDS = MODEL_PARALLEL | {Capability.EP: "ep", Capability.HSDP: "dp_replicate"}


@case(id="parallel.dp", requires=(Capability.DP,), world=(2, 4), model_types=BOTH)
def dp(target: Target) -> float:
    """Data parallelism MUST NOT change loss, norm or update, and replicas MUST stay bitwise equal.

    The norm is the gradient's. One rank and several, with unequal tokens on each, with
    ranks without a document, and with the norm clipped.

    If this fails with a ratio: gradients or losses are averaged over ranks instead of
    summed over tokens (AReaL PR 335, torchtitan #2318, prime-rl #2562, miles #3231,
    Megatron-LM #4590), or the norm is a rank's own (verl #4710).
    """
    model = target.model()
    batches = tuple(documents(75 + i, n) for i, n in enumerate(("uneven", "skewed", "single")))
    config = target.config(model, optimizer=OPTIMIZER, parallelism=Parallelism())
    alone = target.with_world(1)
    several = target.run(train, config, batches=batches)
    one = alone.run(train, config, batches=batches)
    want = oracle_training(str(model), batches, optimizer=ADAMW)
    start = oracle_of(str(model))
    margins = [
        training_matches(at, ranks, want, start) for at, ranks in ((target, several), (alone, one))
    ]
    return max(*margins, _same_run(target, several[0], one[0], want))


def _same_run(target: Target, several: Trained, one: Trained, want: TrainResult) -> float:
    """Compare the two runs with each other.

    Both may be within tolerance of the oracle, on either side of it.
    """
    factors = {"ranks": float(target.world)}
    margins = [
        assert_scalar_close(f"{name} of step {step}", a, b, target.tolerance(name), factors=factors)  # type: ignore[arg-type]
        for step, (x, y) in enumerate(zip(several.outputs, one.outputs, strict=True))
        for name, a, b in (("loss", x.loss, y.loss), ("grad_norm", x.grad_norm, y.grad_norm))
    ]
    bounds = weight_tolerance(want, target.torch_dtype)
    return max(
        *margins,
        assert_weights_close(several.weights, one.weights, bounds, name="weights of several ranks"),
    )


@case(id="parallel.hsdp", requires=(Capability.HSDP,), world=(2, 4), model_types=BOTH)
def hsdp(target: Target) -> float:
    """Hybrid sharding MUST NOT change loss, norm, update or export, and copies MUST count once.

    The norm is the gradient's.

    If this fails with a ratio: the gradient of the copies is averaged, or their norm is
    summed (torchtitan #2318).
    """
    return layout_holds(target, target.model(), Parallelism(dp_replicate=2))


@case(id="parallel.ulysses", requires=(Capability.ULYSSES,), world=(2, 4), model_types=BOTH)
def ulysses(target: Target) -> float:
    """Sequence parallelism MUST NOT change outputs or updates, and its ranks MUST agree bitwise.

    With documents that cross the split, and numbers of tokens that it does not divide. Documents
    that share their beginnings are computed rightly as well, or refused by name.

    If this fails: targets are shifted within a rank, so that tokens at the split are
    wrong (verl PR 4250); the gradient is counted once a rank, or so is that of shared tokens.
    """
    model = target.model(num_kv_heads=4)
    return holds_with_prefixes(target, model, Parallelism(ulysses=target.world))


@case(id="parallel.ulysses_kv_heads", requires=(Capability.ULYSSES,), world=(2, 4))
def ulysses_kv_heads(target: Target) -> float:
    """Sequence parallelism over more ranks than there are KV heads MUST be right.

    Heads that the ranks do not divide are right as well, or a ``ConfigError`` on all ranks.

    If this fails: ranks that share a KV head read another one, its gradient is not
    summed, or the remainder of the heads is dropped.
    """
    model = target.model(num_kv_heads=target.world // 2, tied=False)
    layout = Parallelism(ulysses=target.world)
    odd = [target.model(num_heads=3, num_kv_heads=count) for count in (3, 1)]
    margins = [right_or_refused(target, one, layout) for one in odd]
    return max(layout_holds(target, model, layout), *margins)


@case(id="parallel.ulysses_with_data", requires=(Capability.ULYSSES, Capability.HSDP), world=(4,))
def ulysses_with_data(target: Target) -> float:
    """Sequence parallelism MUST compose with data parallelism, sharded and replicated.

    If this fails: the denominator or a metric counts a data-parallel rank as often as
    it has members.
    """
    layouts = (Parallelism(ulysses=2), Parallelism(ulysses=2, dp_replicate=2))
    return max(
        layout_holds(target, target.model(), layout, lengths=("skewed", "single"))
        for layout in layouts
    )


def topology(setup: Setup) -> Topology:
    """Return this rank's topology."""
    with opened(setup) as engine:
        return engine.topology


def _declared(target: Target) -> dict[Capability, str]:
    return {
        capability: name
        for capability, name in _FIELDS.items()
        if capability in target.capabilities
    }


@case(id="parallel.topology", model_types=BOTH)
def topology_holds(target: Target) -> None:
    """Ranks and primaries MUST be numbered without gaps, one primary per data-parallel rank.

    In every layout that the engine declares. The sizes by name are those of the layout.

    If this fails: a trainer gives two groups of ranks the same documents, or one none; a size
    counts ranks of another kind as well.
    """
    layouts = [(1, target.layout)]
    if target.world > 1:
        shared = {
            name for capability, name in _declared(target).items() if capability in MODEL_PARALLEL
        }
        layouts = [
            (2 if name in shared else 1, Parallelism(**{name: 2}))
            for name in _declared(target).values()
        ]
        layouts += [(1, Parallelism())] if Capability.DP in target.capabilities else []
    for members, layout in layouts:
        model = target.model(family="qwen3_moe", tied=False) if layout.ep > 1 else target.model()
        rows = target.run(topology, target.config(model, parallelism=layout))
        _numbered(rows, target.world, 1 if target.world == 1 else members, layout)
        if target.is_asked_since("1.3"):
            for row in rows:
                _sizes_are(row, target.world, layout)


def _numbered(rows: Sequence[Topology], world: int, members: int, layout: Parallelism) -> None:
    where = f"{layout}"
    must(
        [row.rank for row in rows] == list(range(world)),
        "rank",
        f"{[row.rank for row in rows]}",
        where=where,
    )
    must(
        {row.world_size for row in rows} == {world},
        "world_size",
        f"{[row.world_size for row in rows]}",
        where=where,
    )
    sizes = {row.dp_size for row in rows}
    # Experts may be spread over data-parallel ranks, or over ranks that share their documents.
    right = {world // members, world // members // layout.ep}
    must(
        len(sizes) == 1 and sizes <= right,
        "dp_size",
        f"{sorted(sizes)}, {sorted(right)} expected",
        where=where,
    )
    held = {rank: [row for row in rows if row.dp_rank == rank] for rank in range(rows[0].dp_size)}
    peers = [len(found) for found in held.values()]
    must(
        set(peers) == {world // rows[0].dp_size},
        "dp_rank",
        f"held by {peers} ranks each",
        where=where,
    )
    primaries = [sum(row.is_primary for row in found) for found in held.values()]
    must(
        set(primaries) == {1},
        "is_primary",
        f"true on {primaries} ranks of each data-parallel rank",
        where=where,
    )


def _sizes_are(row: Topology, world: int, layout: Parallelism) -> None:
    """Require the sizes of a topology, by name and in their product, to be the layout's."""
    sizes = dict(row.sizes)
    where = f"rank {row.rank}, {layout}"
    for one in fields(Parallelism):
        wanted = getattr(layout, one.name)
        got = sizes.get(one.name, 1)
        # "dp" may stand for both kinds of data parallelism.
        unnamed = one.name in DATA and one.name not in sizes
        right = unnamed or wanted in (got, -1)
        must(right, "sizes", f"{one.name} is {got}, expected {wanted}: {sizes}", where=where)
    data = sizes.get("dp", math.prod(sizes.get(name, 1) for name in DATA))
    must(data == row.dp_size, "sizes", f"{data} data-parallel ranks of {row.dp_size}", where=where)
    joined = math.prod(sizes.get(name, 1) for name in MODEL_PARALLEL.values())
    right_products = {world, world // layout.ep}
    problem = f"{sizes} make {data * joined} ranks of {world}"
    must(data * joined in right_products, "sizes", problem, where=where)


def other_documents(setup: Setup, batch: PackedDocuments) -> list[EngineError | None]:
    """Give every rank different documents, then the same ones to all."""
    loss = default_loss(setup.model_type)
    with opened(setup) as engine:
        own = _own(engine, batch, setup.device)
        errors = [
            caught(lambda: engine.train_batch(own, loss)),
            caught(lambda: engine.infer_batch(own)),
        ]
        errors.append(caught(lambda: engine.infer_batch(to_batch(batch, setup.device))))
        return errors


def _own(engine: Engine, batch: PackedDocuments, device: str) -> Batch:
    return to_batch(batch.take([engine.topology.rank]), device)


def _other_documents(capability: Capability) -> None:
    """Register the case of one way of sharing documents."""
    name = MODEL_PARALLEL[capability]

    def refused(target: Target) -> None:
        model = target.model(num_heads=8, num_kv_heads=4, num_layers=4)
        config = target.config(model, parallelism=Parallelism(**{name: target.world}))
        ranks = target.run(other_documents, config, batch=documents(72, "uneven"))
        for index, called in enumerate(("train_batch", "infer_batch")):
            raised_everywhere(called, [errors[index] for errors in ranks], BatchError, faulty=[])
        must(
            all(errors[2] is None for errors in ranks),
            "engine",
            f"is not usable afterwards: {ranks[0][2]}",
        )

    refused.__doc__ = f"""Different documents on ranks that {name} joins MUST be an error on each.

    The ranks are one data-parallel rank. The error is a ``BatchError`` or a ``RankFailure``, and
    the engine stays usable.

    If this fails: the ranks compute one batch out of pieces of several.
    """
    # The oldest of them keeps its name.
    suffix = "" if capability is Capability.ULYSSES else f"_{name}"
    case(id=f"parallel.other_documents{suffix}", requires=(capability,), world=(2, 4))(refused)


for _capability in MODEL_PARALLEL:
    _other_documents(_capability)


@case(id="parallel.misfit", model_types=BOTH)
def misfit(target: Target) -> None:
    """Sizes whose product is not the world MUST raise ``ConfigError`` on every rank.

    The ranks stay usable. Of every kind of parallelism that the engine declares, alone
    and with data parallelism, that of experts with a model that has some.

    If this fails: some ranks are left out, or wait for others in a group that never
    forms.
    """
    world = target.world
    sizes = [Parallelism(dp_shard=world + 1), Parallelism(dp_shard=3)]
    sizes += [Parallelism(**{name: 2 * world}) for name in _declared(target).values()]
    # Experts may be spread over the data-parallel ranks themselves.
    sizes += [
        Parallelism(dp_shard=world, **{name: 2})
        for name in _declared(target).values()
        if name != "ep"
    ]
    # Without data parallelism the size itself may be what is refused.
    own = ConfigError if Capability.DP in target.capabilities else EngineError
    plain = target.model(num_layers=4)
    asked = [(layout, plain) for layout in sizes]
    # Without experts they may be what is refused.
    if Capability.EP in target.capabilities and target.model_type == LM:
        mixtures = target.models({"family": "qwen3_moe", "tied": False})
        asked += [(Parallelism(ep=2 * world), mixture) for mixture in mixtures]
    for layout, model in asked:
        errors = target.run(initialize, target.config(model, parallelism=layout))
        raised_everywhere(f"{layout}", errors, own)
    good = target.layout if world > 1 else Parallelism()
    errors = target.run(initialize, target.config(target.model(), parallelism=good))
    must(errors == [None] * world, "engine", f"cannot be made afterwards: {errors}")
