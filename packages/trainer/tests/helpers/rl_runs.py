"""A small RL run without a launcher, and what it left: shared by the tests of the loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree

SEVENS = """
from engine_trainer.rewards import register

@register("sevens")
def sevens():
    return lambda sample: sample.completion.count("7") / 4
"""
exec(SEVENS)
MAIN = (
    SEVENS
    + f"""
import sys
from engine_api.registry import RolloutRegistry
from engine_trainer.cli import main

sys.path.insert(0, {str(Path(__file__).parent)!r})
from rollouts_with_defects import ShiftsLogProbs

RolloutRegistry.register(backend="shifted", device="cpu")(ShiftsLogProbs)
sys.exit(main(sys.argv[1:]))
"""
)


def tree(folder: Path, out: Path, **sections) -> dict:
    base = {
        "engine": {"model": {"path": str(folder)}, "device": "cpu", "optimizer": {"lr": 0.003}},
        "data": {"source": str(folder / "train.jsonl")},
        "run": {
            "output_dir": str(out),
            "steps": 3,
            "seed": 3,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
        "reward": {"name": "sevens", "workers": 0, "timeout_s": None},
        "rollout": {"n": 4, "max_new_tokens": 4, "batch_size": 64},
        "algorithm": {"prompts_per_step": 8},
    }
    return base | {name: {**base.get(name, {}), **values} for name, values in sections.items()}


def configure(folder: Path, out: Path, **sections) -> RLConfig:
    return from_tree(RLConfig, tree(folder, out, **sections))


def rows_of(out: Path) -> list[dict]:
    """The metrics without what a clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    clocks = re.compile(r"time$|time/|perf/|sync/.*_s$")
    return [{k: v for k, v in r.items() if not clocks.match(k)} for r in rows]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint or an export of one rank."""
    from safetensors.torch import load_file

    return {
        k: v for path in sorted(folder.rglob("*.safetensors")) for k, v in load_file(path).items()
    }


def same(a: Path, b: Path) -> bool:
    left, right = tensors_of(a), tensors_of(b)
    assert left
    return set(left) == set(right) and all(torch.equal(left[n], right[n]) for n in left)


def start(tmp_path: Path, config: dict, ranks: int) -> subprocess.Popen:
    """Start ``engine-train rl``, with the reward and a rollout whose log-probs are shifted."""
    script = tmp_path / "main.py"
    file = tmp_path / f"{Path(config['run']['output_dir']).name}.yaml"
    script.write_text(MAIN)
    file.write_text(yaml.safe_dump(config))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), "rl", str(file)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
