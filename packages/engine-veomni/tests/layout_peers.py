"""The program of two ranks of test_layouts: two engines of one process, with two layouts.

Run it as ``python layout_peers.py MODEL OUT``. Each rank writes the refusal of the second engine to
the folder ``OUT``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.errors import ConfigError


def create(folder: str, **sizes: int) -> Any:
    config = EngineConfig(
        model=ModelSource(path=folder),
        parallelism=Parallelism(**sizes),
        options={"verify_model": False},
    )
    return EngineRegistry.create(backend="veomni", device="cpu", config=config)


def main(folder: str, out: str) -> None:
    """Build a second engine beside the first, and after it."""
    batch = Batch.pack([{"input_ids": [5, 6, 7]}])
    first, second, same = create(folder), create(folder, ulysses=2), create(folder, dp_shard=2)
    first.initialize()
    try:
        second.initialize()
    except ConfigError as error:
        refusal = f"{error.field}: {error.what}; {error.remedy}"
        Path(out, f"rank-{os.environ['RANK']}").write_text(refusal)
    same.initialize()
    want = first.infer_batch(batch).log_probs
    first.close()
    same.close()
    third = create(folder, ulysses=2)
    third.initialize()
    got = third.infer_batch(batch).log_probs
    assert float((got - want).abs().max()) < 1e-4
    third.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
