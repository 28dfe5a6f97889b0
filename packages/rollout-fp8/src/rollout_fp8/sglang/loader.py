"""What runs in SGLang's schedulers: a ``custom_weight_loader``, called by ``Engine.update_weights_from_tensor``.

An error that leaves the loader ends the scheduler, and SGLang then ends everything
(``run_scheduler_process`` in its ``managers/scheduler.py``). So the rollout hears of it over its
own channel, and the loader returns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_api.errors import RolloutError
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.phases import Phases
from rollout_fp8.sglang import private
from rollout_fp8.transports.remote import RemoteStream, receive_weights

log = logging.getLogger("rollout_fp8")
WHERE = "weight sync, in SGLang's scheduler"
RECEIVER = "_rollout_fp8"  # what a model has learnt, as its attribute


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take one stream of the sender whose address is the only "name"; its tensor is empty."""
    ((address, _),) = named_tensors
    device = next(model.parameters()).device
    try:
        # SGLang's default group are its tensor-parallel ranks: it is given no other kind of
        # parallelism.
        with (
            torch.no_grad(),
            receive_weights(address, rank=dist.get_rank(), device=device) as stream,
        ):
            stream.answer = (
                _install(model, stream) if stream.plan.buckets else _learn(model, stream)
            )
    except Exception:  # whatever leaves the loader ends the server, and the rollout has been told
        setattr(model, RECEIVER, None)  # the next sync begins anew
        log.exception("a weight sync failed")


def _learn(model: Any, stream: RemoteStream) -> Any:
    """``Outline``: what this scheduler serves of the plan's tensors."""
    setattr(model, RECEIVER, None)  # before new memory is taken
    for _ in stream.buckets():
        raise AssertionError("a plan of no buckets")
    receiver = Receiver(_Weights(model), stream.plan, model.load_weights)
    setattr(model, RECEIVER, receiver)
    return receiver.boxes


def _install(model: Any, stream: RemoteStream) -> Any:
    """Checksums of what is then served (if it is audited), and seconds by phase."""
    receiver: Receiver | None = getattr(model, RECEIVER, None)
    if receiver is None:
        raise RolloutError(
            "this scheduler has not learnt the plan",
            where=WHERE,
            why="an earlier sync failed",
            remedy="sync again, or restart the rollout",
        )
    phases = Phases(stream.device)
    receiver.sync(stream, phases)
    private.renew_derived(model)
    sums: list[int] = []
    if stream.audit:
        with phases.phase("audit"):
            found = receiver.served()
        sums = found.tolist()
    return sums, {**stream.seconds(), **phases.seconds()}


class _Weights(nn.Module):
    """A model's parameters without the scales of the key-value cache: they are constants unless a checkpoint has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple: not a submodule, whose names would begin otherwise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._of[0].named_parameters(prefix, recurse, remove_duplicate):
            if not private.is_constant(parameter):
                yield name, parameter
