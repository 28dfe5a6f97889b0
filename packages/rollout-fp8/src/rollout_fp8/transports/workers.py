"""Workers in processes of their own, reached by a call that blocks until all of them are through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout_fp8.transports.sender import Sender
from rollout_fp8.wire import WireStream


class SentWorkers:
    """The ``sync`` of ``session.Workers`` that fetch the weights themselves.

    Args:
        call: runs a method on every worker and returns all results by rank: vLLM's ``collective_rpc``.
            ``rollout_fp8_pull(address)`` does
            ``with receive_weights(address, rank=…, device=…) as stream``, installs it, and sets ``stream.answer`` to its
            checksums and seconds.
        sender: for as many receivers as there are workers.
    """

    def __init__(self, call: Callable[..., Sequence[Any]], sender: Sender) -> None:
        self._call, self._sender = call, sender

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """See ``Workers.sync``. Raises ``RolloutError`` with what every worker that failed has to say."""
        called: Future[object] = Future()
        call = partial(self._call, "rollout_fp8_pull", args=(self._sender.address,))
        # A daemon, that nobody joins: after a failure it may wait for a worker that hangs.
        threading.Thread(target=_settle, args=(called, call), daemon=True).start()

        def watch() -> None:
            if called.done():
                called.result()  # raises: they cannot have the weights yet

        delivery = self._sender.send_weights(stream, watch)
        called.result(self._sender.timeout_s)
        return delivery.answers


def _settle(future: Future[object], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
