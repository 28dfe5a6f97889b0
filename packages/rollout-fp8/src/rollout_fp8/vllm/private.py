"""Everything of vLLM that has no public call, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state


def shut_down(engine: Any) -> None:
    """Shut down an engine of this process, and no process group but vLLM's own.

    The public ``engine_core.shutdown`` ends in ``cleanup_dist_env_and_memory``, which destroys the default group: that
    is the trainer's. Since 0.32 it also runs when the engine is collected.
    """
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    engine.collective_rpc("shutdown")
    leave_groups()


def leave_groups() -> None:
    """Destroy the process groups that vLLM made, its world among them, which has no public call of its own.

    A later engine would take an old world for its own, whose default group may be gone.
    """
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        world = parallel_state._WORLD  # noqa: SLF001
        if world is not None:
            world.destroy()
    parallel_state._WORLD = None  # noqa: SLF001
    parallel_state._NODE_COUNT = None  # noqa: SLF001


def forget_expert_kernels(model: Any) -> None:
    """Let the next ``reload_weights`` on a CPU pack the experts again.

    vLLM's CPU build packs them where their kernel is made, which a reload does not do a second time: it would serve
    unpacked experts as if they were packed (0.32.0, ``UnquantizedFusedMoEMethod._setup_kernel``).
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


@contextmanager
def own_threads() -> Iterator[None]:
    """Keep ``torch.set_num_threads``: vLLM's CPU worker replaces it in its process, which here is the trainer's."""
    kept = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = kept
