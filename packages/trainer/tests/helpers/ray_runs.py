"""A small RL run as a tree, and what it left: shared by the tests of the Ray launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from rollout_rows import rollouts_of

from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.rewards import Score

CLOCKS = re.compile(r"time$|time/|perf/|sync/(.*_s$|wire_bytes)|worker/|replicas/")
# The deadlines are for hangs: a worker that starts on a busy machine must not reach them.
ON_RAY = {"imports": ["ray_faults"], "engines": 2, "timeout_s": 600.0, "start_timeout_s": 300.0}


class Judge:
    """Rewards of 1."""

    def score(self, samples):
        return [Score(total=1.0, parts={}, correct=True) for _ in samples]


class Words:
    """A tokenizer that writes ids."""

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def let_workers_import_helpers(patch: pytest.MonkeyPatch) -> None:
    """Put this folder on the path of the processes that Ray starts."""
    here = str(Path(__file__).parent)
    patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@contextmanager
def local_cluster(cpus: int, faults: Path | None = None) -> Iterator[None]:
    """Start a local cluster, with ``faults`` as the file for ``ray_faults``.

    ``cpus`` may exceed the machine's number, because the workers take turns.
    """
    import ray

    from engine_trainer.placement.ray.cluster import start_cluster

    with pytest.MonkeyPatch.context() as patch:
        let_workers_import_helpers(patch)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        if faults is not None:
            patch.setenv("RAY_FAULTS", str(faults))
        try:
            start_cluster(
                num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
            )
            yield
        finally:
            ray.shutdown()


def reshaped(source: Path, folder: Path, **shape) -> Path:
    """A copy of a model's folder with new weights of another shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(source, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, **shape)
        ).save_pretrained(folder)
    return folder


def tree(folder: Path, out: Path, **sections) -> dict:
    base = {
        "engine": {"model": {"path": str(folder)}, "device": "cpu", "optimizer": {"lr": 0.003}},
        "data": {"source": str(folder / "train.jsonl")},
        "run": {
            "output_dir": str(out),
            "steps": 3,
            "seed": 3,
            "save_every": 1,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
        "reward": {"name": "sevens", "workers": 0, "timeout_s": None},
        "rollout": {"n": 4, "max_new_tokens": 4, "batch_size": 64},
        "algorithm": {"prompts_per_step": 8, "correction": {"weight": "token", "cap": 1.3}},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return base


def configure(folder: Path, out: Path, **sections) -> RLConfig:
    return from_tree(RLConfig, tree(folder, out, **sections))


def on_ray(folder: Path, out: Path, *, ray=None, **sections) -> RLConfig:
    return configure(folder, out, launcher="ray", ray={**ON_RAY, **(ray or {})}, **sections)


def rows_of(out: Path) -> list[dict]:
    """The metrics without what a clock says, or only one of two ways to bring weights has."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not CLOCKS.match(k)} for r in rows]


def result_of(out: Path) -> tuple[bytes, list[dict], list[dict]]:
    """All that two runs which are equal must have in common: model, metrics and completions."""
    return (out / "hf" / "model.safetensors").read_bytes(), rows_of(out), rollouts_of(out)


def start(
    config: dict, file: Path, *, ranks: int = 1, task: str = "rl", environment=None
) -> subprocess.Popen:
    """``engine-train rl`` as a process, or as ranks of torchrun."""
    file.write_text(yaml.safe_dump(config))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    script = file.with_suffix(".py")
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport ray_faults\n"
        "from engine_trainer.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), task, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
