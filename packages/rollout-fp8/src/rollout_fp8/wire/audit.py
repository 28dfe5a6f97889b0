"""Audit of a sync: checksums of exported and served weights, compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.wire.format import WirePlan, covers

WHERE = "weight sync"
# Of checksums.
MODULUS = 1 << 64
# Boxes of tensors that a worker serves, by name. None: it holds the tensor in a form that cannot be
# read back.
Boxes = Sequence[tuple[str, ShardSpec | None]]


class Audit:
    """Table of the boxes that each worker serves, made once.

    Workers may serve copies of a box (norms and key-value heads under tensor parallelism): all
    copies must agree, and they count once. ``unread`` are the tensors that some worker cannot read
    back; they are not compared.

    Raises:
        RolloutError: the workers together do not serve every element of every tensor.
    """

    def __init__(self, plan: WirePlan, workers: Sequence[Boxes]) -> None:
        self.unread = sorted({name for boxes in workers for name, box in boxes if box is None})
        left_out = set(self.unread)
        self._names = [name for name in plan.tensors if name not in left_out]
        # Of each tensor's boxes: the places of their checksums among those of all workers.
        holders: dict[str, dict[ShardSpec, list[int]]] = {name: {} for name in self._names}
        readable = [(name, box) for boxes in workers for name, box in boxes if box is not None]
        for place, (name, box) in enumerate(readable):
            if name in holders:
                holders[name].setdefault(box, []).append(place)
        self._count = len(readable)
        copies = [places for boxes in holders.values() for places in boxes.values()]
        # Of each box: its tensor, and its first copy.
        owners = [row for row, boxes in enumerate(holders.values()) for _ in boxes]
        self._owners = np.array(owners, dtype=np.int64)
        self._firsts = np.array([places[0] for places in copies], dtype=np.int64)
        # Of each other copy: its box, and its place.
        others = [(box, place) for box, places in enumerate(copies) for place in places[1:]]
        self._others = np.array(others, dtype=np.int64).reshape(-1, 2)
        short = [
            name
            for name, boxes in holders.items()
            if not covers(plan.tensors[name].shape, list(boxes))
        ]
        if short:
            raise RolloutError(
                "the server's workers do not hold every weight exactly once",
                where=WHERE,
                why=f"{len(short)} tensors, {', '.join(short[:5])} among them",
                remedy="use another tensor_parallel_size",
            )

    def check(self, exported: Mapping[str, int], served: Sequence[Sequence[int]]) -> None:
        """Compare the checksums of the export with those of the workers.

        Args:
            exported: checksums by tensor.
            served: each worker's checksums, in the order of the boxes that it can read.

        Raises:
            RolloutError: tensors differ; the error names them.
        """
        assert exported.keys() >= set(self._names), "the export's checksums belong to another plan"
        sums = np.concatenate([np.array(of_worker, dtype=np.int64) for of_worker in served])
        assert len(sums) == self._count, "the workers' checksums belong to other boxes"
        # Sums of unsigned numbers wrap at 2^64, as checksums do.
        of_boxes = sums.view(np.uint64)[self._firsts]
        totals = np.zeros(len(self._names), dtype=np.uint64)
        np.add.at(totals, self._owners, of_boxes)
        wanted = map(exported.__getitem__, self._names)
        is_wrong = totals != np.fromiter(wanted, dtype=np.uint64, count=len(self._names))
        box, place = self._others.T
        is_wrong[self._owners[box[sums.view(np.uint64)[place] != of_boxes[box]]]] = True
        wrong = [self._names[row] for row in np.flatnonzero(is_wrong)]
        if wrong:
            raise RolloutError(
                "the served weights differ from the exported ones",
                where=WHERE,
                why=f"{len(wrong)} of {len(self._names)} tensors differ: {', '.join(wrong[:5])}",
                remedy="nothing is generated until a sync succeeds: sync again, or restart the "
                "rollout",
            )
