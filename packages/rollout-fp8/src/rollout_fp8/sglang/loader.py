"""What runs in SGLang's schedulers: a ``custom_weight_loader``, called by ``Engine.update_weights_from_tensor``.

An error that leaves the loader ends the scheduler, and SGLang then ends everything (``run_scheduler_process`` in its
``managers/scheduler.py``). So every error goes back over the channel, and the loader returns.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from engine_api.errors import EngineError, RolloutError
from rollout_fp8.exporter import whole_tensors
from rollout_fp8.phases import Phases
from rollout_fp8.receiver import Receiver
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
    connect,
)
from rollout_fp8.wire import BucketPlan, WirePlan

WHERE = "weight sync, in SGLang's scheduler"


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """One session. The only "name" is the address of the rollout's socket; its tensor is empty."""
    ((address, _),) = named_tensors
    worker = _WORKERS.get(model)
    if worker is None:
        worker = _WORKERS[model] = Worker(model)
    channel = connect(address)
    try:
        worker.serve(channel)
    finally:
        channel.close()


class Worker:
    """One scheduler's model; what it learnt at the first sync is used for all others."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._receiver: Receiver | None = None
        self._plans: list[WirePlan] = []  # the last one counts; the receiver knows buckets of all of them by identity
        self._buffers: dict[int, Tensor] = {}  # by slot
        self._device = next(model.parameters()).device

    def serve(self, channel: Channel) -> None:
        """Answer one ``Learn`` or one ``Begin``, whatever comes of it."""
        try:
            message = channel.receive()
            if isinstance(message, Learn):
                channel.send(self._learn(message.plan))
            else:
                assert isinstance(message, Begin), f"not expected here: {message}"
                channel.send(self._sync(message, channel))
        except ChannelClosed:
            self._forget()  # the rollout gave up in the middle, and says so itself
        except Exception as error:  # noqa: BLE001 - see above: what leaves the loader ends the server
            self._forget()
            with suppress(ChannelClosed):
                channel.send(Failed(error=_told(error)))

    def _learn(self, plan: WirePlan) -> Learnt:
        self._forget()  # before new memory is taken
        model: Any = self._model
        self._receiver = Receiver(_Weights(self._model), plan, model.load_weights)
        self._plans.append(plan)
        return Learnt(boxes=self._receiver.boxes)

    def _sync(self, order: Begin, channel: Channel) -> Installed:
        if self._receiver is None or not self._plans:
            raise RolloutError("this worker has not learnt the plan", where=WHERE, why="an earlier sync failed",
                               remedy="close this rollout and create another")  # fmt: skip
        if order.plan is not None:
            self._plans.append(order.plan)
            self._buffers.clear()
        phases = Phases(self._device)
        self._receiver.sync(_Incoming(self._plans[-1], order.audit, self._buffers, self._device, channel), phases)
        checksums: list[int] = []
        if order.audit:
            with phases.phase("audit"), torch.no_grad():
                served = self._receiver.served()
            checksums = served.tolist()
        return Installed(checksums=checksums, seconds=dict(phases.seconds()))

    def _forget(self) -> None:
        """Whatever state it is in, the next sync begins anew."""
        self._receiver = None
        self._plans.clear()
        self._buffers.clear()


class _Weights(nn.Module):
    """A model's parameters without the scales of the key-value cache: they are constants unless a checkpoint has them.

    SGLang marks them so for its own check of loaded weights (``layers/quantization/kv_cache.py``); the mark has no public name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple: not a submodule, whose names would begin otherwise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._of[0].named_parameters(prefix, recurse, remove_duplicate):
            if not getattr(parameter, "_skip_weight_check", False):
                yield name, parameter


_WORKERS: WeakKeyDictionary[nn.Module, Worker] = WeakKeyDictionary()


class _Incoming:
    """The ``WireStream`` of a channel, up to its ``End``."""

    def __init__(
        self, plan: WirePlan, audit: bool, buffers: dict[int, Tensor], device: torch.device, channel: Channel
    ) -> None:
        self.plan, self.audit, self.device = plan, audit, device
        self._buffers, self._channel = buffers, channel

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """See ``WireStream.buckets``."""
        while isinstance(message := self._channel.receive(), Filled):
            bucket = self.plan.buckets[message.index]
            if message.buffer is not None:
                self._buffers[bucket.slot] = message.buffer
            buffer = self._buffers[bucket.slot][: bucket.num_bytes]
            yield bucket, buffer
            # The answer lets another process fill the buffer again: the order of a stream is not enough.
            for device in {self.device, buffer.device}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            self._channel.send(None)
        assert isinstance(message, End), f"not expected here: {message}"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See ``WireStream.__iter__``."""
        return whole_tensors(self.buckets())

    def checksums(self) -> dict[str, int]:
        """The exporting side compares."""
        raise AssertionError("they are not sent")

    def seconds(self) -> dict[str, float]:
        """Of the export; the exporting side knows them."""
        return {}


def _told(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return RolloutError(f"{type(error).__name__}: {error}", where=WHERE, why=traceback.format_exc(limit=-4).strip(),
                        remedy="sync again, or restart the rollout")  # fmt: skip
