"""Audit of a sync: checksums of exported and served weights, compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        read = [name for name in plan.tensors if name not in self.unread]
        self._holders: dict[str, dict[ShardSpec, list[tuple[int, int]]]] = {
            name: {} for name in read
        }
        for worker, boxes in enumerate(workers):
            for index, (name, box) in enumerate(
                (name, box) for name, box in boxes if box is not None
            ):
                if name in self._holders:
                    self._holders[name].setdefault(box, []).append((worker, index))
        short = [
            name
            for name, holders in self._holders.items()
            if not covers(plan.tensors[name].shape, list(holders))
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
        assert exported.keys() >= self._holders.keys(), (
            "the export's checksums belong to another plan"
        )
        wrong = [
            name
            for name, holders in self._holders.items()
            if not _agrees(exported[name], holders, served)
        ]
        if wrong:
            raise RolloutError(
                "the served weights differ from the exported ones",
                where=WHERE,
                why=f"{len(wrong)} of {len(self._holders)} tensors differ: {', '.join(wrong[:5])}",
                remedy="nothing is generated until a sync succeeds: sync again, or restart the "
                "rollout",
            )


def _agrees(
    exported: int,
    holders: Mapping[ShardSpec, list[tuple[int, int]]],
    served: Sequence[Sequence[int]],
) -> bool:
    total = 0
    for places in holders.values():
        values = {served[worker][index] % MODULUS for worker, index in places}
        if len(values) != 1:
            return False
        total += values.pop()
    return total % MODULUS == exported
