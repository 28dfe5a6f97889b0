"""Torch's default dtype and default device while an engine computes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

__all__ = ["plain_defaults"]


@contextmanager
def plain_defaults() -> Generator[None]:
    """Let torch make float32 tensors on the CPU inside the block where a call names neither.

    Models and optimizers do not expect other defaults of the process: positions that are made
    without a dtype would be float64, and masks without a device would be on the default device.
    """
    import torch

    dtype = torch.get_default_dtype()
    cpu = torch.device("cpu")
    # Under a default device torch passes each of its functions through Python.
    device = nullcontext() if torch.get_default_device() == cpu else cpu
    torch.set_default_dtype(torch.float32)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(dtype)
