"""One sync from a rollout's side: learn once, install, audit; whichever server and transport."""

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
    """The processes (or the one) that serve a replica, each with a ``Receiver``."""

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """What each worker serves of the plan's tensors."""
        ...

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """Install; each worker's checksums in the order of its boxes (none without audit), and seconds by phase."""
        ...


class SyncSession:
    """The syncs of one rollout.

    Args:
        workers: that serve it.
        expected: what the model holds, and every stream must; None: what the workers' own loaders say.
    """

    def __init__(self, workers: Workers, expected: Expected | None = None) -> None:
        self._workers, self._expected = workers, expected
        self._audit: tuple[WirePlan, Audit] | None = None

    def run(self, stream: WireStream, version: int) -> SyncResult:
        """Install the stream and compare what is served with it.

        Raises:
            RolloutError: another model, weights that are not finite, or a failed audit; some weights may then be new
                and some old, so that nothing may be generated.
        """
        plan = stream.plan
        if self._audit is None or self._audit[0].tensors != plan.tensors:
            self._audit = None
            if self._expected is not None:
                self._expected.check(plan)
            self._audit = (plan, Audit(plan, self._workers.learn(plan)))
            if stream.audit and (unread := self._audit[1].unread):
                log.warning(
                    "the server cannot read back %d of %d tensors, %s among them: the audit leaves them out",
                    len(unread),
                    len(plan.tensors),
                    unread[0],
                )
        results = self._workers.sync(stream)
        exported = stream.checksums()  # also says whether every weight was finite
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
        """The server sleeps: every sync brings all weights anyway."""

    def forget(self) -> None:
        """The server was made anew: learn again at the next sync."""
        self._audit = None
