"""Agreement between ranks before an engine has made their process group."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from typing import Any

from engine_api.codec import CodecError, decode, encode
from engine_api.comm import Comm, SingleComm, TorchComm
from engine_api.connections import Process
from engine_api.errors import RankFailure

_rounds = itertools.count()  # agreements of this process; every rank makes equally many
_LOOK_S = 0.02  # seconds between two looks for a rank's value
_LONGEST_LOOK_S = 0.5


def connect_ranks(timeout_s: float) -> Comm:
    """Return the agreement of all ranks that torchrun started, or of this process alone without it.

    Args:
        timeout_s: seconds after which a rank that lives and does not respond is a ``RankFailure``.
    """
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SingleComm()
    if dist.is_initialized():
        return TorchComm(timedelta(seconds=timeout_s))
    return StoreComm(timeout_s)


class StoreComm:
    """Agreement through the store by which the ranks find each other.

    The store is at ``MASTER_ADDR`` and ``MASTER_PORT``. Any process that reaches it can write to
    it. Its contents are decoded as data (``engine_api.codec``): a foreign value is a
    ``CodecError``, or a wrong value, and none of it is executed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self._timeout_s = timeout_s
        self._store: Any = None
        self._first = 0  # first round of this agreement
        self._known: dict[int, Process] = {}  # published processes by rank

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (see ``Comm``).

        Raises ``RankFailure`` for a rank whose process has ended, or that does not respond in time.
        """
        import torch.distributed as dist

        round_ = next(_rounds)
        failed: CodecError | None = None
        try:
            message = encode((None, value))
        except CodecError as error:
            # The other ranks wait for this one and receive the error; it is raised here below.
            failed = error
            message = encode((str(error), None))
        try:
            if self._store is None:
                self._store = self._join_store(round_)
            _publish(self._store, f"{round_}/{self.rank}", message)
            found = self._collect(round_)
        except dist.DistError as error:
            # The launcher, or the rank that serves the store, is gone.
            raise RankFailure(
                {0: f"the store that it or the launcher serves cannot be reached: {error}"}
            ) from error
        if failed is not None:
            raise failed
        rows = [_row(f"{round_}/{rank}", decode(message)) for rank, message in enumerate(found)]
        failures = {rank: error for rank, (error, _) in enumerate(rows) if error is not None}
        if failures:
            raise RankFailure(failures)
        return [value for _, value in rows]

    def close(self) -> None:
        """Release the store."""
        self._store = None

    def _join_store(self, round_: int) -> Any:
        """Return the store, after this rank's process has been published in it."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        limit = timedelta(seconds=self._timeout_s)
        store, _, _ = next(rendezvous("env://", self.rank, self.world_size, timeout=limit))
        # The class is documented, but not re-exported.
        mine = dist.PrefixStore("engine_trainer", store)  # pyright: ignore[reportPrivateImportUsage]
        self._first = round_
        _publish(mine, f"process/{round_}/{self.rank}", encode(Process.this()))
        return mine

    def _collect(self, round_: int) -> list[bytes]:
        found: dict[int, bytes] = {}
        end = time.monotonic() + self._timeout_s
        pause = _LOOK_S
        while True:
            for rank in range(self.world_size):
                key = f"{round_}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._store.get(key)
            missing = [rank for rank in range(self.world_size) if rank not in found]
            if not missing:
                return [found[rank] for rank in range(self.world_size)]
            ended = self._ended(missing, round_)
            if ended:
                raise RankFailure(ended)
            if time.monotonic() > end:
                raise RankFailure({rank: self._describe_late(rank) for rank in missing})
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_S)

    def _ended(self, ranks: list[int], round_: int) -> dict[int, str]:
        """Return a description of each of ``ranks`` whose process has ended."""
        found: dict[int, str] = {}
        for rank in ranks:
            process = self._process(rank)
            # Its value may have come between the look at the store and the process's end.
            if (
                process is not None
                and process.is_gone()
                and not self._store.check([f"{round_}/{rank}"])
            ):
                found[rank] = (
                    f"its process {process.pid} on {process.host} is gone; its log: {process.log}"
                )
        return found

    def _describe_late(self, rank: int) -> str:
        process = self._process(rank)
        if process is None:
            return f"it has not joined within {self._timeout_s:g} s, and nothing is known about it"
        state = "is stopped" if process.is_stopped() else "does not join"
        return (
            f"its process {process.pid} on {process.host} {state} after {self._timeout_s:g} s; "
            f"its log: {process.log}"
        )

    def _process(self, rank: int) -> Process | None:
        key = f"process/{self._first}/{rank}"
        if rank not in self._known and self._store.check([key]):
            process = decode(self._store.get(key))
            if not isinstance(process, Process):
                raise _unknown_value(key, process)
            self._known[rank] = process
        return self._known.get(rank)


def _row(key: str, value: Any) -> tuple[str | None, Any]:
    if type(value) is not tuple or len(value) != 2 or not isinstance(value[0], str | None):
        raise _unknown_value(key, value)
    return value


def _publish(store: Any, key: str, message: bytes) -> None:
    """Write a key that no one has written yet. Raises ``CodecError`` if it exists."""
    if store.check([key]):
        raise _unknown_value(key, store.get(key)[:16])
    store.set(key, message)


def _unknown_value(key: str, found: object) -> CodecError:
    return CodecError(
        "the run's store holds a value that no rank has written",
        where=f"MASTER_ADDR:MASTER_PORT, key engine_trainer/{key}",
        why=f"found {found!r}",
        remedy="check who else can reach this port: it is open to the run's network, without a "
        "password",
    )
