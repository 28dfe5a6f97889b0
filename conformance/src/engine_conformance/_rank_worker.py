"""The process of one rank, which joins the group and then runs the jobs that it is sent."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from engine_api.devices import cuda_is_simulated, npu_is_simulated
from engine_api.errors import EngineError
from engine_conformance.rank_failure import REFUSED
from engine_conformance.seeds import use_seed

__all__ = ["BACKENDS", "Job", "RankReply", "WorkerSpec", "main"]

# On an accelerator gloo is available as well, for tensors that an engine keeps on the host.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """The rank, group and device of one worker process."""

    rank: int
    world: int
    device: str
    folder: str
    """Folder that holds the rendezvous file and the stack dumps."""
    group_timeout: float
    """Timeout of the process group's collectives in seconds."""
    port: int | None = None
    """Port of the store by which a launcher's ranks meet, or None if the worker makes the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One call of ``"module:function"``, with the parent's ``sys.path`` and seed of batches."""

    function: str
    kwargs: Mapping[str, Any]
    path: tuple[str, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReply:
    """The outcome of a job, sent by the worker, or made by the parent if the worker ``died``."""

    kind: Literal["returned", "raised", "died"]
    value: Any = field(default=None, repr=False)
    text: str = ""
    exception: str = ""


def main(descriptor: int) -> None:
    """Read the spec from the pipe ``descriptor``, join the group, and run jobs.

    Ends when the parent sends None or closes the pipe.
    """
    # Ctrl-C is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    spec: WorkerSpec = pickle.loads(pipe.recv_bytes())
    # Kept open for the life of the process: faulthandler writes to the descriptor.
    dump = (Path(spec.folder) / f"stack-{spec.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.enable(file=dump)
    pipe.send_bytes(_attempt(_join, {"spec": spec}))
    _settle()
    while (job := _next_job(pipe)) is not None:
        pipe.send_bytes(_attempt(_call, {"job": job}))
        del job
        _settle()
    _leave()


def _settle() -> None:
    """Collect garbage between jobs, when nothing refers to the last job's value or error any more.

    Whatever is garbage at ``gc.freeze`` would be kept for the life of the process.
    """
    # An engine of the last case must not hold memory that the next one needs.
    gc.collect()
    # The objects that live on are modules and caches: walking them took half of a job's time.
    gc.freeze()


def _next_job(pipe: Connection) -> Job | None:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _attempt(function: Any, kwargs: Mapping[str, Any]) -> bytes:
    """Call the function and return a pickled `RankReply`.

    Plain pickle, so that tensors travel by value and not as shared memory of a rank
    that may die.
    """
    try:
        return pickle.dumps(RankReply(kind="returned", value=function(**kwargs)))
    # This is the rank's boundary: the parent receives every error, a call of sys.exit included.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        # A case's own verdict is complete; the traceback would show only lines of the suite.
        is_verdict = type(error).__name__ == "ConformanceFailure"
        text = str(error) if is_verdict else traceback.format_exc()
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(REFUSED)]
        if notes:
            # The engine's typed error says what it refuses; the traceback would add nothing.
            text = f"{notes[0]}\n{error if isinstance(error, EngineError) else text}"
        return pickle.dumps(RankReply(kind="raised", text=text, exception=name))


def _join(spec: WorkerSpec) -> None:
    rank = str(spec.rank)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(spec.world), LOCAL_WORLD_SIZE=str(spec.world)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if spec.device == "cpu" and cuda_is_simulated():
        from engine_conformance import shim

        # Before any engine is imported.
        shim.install()
    simulated = spec.device == "npu" and npu_is_simulated()
    if simulated:
        from engine_conformance import stand_in

        stand_in.install()
        groups = stand_in.GROUPS
    else:
        groups = BACKENDS[spec.device]
    if spec.device != "cpu" and not simulated:
        torch.get_device_module(spec.device).set_device(spec.rank)
    if spec.port is not None:
        # torchrun's variables: its ranks are clients of a store that the launcher serves.
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(spec.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        return
    file = str(Path(spec.folder) / "rendezvous")
    store = dist.FileStore(file, spec.world)  # pyright: ignore[reportPrivateImportUsage]
    # Without a device_id: with one, NCCL connects each group that an engine makes at once,
    # Megatron's twenty among them, and processes that share GPUs wait for the driver's lock.
    dist.init_process_group(
        groups,
        store=store,
        rank=spec.rank,
        world_size=spec.world,
        timeout=datetime.timedelta(seconds=spec.group_timeout),
    )


def _call(job: Job) -> Any:
    import torch

    sys.path.extend(entry for entry in job.path if entry not in sys.path)
    module, _, name = job.function.partition(":")
    torch.manual_seed(0)
    use_seed(job.seed)
    return getattr(importlib.import_module(module), name)(**job.kwargs)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
