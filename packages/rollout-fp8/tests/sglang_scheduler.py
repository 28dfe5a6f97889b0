"""A process that serves, as SGLang's scheduler does."""

from __future__ import annotations

from typing import Any

import torch
from served_model import ServedModel

from rollout_fp8.sglang import loader


def scheduler(pipe: Any, tp: int, rank: int) -> None:
    """Runs the loader at each address that comes; at None sends its parameters as plain lists of bytes, and ends."""
    torch.set_num_threads(1)
    model = ServedModel(tp=tp, rank=rank)
    while (address := pipe.recv()) is not None:
        loader.load(model, [(address, torch.empty(0))])
        pipe.send((True, "Success"))
    pipe.send({name: bytes(p.detach().view(torch.uint8).numpy()) for name, p in model.named_parameters()})
