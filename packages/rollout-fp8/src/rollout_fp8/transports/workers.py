"""Workers in processes of their own, reached by a call that blocks until all of them are through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout_fp8.transports.channel import WHERE, PeerError
from rollout_fp8.transports.sender import Sender
from rollout_fp8.wire.format import WireStream


class SentWorkers:
    """The ``sync`` of ``session.Workers`` that fetch the weights themselves.

    Args:
        call: runs a method on every worker and returns when all are through: vLLM's
            ``collective_rpc``, say. ``rollout_fp8_pull(address)`` does ``with
            receive_weights(address, rank=…, device=…) as stream``, installs it, and sets
            ``stream.answer`` to its checksums and seconds.
        sender: for as many receivers as there are workers.
    """

    def __init__(self, call: Callable[..., Any], sender: Sender) -> None:
        self._call, self._sender = call, sender

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """See ``Workers.sync``. Raises ``RolloutError`` with what every worker that failed has to say."""
        return self.carry(stream)

    def carry(self, stream: WireStream) -> list[Any]:
        """Have all workers take a stream; their answers. Raises as ``sync`` does."""
        called: Future[object] = Future()
        call = partial(self._call, "rollout_fp8_pull", args=(self._sender.address,))
        # A daemon, that nobody joins: after a failure it may wait for a worker that hangs.
        threading.Thread(target=_settle, args=(called, call), daemon=True).start()
        delivery = self._sender.send_weights(stream, _Watch(called))
        try:
            called.result(self._sender.timeout_s)
        except TimeoutError as error:
            raise PeerError(
                "the workers have the weights, but do not return",
                where=WHERE,
                why=f"nothing within {self._sender.timeout_s:g} s",
                remedy="see whether a process of the server hangs",
            ) from error
        return delivery.answers

    def close(self) -> None:
        """Idempotent."""
        self._sender.close()


class _Watch:
    """Ends the wait for workers that cannot come any more."""

    def __init__(self, called: Future[object]) -> None:
        self._called, self._over = called, False

    def __call__(self) -> None:
        """Raises what the call raised, and ``PeerError`` when it is over and all that was said has been heard."""
        if self._called.done():
            self._called.result()
            if self._over:  # at the last look too: whatever was sent before the end has come by now
                raise PeerError(
                    "the workers returned without the weights",
                    where=WHERE,
                    why="some did not take part to the end",
                    remedy="see their messages",
                )
            self._over = True


def _settle(future: Future[object], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
