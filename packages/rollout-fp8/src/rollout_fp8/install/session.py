"""Sync from a rollout's side (learn once, install, audit), for any server and transport."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine_api.rollout import SyncResult
from rollout_fp8.wire.audit import Audit, Boxes
from rollout_fp8.wire.expected import Expected
from rollout_fp8.wire.format import SCALE_SUFFIX, WirePlan, WireStream

log = logging.getLogger("rollout_fp8")


class Workers(Protocol):
    """Processes (or the one process) that serve a replica, each with a ``Receiver``."""

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """Learn the server's layout, and return the plan's tensors that each worker serves."""
        ...

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """Install the stream.

        Returns:
            Each worker's checksums in the order of its boxes (none without audit), and its seconds
                by phase.
        """
        ...


class SyncSession:
    """Syncs of one rollout.

    Args:
        workers: the workers that serve it.
        expected: weights that the model holds, and that every stream must hold; None: those that
            the workers' own loaders ask for.
    """

    def __init__(self, workers: Workers, expected: Expected | None = None) -> None:
        self._workers = workers
        self._expected = expected
        self._audit: tuple[WirePlan, Audit] | None = None

    def run(self, stream: WireStream, version: int) -> SyncResult:
        """Install the stream and compare what is served with it.

        Raises:
            RolloutError: the stream is of another model, weights are not finite, or the audit
                failed; some weights may then be new and some old, so that nothing may be generated.
        """
        plan = stream.plan
        if self._audit is None or self._audit[0].tensors != plan.tensors:
            self._audit = None
            if self._expected is not None:
                self._expected.check(plan)
            self._audit = (plan, Audit(plan, self._workers.learn(plan)))
            if stream.audit and (unread := self._audit[1].unread):
                log.warning(
                    "the server cannot read back %d of %d tensors, %s among them: "
                    "the audit leaves them out",
                    len(unread),
                    len(plan.tensors),
                    unread[0],
                )
        results = self._workers.sync(stream)
        # This also raises where a weight was not finite.
        exported = stream.checksums()
        if stream.audit:
            self._audit[1].check(exported, [sums for sums, _ in results])
        seconds = dict(stream.seconds())
        for _, phases in results:
            for name, value in phases.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
        quantized = sum(t.dtype == torch.float8_e4m3fn for t in plan.tensors.values())
        scales = sum(name.endswith(SCALE_SUFFIX) for name in plan.tensors)
        return SyncResult(
            version=version,
            num_tensors=len(plan.tensors) - scales,
            num_quantized=quantized,
            num_bytes=plan.num_bytes,
            seconds=seconds,
            audited=stream.audit and not self._audit[1].unread,
        )

    def forget_weights(self) -> None:
        """Note that the server sleeps. Every sync brings all weights, so there is nothing to do."""

    def forget(self) -> None:
        """Learn again at the next sync, because the server was made again."""
        self._audit = None
