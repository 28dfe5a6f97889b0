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
        self._learned: _Learned | None = None

    def run(self, stream: WireStream, version: int) -> SyncResult:
        """Install the stream and compare what is served with it.

        Raises:
            RolloutError: the stream is of another model, weights are not finite, or the audit
                failed; some weights may then be new and some old, so that nothing may be generated.
        """
        plan = stream.plan
        if self._learned is None or not self._learned.fits(plan):
            self._learned = None
            if self._expected is not None:
                self._expected.check(plan)
            self._learned = _Learned(plan, Audit(plan, self._workers.learn(plan)))
            if stream.audit and (unread := self._learned.audit.unread):
                log.warning(
                    "the server cannot read back %d of %d tensors, %s among them: "
                    "the audit leaves them out",
                    len(unread),
                    len(plan.tensors),
                    unread[0],
                )
        learned = self._learned
        results = self._workers.sync(stream)
        # This also raises where a weight was not finite.
        exported = stream.checksums()
        if stream.audit:
            learned.audit.check(exported, [sums for sums, _ in results])
        seconds = dict(stream.seconds())
        for _, phases in results:
            for name, value in phases.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
        return SyncResult(
            version=version,
            num_tensors=learned.num_tensors,
            num_quantized=learned.num_quantized,
            num_bytes=learned.num_bytes,
            seconds=seconds,
            audited=stream.audit and not learned.audit.unread,
        )

    def forget_weights(self) -> None:
        """Note that the server sleeps. Every sync brings all weights, so there is nothing to do."""

    def forget(self) -> None:
        """Learn again at the next sync, because the server was made again."""
        self._learned = None


class _Learned:
    """The parts of a sync of thousands of tensors that stay the same from sync to sync."""

    def __init__(self, plan: WirePlan, audit: Audit) -> None:
        self.audit = audit
        tensors = plan.tensors.values()
        scales = sum(name.endswith(SCALE_SUFFIX) for name in plan.tensors)
        self.num_tensors = len(tensors) - scales
        self.num_quantized = sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
        self.num_bytes = plan.num_bytes
        self._plan = plan

    def fits(self, plan: WirePlan) -> bool:
        """Return whether a plan has the same tensors."""
        return plan is self._plan or plan.tensors == self._plan.tensors
