"""Reaching the ``SyncExtension`` of vLLM's workers: in this process, or in processes that vLLM started."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout_fp8.audit import Boxes
from rollout_fp8.transports.sender import Sender
from rollout_fp8.transports.workers import SentWorkers
from rollout_fp8.wire import WirePlan, WireStream

EXTENSION = "rollout_fp8.vllm.worker.SyncExtension"
Call = Callable[..., list[Any]]  # vLLM's collective_rpc: (method, args=…) → each worker's result
Answer = tuple[Sequence[int], Mapping[str, float]]


class InProcess:
    """The worker of this process; under tensor parallelism, neighbouring ranks have one each.

    Args:
        call: the engine's ``collective_rpc``.
        aliases: tensors that are served under a second name, by that name.
        parallel: ranks that serve one replica.
    """

    def __init__(self, call: Call, aliases: Mapping[str, str], parallel: int = 1) -> None:
        self._call, self._aliases, self._parallel = call, dict(aliases), parallel

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``."""
        return self._of_all(self._call("rollout_fp8_learn", args=(plan, self._aliases))[0])

    def sync(self, stream: WireStream) -> Sequence[Answer]:
        """See ``Workers.sync``."""
        return self._of_all(self._call("rollout_fp8_sync", args=(stream,))[0])

    def _of_all(self, mine: Any) -> list[Any]:
        """Of the ranks that serve this replica, by rank."""
        if self._parallel == 1:
            return [mine]
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, mine)
        first = dist.get_rank() // self._parallel * self._parallel
        return rows[first : first + self._parallel]


class OtherProcesses(SentWorkers):
    """Workers in processes of vLLM's: CUDA IPC on a GPU, shared memory on a CPU.

    Args: as ``InProcess``; ``workers`` is how many there are.
    """

    def __init__(self, call: Call, aliases: Mapping[str, str], workers: int, device: torch.device) -> None:
        super().__init__(call, Sender(kind="ipc" if device.type == "cuda" else "shm", receivers=workers))
        self._aliases = dict(aliases)

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``."""
        told = self._call("rollout_fp8_learn_pickled", args=(pickle.dumps(plan), self._aliases))
        return [pickle.loads(boxes) for boxes in told]  # noqa: S301 - from children of this process

    def close(self) -> None:
        """Idempotent."""
        self._sender.close()
