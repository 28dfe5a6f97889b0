"""A rank's boxes of an export, and the check that those of all ranks make the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api.contract import Engine
from engine_api.weights import ShardSpec
from engine_conformance.cases._case import must
from engine_conformance.cases._ranks import whole_weights
from engine_conformance.compare import assert_covered_once

Shards = list[tuple[str, Tensor, ShardSpec]]


def shards_and_whole(
    engine: Engine, **arguments: Any
) -> tuple[Shards, list[str], dict[str, Tensor]]:
    """Return this rank's shards, the order of the whole export, and on rank 0 the export itself."""
    mine = _in_turns(engine.get_per_tensor_param_shard(**arguments))
    whole = whole_weights(engine, **arguments)
    return mine, list(whole), whole if engine.topology.rank == 0 else {}


def _in_turns(export: Iterable[Any]) -> Shards:
    """Let all ranks begin, then let each read to its end while the others wait.

    An engine that gathers while it is read waits for ever.
    """
    export = iter(export)
    mine = [_shard(item) for item in islice(export, 1)]
    turns = dist.get_world_size() if dist.is_initialized() else 1
    for turn in range(turns):
        if turns == 1 or dist.get_rank() == turn:
            mine += [_shard(item) for item in export]
        if turns > 1:
            dist.barrier()
    return mine


def _shard(item: Any) -> tuple[str, Tensor, ShardSpec]:
    is_triple = isinstance(item, tuple) and len(item) == 3 and isinstance(item[2], ShardSpec)
    must(is_triple, "shard", f"yields {type(item).__name__}, not (name, shard, ShardSpec)")
    name, shard, spec = item
    plain = isinstance(shard, Tensor) and not isinstance(shard, DTensor)
    must(plain, "shard", f"a {type(shard).__name__}, not a plain tensor", where=str(name))
    return name, shard.detach().to("cpu", copy=True), spec


def shards_make_the_whole(ranks: Sequence[tuple[Shards, list[str], dict[str, Tensor]]]) -> float:
    """Require that boxes of replica 0 cover each tensor exactly once.

    Other replicas must hold the same bits.
    """
    whole = ranks[0][2]
    for rank, (mine, order, _) in enumerate(ranks):
        must(
            [name for name, _, _ in mine] == order,
            "shard order",
            "is not the export's",
            where=f"rank {rank}",
        )
    for name, want in whole.items():
        covered = torch.zeros(want.shape, dtype=torch.uint8)
        boxes = dict[str, Any]()
        for rank, (mine, _, _) in enumerate(ranks):
            shard, spec = next((s, b) for n, s, b in mine if n == name)
            where = f"{name} on rank {rank}"
            must(
                tuple(shard.shape) == spec.shape and spec.global_shape == tuple(want.shape),
                "shard",
                f"{spec}",
                where=where,
            )
            box = tuple(slice(o, o + n) for o, n in zip(spec.offset, spec.shape, strict=True))
            must(
                shard.dtype == want.dtype,
                "shard",
                f"{shard.dtype}, the export has {want.dtype}",
                where=where,
            )
            must(
                torch.equal(shard, want[box]), "shard", "differs from the whole export", where=where
            )
            if spec.replica == 0:
                covered[box] += 1
                boxes[f"rank {rank}"] = box
        assert_covered_once("shards", covered, boxes, where=name)
    return 0.0
