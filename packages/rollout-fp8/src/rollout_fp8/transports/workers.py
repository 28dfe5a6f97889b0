"""Workers in their own processes, reached by a call that blocks until all of them have finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine_api.errors import PeerError
from rollout_fp8.transports.channel import WHERE
from rollout_fp8.transports.sender import Sender
from rollout_fp8.wire.format import WireStream


class SentWorkers:
    """Workers with the ``sync`` of ``session.Workers``, which fetch the weights themselves.

    Args:
        call: runs a method on every worker and returns when all have finished, for example vLLM's
            ``collective_rpc``. ``rollout_fp8_pull(address)`` does ``with receive_weights(address,
            rank=…, device=…) as stream``, installs the stream, and sets ``stream.answer`` to its
            checksums and seconds.
        sender: sender for as many receivers as there are workers.
    """

    def __init__(self, call: Callable[..., Any], sender: Sender) -> None:
        self._call = call
        self._sender = sender

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """See ``Workers.sync``.

        Raises:
            RolloutError: workers failed; the error has the message of each.
        """
        return self.carry(stream)

    def carry(self, stream: WireStream) -> list[Any]:
        """Send a stream to all workers, and return their answers. Raises as ``sync`` does."""
        called: Future[object] = Future()
        call = partial(self._call, "rollout_fp8_pull", args=(self._sender.address,))
        # A daemon thread that is never joined: after a failure it may wait for a worker that hangs.
        threading.Thread(target=_settle, args=(called, call), daemon=True).start()
        delivery = self._sender.send_weights(stream, _Watch(called))
        try:
            called.result(self._sender.timeout_s)
        except TimeoutError as error:
            raise PeerError(
                "the workers have the weights, but do not return",
                where=WHERE,
                why=f"nothing within {self._sender.timeout_s:g} s",
                remedy="check whether a process of the server hangs",
            ) from error
        return delivery.answers

    def close(self) -> None:
        """Close the sender (idempotent)."""
        self._sender.close()


class _Watch:
    """Watch that ends the wait for workers that cannot come any more."""

    def __init__(self, called: Future[object]) -> None:
        self._called = called
        self._over = False

    def __call__(self) -> None:
        """Raise the call's error, or ``PeerError`` when it has ended and all messages are heard."""
        if self._called.done():
            self._called.result()
            if self._over:
                # Also at the last check: whatever was sent before the end has come by now.
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
    except Exception as error:  # noqa: BLE001 - the caller that waits for the future gets it
        future.set_exception(error)
