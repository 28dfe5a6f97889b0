"""Rollout's side of a sync into SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine_api.errors import RolloutError
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.options import LOADER
from rollout_fp8.transports.sender import Sender
from rollout_fp8.transports.workers import SentWorkers
from rollout_fp8.wire.audit import Boxes
from rollout_fp8.wire.format import BucketPlan, WirePlan

WHERE = "weight sync"


class Schedulers(SentWorkers):
    """SGLang's schedulers, one for each GPU, as ``rollout_fp8.install.session.Workers``.

    Weights come by CUDA IPC on a GPU and by shared memory on a CPU. One call of SGLang's runs the
    loader in all schedulers, once: to learn, or to install.

    Args:
        host: SGLang's engine.
        count: number of schedulers.
        device: device that the weights come from.
    """

    def __init__(self, host: Host, count: int, device: torch.device) -> None:
        super().__init__(
            self._run_loader,
            Sender(kind="ipc" if device.type == "cuda" else "shm", receivers=count),
        )
        self._host = host
        self._device = device

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``. Raises ``RolloutError``."""
        return self.carry(Outline(plan, self._device))

    def _run_loader(self, method: str, args: tuple[str]) -> None:
        del method  # SGLang names it by ``load_format``
        # The tensor is empty because SGLang would copy any other to each GPU. Caches are not
        # flushed here: SGLang ends the scheduler when a last request has not quite left it
        # (``flush_cache_after_weight_update``).
        named = [(args[0], torch.empty(0))]
        good, message = self._host.call(
            lambda: self._host.engine.update_weights_from_tensor(
                named, load_format=LOADER, flush_cache=False
            )
        )
        if not good:
            raise RolloutError(
                "SGLang refused the sync",
                where=WHERE,
                why=message,
                remedy="sync again, or restart the rollout",
            )


class Outline:
    """Stream of a plan's names and shapes alone.

    A scheduler that gets it learns where the tensors go, and answers with its boxes.
    """

    audit = False

    def __init__(self, plan: WirePlan, device: torch.device) -> None:
        self.plan = WirePlan(tensors=plan.tensors, buckets=(), slots=(), notes={})
        self.device = device

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """Return no buckets."""
        return iter(())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Return no tensors."""
        return iter(())

    def checksums(self) -> Mapping[str, int]:
        """Return no checksums."""
        return {}

    def seconds(self) -> Mapping[str, float]:
        """Return no seconds."""
        return {}
