"""torchtitan's global variables, contained: its SPMD backend and its kind of device.

Importing torchtitan's models changes nothing outside of it. Its trainer is never imported, nor is
anything called that sets up logging, process groups or autograd for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend

__all__ = ["SPMD_BACKEND", "Hold", "building_meshes_for"]

# torchtitan's default, spmd_types, fails in fully_shard of torch 2.13. Its full_dtensor loses the
# gradient of keys and values under context parallelism, because local_map of torch 2.13 drops the
# gradient of a DTensor that was redistributed with async_op=True.
SPMD_BACKEND = "partial_dtensor"


class Hold:
    """The use of torchtitan by one engine, from its start to its end.

    torchtitan keeps the name of its SPMD backend in a global variable, which its modules read while
    they run. The first engine of a process sets it, and the last one restores it. Everything else
    that depends on a layout is in objects of the engine, so that engines of different layouts can
    live in one process.
    """

    _count = 0
    _before = ""

    def __init__(self) -> None:
        if not Hold._count:
            Hold._before = get_spmd_backend()
            set_spmd_backend(SPMD_BACKEND)
        Hold._count += 1
        self._open = True

    def release(self) -> None:
        """End the use.

        A second call does nothing.
        """
        if not self._open:
            return
        self._open = False
        Hold._count -= 1
        if not Hold._count:
            set_spmd_backend(Hold._before)


@contextmanager
def building_meshes_for(device_type: str) -> Iterator[None]:
    """Let torchtitan build meshes of a kind of device inside the block.

    It takes the first kind that the process finds, and ``cuda`` where there is none.
    """
    before = parallel_dims.device_type
    parallel_dims.device_type = device_type
    try:
        yield
    finally:
        parallel_dims.device_type = before
