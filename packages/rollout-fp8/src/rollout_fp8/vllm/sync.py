"""Access to the ``SyncExtension`` of vLLM's workers, in this process or in processes of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.lora.request import LoRARequest

from engine_api.codec import decode, encode
from rollout_fp8.failures import describe_error
from rollout_fp8.install.adapter_session import LoadedAdapter
from rollout_fp8.install.positions import ServedPositions
from rollout_fp8.ranks import of_all
from rollout_fp8.transports.sender import Sender
from rollout_fp8.transports.workers import SentWorkers
from rollout_fp8.wire.audit import Boxes
from rollout_fp8.wire.format import WirePlan, WireStream

EXTENSION = "rollout_fp8.vllm.worker.SyncExtension"
T = TypeVar("T")
# vLLM's collective_rpc: (method, args=…) → each worker's result.
Call = Callable[..., list[Any]]
WorkerReply = tuple[Sequence[int], Mapping[str, float]]


class ServedAdapter:
    """Adapter of vLLM's engine, which has one at a time, under a new number each time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # vLLM warms up with number 1.
        self._numbers = count(2)
        # Passed with each request that is to be served with the adapter.
        self.request: LoRARequest | None = None

    @property
    def number(self) -> int:
        """The number of the loaded adapter."""
        assert self.request is not None, "no adapter is loaded"
        return self.request.lora_int_id

    def load(self, folder: Path) -> str:
        """Replace the adapter by the one in ``folder``, and return the reason if vLLM could not."""
        old = self.request
        self.request = None
        if old is not None:
            self._engine.remove_lora(old.lora_int_id)
        number = next(self._numbers)
        request = LoRARequest(f"adapter-{number}", number, str(folder))
        try:
            if not self._engine.add_lora(request):
                return "vLLM did not load it"
        except Exception as error:  # noqa: BLE001 - a server's loader raises anything; all ranks get it
            return describe_error(error)
        self.request = request
        return ""


class InProcess:
    """Worker of this process.

    Under tensor parallelism, neighbouring ranks have one each.

    Args:
        call: the engine's ``collective_rpc``.
        aliases: tensors that are served under a second name, by that name.
        parallel: number of ranks that serve one replica.
        adapter: the engine's adapter, if it serves one.
    """

    def __init__(
        self,
        call: Call,
        aliases: Mapping[str, str],
        parallel: int = 1,
        adapter: ServedAdapter | None = None,
    ) -> None:
        self._call = call
        self._aliases = dict(aliases)
        self._parallel = parallel
        self._adapter = adapter

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``."""
        return self._of_all(lambda: self._call("rollout_fp8_learn", args=(plan, self._aliases))[0])

    def sync(self, stream: WireStream) -> Sequence[WorkerReply]:
        """See ``Workers.sync``."""

        def sync() -> WorkerReply:
            try:
                return self._call("rollout_fp8_sync", args=(stream,))[0]
            except Exception:
                # After any error, because the other ranks rely on this one in the stream's gathers.
                for _ in stream:
                    pass
                raise

        return self._of_all(sync)

    def read_positions(self, positions: list[int]) -> list[ServedPositions]:
        """Return the rotary tables and scales at these positions that the ranks serve, by rank."""
        found = self._of_all(lambda: self._call("rollout_fp8_positions", args=(positions,))[0])
        return [decode(one) for one in found]

    def cache_refusals(self) -> list[str]:
        """Return the reasons why the scales of the FP8 cache cannot be set."""
        return list(chain(*self._of_all(lambda: self._call("rollout_fp8_cache_refusals")[0])))

    def observe_cache(self) -> None:
        """Note the numbers of the next passes for ``scale_cache``."""
        self._of_all(lambda: self._call("rollout_fp8_observe_cache"))

    def scale_cache(self, tokens: int) -> list[dict[str, float]]:
        """Set the scales of the FP8 cache on all ranks, and return them by rank."""
        return self._of_all(lambda: self._call("rollout_fp8_scale_cache", args=(tokens,))[0])

    def forget_cache(self) -> None:
        """End on this rank what ``observe_cache`` began, after an error (idempotent)."""
        self._call("rollout_fp8_forget_cache")

    def load_adapter(self, folder: Path, *, audit: bool) -> Sequence[LoadedAdapter]:
        """See ``AdapterWorkers.load_adapter``.

        Every rank has a folder of its own.
        """
        return self._of_all(lambda: _held(self._call, self._adapter, folder, audit=audit)[0])

    def _of_all(self, work: Callable[[], T]) -> list[T]:
        """Return the results of the ranks that serve this replica, by rank.

        It raises on all ranks where it fails on one (see ``of_all``).
        """
        if self._parallel == 1:
            return [work()]
        first = dist.get_rank() // self._parallel * self._parallel
        return of_all(work)[first : first + self._parallel]


class OtherProcesses(SentWorkers):
    """Workers in processes of vLLM's: CUDA IPC on a GPU, shared memory on a CPU.

    The arguments are those of ``InProcess``; ``workers`` is the number of workers.
    """

    def __init__(
        self,
        call: Call,
        aliases: Mapping[str, str],
        workers: int,
        device: torch.device,
        adapter: ServedAdapter | None = None,
    ) -> None:
        super().__init__(
            call, Sender(kind="ipc" if device.type == "cuda" else "shm", receivers=workers)
        )
        self._aliases = dict(aliases)
        self._adapter = adapter

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``."""
        encoded = self._call("rollout_fp8_learn_encoded", args=(encode(plan), self._aliases))
        return [decode(boxes) for boxes in encoded]

    def read_positions(self, positions: list[int]) -> list[ServedPositions]:
        """Return the rotary tables and scales at these positions of all workers, by worker."""
        return [decode(one) for one in self._call("rollout_fp8_positions", args=(positions,))]

    def cache_refusals(self) -> list[str]:
        """Return the reasons of all workers why the scales of the FP8 cache cannot be set."""
        return list(chain(*self._call("rollout_fp8_cache_refusals")))

    def observe_cache(self) -> None:
        """Note the numbers of the next passes on all workers, for ``scale_cache``."""
        self._call("rollout_fp8_observe_cache")

    def scale_cache(self, tokens: int) -> list[dict[str, float]]:
        """Set the scales of the FP8 cache on all workers, and return them by worker."""
        return self._call("rollout_fp8_scale_cache", args=(tokens,))

    def forget_cache(self) -> None:
        """End on all workers what ``observe_cache`` began, after an error (idempotent)."""
        self._call("rollout_fp8_forget_cache")

    def load_adapter(self, folder: Path, *, audit: bool) -> Sequence[LoadedAdapter]:
        """See ``AdapterWorkers.load_adapter``.

        All workers read one folder.
        """
        return _held(self._call, self._adapter, folder, audit=audit)

    def close(self) -> None:
        """Close the sender (idempotent)."""
        self._sender.close()


def _held(
    call: Call, adapter: ServedAdapter | None, folder: Path, *, audit: bool
) -> list[LoadedAdapter]:
    assert adapter is not None, "the engine was started without adapters"
    error = adapter.load(folder)
    if error:
        return [LoadedAdapter(error=error)]
    encoded = call("rollout_fp8_adapter", args=(adapter.number, audit))
    return [decode(held) for held in encoded]
