"""Process that serves, as SGLang's scheduler does."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from served_model import ServedModel

from rollout_fp8.sglang import loader


def scheduler(pipe: Any, tp: int, rank: int, store: str) -> None:
    """Run the loader for each (address, defect) that comes.

    At None it sends its parameters as plain lists of bytes, and ends.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    model, install = ServedModel(tp=tp, rank=rank), loader.Receiver.sync
    while (order := pipe.recv()) is not None:
        address, defect = order
        loader.Receiver.sync = _broken(defect) if defect and rank == tp - 1 else install
        loader.load(model, [(address, torch.empty(0))])
        dist.barrier()  # so does SGLang, after every update
        pipe.send((True, "Success"))
    pipe.send(
        {name: bytes(p.detach().view(torch.uint8).numpy()) for name, p in model.named_parameters()}
    )


def _broken(defect: str) -> Any:
    def sync(receiver: Any, stream: Any, phases: Any) -> None:
        next(stream.buckets())
        if defect == "raise":
            raise MemoryError("no room")
        os.kill(os.getpid(), signal.SIGKILL if defect == "kill" else signal.SIGSTOP)

    return sync
