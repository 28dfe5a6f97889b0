"""The program of the ranks of test_rank_failures, which makes every call with collectives.

The last rank goes away in one of the calls. Run it as ``python rank_peers.py HOW CALL FOLDER``. A
remaining rank prints the ranks that it blames, and why, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig
from engine_api.errors import RankFailure
from engine_api.losses import sft_loss

# A random kill comes within this many seconds.
LATER_S = 3.0


def calls_of(engine: Any, folder: Path) -> dict[str, Callable[[], object]]:
    """Return every call with collectives, by name and in a valid order."""
    saves = itertools.count()
    document = {"input_ids": [1, 2, 3, 4], "loss_weight": [0.0, 1.0, 1.0, 1.0]}
    batch = Batch.pack([document] * (1 + engine.topology.rank))
    return {
        "train_batch": lambda: engine.train_batch(batch, sft_loss),
        "forward_backward": lambda: engine.forward_backward(batch, sft_loss),
        "optimizer_step": engine.optimizer_step,
        "infer_batch": lambda: engine.infer_batch(batch),
        "save_checkpoint": lambda: engine.save_checkpoint(
            folder / "checkpoints" / f"step-{next(saves):06d}"
        ),
        "load_checkpoint": lambda: engine.load_checkpoint(folder / "checkpoints"),
        "get_per_tensor_param": lambda: list(engine.get_per_tensor_param(bucket_bytes=1)),
        "save_hf": lambda: engine.save_hf(folder / "hf"),
    }


def go_away(how: str) -> None:
    """End this rank by a kill or by an exception."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError("this rank's own")


def main(how: str, call: str, folder: Path) -> None:
    """Repeat all calls without end.

    The last rank goes away instead of ``call``, or at a random moment.
    """
    torch.set_num_threads(1)
    config = EngineConfig(
        model=ModelSource(path=str(folder / "model"), init="random"),
        optimizer=OptimizerConfig(lr=1e-3),
        options={"verify_model": False},
    )
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    fatal = engine.topology.rank == engine.topology.world_size - 1
    calls = calls_of(engine, folder)
    for work in calls.values():
        work()
    if fatal and call.startswith("random"):
        delay = random.Random(call).uniform(0.0, LATER_S)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            for name, work in calls.items():
                if fatal and name == call:
                    go_away(how)
                work()
    except RankFailure as failure:
        print(json.dumps({str(rank): text for rank, text in failure.failures.items()}), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
