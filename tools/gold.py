"""Write this contract's gold checkpoints, once: ``python tools/gold.py --backend NAME``.

Any engine that declares portable-checkpoint may write them. They are part of the conformance suite,
whose case ``checkpoint.gold`` reads them in every later release: an existing one is never replaced.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine_api.plugin import CONTRACT
from engine_conformance.cases import Target
from engine_conformance.cases._journeys import OPTIMIZER, SCHEDULE, leg
from engine_conformance.cases.portable import GOLD, gold_batches, gold_model
from engine_conformance.fixtures import write_checkpoint
from engine_conformance.ranks import close_pools

WORLD, STEPS = 2, 3
README = """\
# Gold checkpoints of contract {contract}

Written {date} by `python tools/gold.py --backend {backend}` ({distribution}), on {world} ranks, \
after {steps} steps of
AdamW ({optimizer}) under a cosine schedule ({schedule}).

`model/` is what training started from, `checkpoint/` what it was saved as. Case `checkpoint.gold` \
loads them: a release
that cannot is no longer of this contract. Never rewrite them; a new contract adds a folder.
"""


def write_one(target: Target, folder: Path) -> None:
    """Write ``folder/model`` and ``folder/checkpoint`` of the target's model type."""
    made = target.scratch()
    model = write_checkpoint(made / "model", gold_model(target.model_type))
    config = target.config(model, optimizer=OPTIMIZER, schedule=SCHEDULE)
    target.run(leg, config, batches=gold_batches(0, STEPS), save_to=made / "checkpoint")
    for part in ("model", "checkpoint"):
        # Only contents are copied: safetensors writes files that only their owner may read.
        shutil.copytree(made / part, folder / part, copy_function=shutil.copyfile)


def write_all(backend: str, root: Path) -> list[Path]:
    """Write one folder for each model type that has none yet, and return the written folders."""
    written: list[Path] = []
    for model_type in ("language_model", "value_model"):
        folder = GOLD / f"contract-{CONTRACT}" / model_type
        if folder.exists():
            print(f"{folder} stands already and is never rewritten", file=sys.stderr)
            continue
        target = Target(backend=backend, root=root, world=WORLD, model_type=model_type)
        write_one(target, folder)
        _describe(folder.parent, target)
        written.append(folder)
    return written


def _describe(folder: Path, target: Target) -> None:
    name = target.resolution.plugin.name
    try:
        distribution = f"{name} {version(name)}"
    except PackageNotFoundError:
        distribution = f"{name} from source"
    text = README.format(
        contract=CONTRACT,
        date=datetime.now(UTC).date(),
        backend=target.backend,
        distribution=distribution,
        world=WORLD,
        steps=STEPS,
        optimizer=f"lr {OPTIMIZER.lr}, decay {OPTIMIZER.weight_decay}, clipped at "
        f"{OPTIMIZER.clip_norm}",
        schedule=f"{SCHEDULE.warmup_steps} steps of warm-up, {SCHEDULE.total_steps} in all",
    )
    (folder / "README.md").write_text(text)


def main() -> int:
    """Return 0 where a checkpoint was written, 1 where all existed already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="the engine that writes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        try:
            written = write_all(options.backend, Path(root))
        finally:
            close_pools()
    for folder in written:
        print(
            folder,
            sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            "bytes",
        )
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
