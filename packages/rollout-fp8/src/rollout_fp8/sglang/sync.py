"""The rollout's side of a sync into SGLang: it drives the loaders in the schedulers, bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from engine_api.errors import RolloutError
from rollout_fp8.audit import Boxes
from rollout_fp8.sglang.channel import (
    Begin,
    Channel,
    ChannelClosed,
    End,
    Failed,
    Filled,
    Installed,
    Learn,
    Learnt,
    Listener,
)
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.options import LOADER
from rollout_fp8.wire import BucketPlan, WirePlan, WireStream

WHERE = "weight sync"


class Schedulers:
    """SGLang's schedulers, one a GPU, as ``rollout_fp8.session.Workers``.

    The buffers of an exporter are shared with them once and kept. A stream that comes only once (a plain export) is copied
    into these on the device.

    Args:
        host: SGLang's engine.
        count: of schedulers.
    """

    def __init__(self, host: Host, count: int) -> None:
        self._host, self._count = host, count
        self._plan: WirePlan | None = None  # that the schedulers know
        self._seen: WirePlan | None = None  # of the last stream
        self._shared: dict[int, Tensor] = {}  # by slot

    def learn(self, plan: WirePlan) -> Sequence[Boxes]:
        """See ``Workers.learn``. Raises ``RolloutError``."""
        self.forget()
        with self._session() as channels:
            boxes = [answer.boxes for answer in self._ask(channels, Learn(plan=plan)) if isinstance(answer, Learnt)]
        self._plan = plan
        return boxes

    def sync(self, stream: WireStream) -> Sequence[tuple[Sequence[int], Mapping[str, float]]]:
        """See ``Workers.sync``. Raises ``RolloutError``; the schedulers then serve a mixture of old and new weights."""
        again, self._seen = stream.plan is self._seen, stream.plan
        # Another exporter whose plan comes a second time keeps its buffers; of one that comes once they are copied.
        known = stream.plan is self._plan or (not again and stream.plan == self._plan)
        new = None if known else stream.plan
        if new is not None:
            self._shared.clear()
        with self._session() as channels:
            self._tell(channels, Begin(plan=new, audit=stream.audit))
            waited = 0.0
            for index, (bucket, buffer) in enumerate(stream.buckets()):
                message = Filled(index=index, buffer=self._share(bucket, buffer))
                if buffer.is_cuda:
                    torch.cuda.current_stream(buffer.device).synchronize()  # another process is about to read it
                begin = time.perf_counter()
                self._ask(channels, message)
                waited += time.perf_counter() - begin
            answers = [a for a in self._ask(channels, End()) if isinstance(a, Installed)]
        self._plan = self._plan if new is None else new
        longest = max(answer.seconds.get("install", 0.0) for answer in answers)
        transfer = {"transfer": max(0.0, waited - longest)}
        return [(answer.checksums, answer.seconds | transfer) for answer in answers]

    def forget(self) -> None:
        """The next sync begins anew."""
        self._plan = self._seen = None
        self._shared.clear()

    def _share(self, bucket: BucketPlan, buffer: Tensor) -> Tensor | None:
        """The slot's buffer, whole, when the schedulers do not have it; otherwise the bucket is put where they have it."""
        shared = self._shared.get(bucket.slot)
        if shared is None:
            start = buffer.storage_offset()
            shared = buffer.as_strided((buffer.untyped_storage().nbytes() - start,), (1,), start)
            self._shared[bucket.slot] = shared
            return shared
        if shared.data_ptr() != buffer.data_ptr():
            shared[: bucket.num_bytes].copy_(buffer)
        return None

    # --- the session ----------------------------------------------------------------------------

    @contextmanager
    def _session(self) -> Iterator[list[Channel]]:
        """Channels to all schedulers; at the end they return to serving. After a failure everything is forgotten."""
        call: Future[Any] | None = None
        try:
            with ExitStack() as stack:
                listener = stack.enter_context(Listener())
                call = self._host.start(lambda: self._open(listener.address))
                channels = listener.accept(self._count, lambda: self._check(call))
                for channel in channels:
                    stack.callback(channel.close)
                yield channels
            _accepted(call.result())
        except BaseException:  # after an interrupt too, what the schedulers hold is not known; raised again
            self.forget()
            raise

    def _open(self, address: str) -> tuple[bool, str]:
        # The tensor is empty because SGLang would copy any other to each GPU. Caches are not flushed here: SGLang ends
        # the scheduler when a last request has not quite left it (``flush_cache_after_weight_update``).
        named = [(address, torch.empty(0))]
        answer: tuple[bool, str] = self._host.engine.update_weights_from_tensor(
            named, load_format=LOADER, flush_cache=False
        )
        return answer

    def _ask(self, channels: Sequence[Channel], message: object) -> list[object]:
        """The same to all; raises the first error that comes back, after all have answered."""
        self._tell(channels, message)
        try:
            answers = [channel.receive(self._host.check) for channel in channels]
        except ChannelClosed as error:
            raise _gone(error) from error
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return answers

    def _tell(self, channels: Sequence[Channel], message: object) -> None:
        try:
            for channel in channels:
                channel.send(message)
        except ChannelClosed as error:
            raise _gone(error) from error

    def _check(self, call: Future[tuple[bool, str]] | None) -> None:
        self._host.check()
        if call is not None and call.done():
            _accepted(call.result())
            raise RolloutError(
                "SGLang did not run the loader", where=WHERE, remedy="use a version from the tested table"
            )


def _accepted(answer: tuple[bool, str]) -> None:
    good, message = answer
    if not good:
        raise RolloutError(
            "SGLang refused the sync", where=WHERE, why=message, remedy="sync again, or restart the rollout"
        )


def _gone(error: ChannelClosed) -> RolloutError:
    return RolloutError("a scheduler of SGLang ended in the middle of the sync", where=WHERE, why=str(error),
                        remedy="its own messages say why; close this rollout and create another")  # fmt: skip
