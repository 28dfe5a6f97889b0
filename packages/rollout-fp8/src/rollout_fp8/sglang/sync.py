"""The rollout's side of a sync into SGLang."""

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
    """SGLang's schedulers, one a GPU, as ``rollout_fp8.install.session.Workers``: CUDA IPC on a GPU, shared memory on a CPU.

    One call of SGLang's runs the loader in all of them, once: to learn, or to install.

    Args:
        host: SGLang's engine.
        count: of schedulers.
        device: where the weights come from.
    """

    def __init__(self, host: Host, count: int, device: torch.device) -> None:
        super().__init__(
            self._run_loader,
            Sender(kind="ipc" if device.type == "cuda" else "shm", receivers=count),
        )
        self._host, self._device = host, device

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
    """A stream of a plan's names and shapes alone. Whoever gets one learns where the tensors go, and answers its boxes."""

    audit = False

    def __init__(self, plan: WirePlan, device: torch.device) -> None:
        self.plan, self.device = (
            WirePlan(tensors=plan.tensors, buckets=(), slots=(), notes={}),
            device,
        )

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """None."""
        return iter(())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """None."""
        return iter(())

    def checksums(self) -> Mapping[str, int]:
        """None."""
        return {}

    def seconds(self) -> Mapping[str, float]:
        """None."""
        return {}
