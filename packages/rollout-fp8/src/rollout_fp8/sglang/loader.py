"""Loader of weights in SGLang's schedulers: a ``custom_weight_loader``.

``Engine.update_weights_from_tensor`` calls it.

An error that leaves the loader ends the scheduler, and SGLang then ends all its processes
(``run_scheduler_process`` in its ``managers/scheduler.py``). So the loader reports errors to the
rollout over its own channel, and returns.
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
# Attribute of a model that holds its receiver.
RECEIVER = "_rollout_fp8"


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Install one stream of the sender whose address is the only "name".

    Its tensor is empty.
    """
    ((address, _),) = named_tensors
    device = next(model.parameters()).device
    try:
        # The ranks of SGLang's default group are its tensor-parallel ranks: it gets no other
        # parallelism.
        with (
            torch.no_grad(),
            receive_weights(address, rank=dist.get_rank(), device=device) as stream,
        ):
            if stream.plan.buckets:
                stream.answer = _install(model, stream)
            else:
                stream.answer = _learn(model, stream)
    except Exception:
        # An error that leaves the loader ends the server, and the rollout has received this one.
        # The next sync begins from the start.
        setattr(model, RECEIVER, None)
        log.exception("a weight sync failed")


def _learn(model: Any, stream: RemoteStream) -> Any:
    """Learn from an ``Outline``, and return the boxes that this scheduler serves."""
    # Before new memory is taken.
    setattr(model, RECEIVER, None)
    for _ in stream.buckets():
        raise AssertionError("a plan of no buckets")
    private.keep_float32_of_experts(model)
    receiver = Receiver(ServedWeights(model), stream.plan, model.load_weights)
    setattr(model, RECEIVER, receiver)
    return receiver.boxes


def _install(model: Any, stream: RemoteStream) -> Any:
    """Install a stream.

    Returns:
        Checksums of the weights that are then served (if they are audited), and seconds by phase.
    """
    receiver: Receiver | None = getattr(model, RECEIVER, None)
    if receiver is None:
        raise RolloutError(
            "this scheduler has not learned the plan",
            where=WHERE,
            why="an earlier sync failed",
            remedy="sync again, or restart the rollout",
        )
    phases = Phases(stream.device)
    receiver.sync(stream, phases)
    private.renew_derived(model)
    private.reset_cache_scales(model)
    sums: list[int] = []
    if stream.audit:
        with phases.phase("audit"):
            found = receiver.served()
        sums = found.tolist()
    return sums, {**stream.seconds(), **phases.seconds()}


class ServedWeights(nn.Module):
    """Parameters of a model without the scales of the key-value cache.

    These scales are constants unless a checkpoint has them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # In a tuple, because a submodule's names would begin differently.
        self._of = (model,)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters, as ``nn.Module.named_parameters`` does."""
        for name, parameter in self._of[0].named_parameters(prefix, recurse, remove_duplicate):
            if not private.is_constant(parameter):
                yield name, parameter

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's modules, as ``nn.Module.named_modules`` does."""
        return self._of[0].named_modules(memo, prefix, remove_duplicate)
