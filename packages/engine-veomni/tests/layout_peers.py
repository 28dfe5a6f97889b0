"""The program of two ranks of test_layouts: two engines of one process, with two layouts.

Run it as ``python layout_peers.py FOLDER``. A rank prints the refusal of the second engine.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.errors import ConfigError


def create(folder: str, **sizes: int) -> Any:
    config = EngineConfig(
        model=ModelSource(path=folder),
        parallelism=Parallelism(**sizes),
        options={"verify_model": False},
    )
    return EngineRegistry.create(backend="veomni", device="cpu", config=config)


def main(folder: str) -> None:
    """Build a second engine beside the first, and after it."""
    # The group outlives the engines, which would destroy one that they made.
    dist.init_process_group("gloo")
    batch = Batch.pack([{"input_ids": [5, 6, 7]}])
    first, second, same = create(folder), create(folder, ulysses=2), create(folder, dp_shard=2)
    first.initialize()
    try:
        second.initialize()
    except ConfigError as error:
        print(f"{error.field}: {error.what}; {error.remedy}", flush=True)
    same.initialize()
    want = first.infer_batch(batch).log_probs
    first.close()
    same.close()
    third = create(folder, ulysses=2)
    third.initialize()
    got = third.infer_batch(batch).log_probs
    assert float((got - want).abs().max()) < 1e-4
    third.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
