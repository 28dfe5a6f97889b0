"""RL with ``launcher: ray``, where the loop runs in this process and all heavy work on the cluster.

When a worker or a node is lost, the run restarts from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import yaml

from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import flatten
from engine_trainer.placement.automatic import keep
from engine_trainer.placement.ray.calls import WorkerLost
from engine_trainer.placement.ray.cluster import connected
from engine_trainer.placement.ray.launcher import OnRay
from engine_trainer.rl.loop import train_rl
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.run.configurations import CONFIG
from engine_trainer.run.run import Outcome

log = logging.getLogger("engine_trainer")


def train_on_ray(config: RLConfig) -> Outcome:
    """Run ``train_rl`` with its engines and rollouts on a Ray cluster.

    When a worker or a node is lost, or a worker stops responding, all workers are ended, and the
    run continues from its last checkpoint with new ones, at most ``ray.restarts`` times. With
    synchronous rollouts it ends with the same result as an uninterrupted run.

    Raises ``EngineError`` as ``train_rl`` does, and ``WorkerLost`` when there are no restarts left.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "launcher",
            "expected one process for launcher: ray, but torchrun has started this one",
            why="WORLD_SIZE is set",
            remedy="start one process: engine-train rl … launcher=ray",
        )
    with connected(config.ray, config.rollout):
        patience_s = 0.0
        for left in range(config.ray.restarts, -1, -1):
            try:
                return train_rl(config, OnRay(config, patience_s))
            except WorkerLost as error:
                if not left:
                    raise
                log.warning(
                    "%s\nrestarting from the last checkpoint; restarts left: %d",
                    error,
                    left - 1,
                )
            patience_s = config.ray.start_timeout_s  # a lost node may come back
            config = _with_choices(config)
            if Checkpoints(
                Path(config.run.output_dir) / "checkpoints", keep=config.run.keep
            ).steps():
                # Resume from this run's own checkpoints, even if it was configured to start fresh
                # or from another folder.
                config = replace(config, run=replace(config.run, resume="auto"))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _with_choices(config: RLConfig) -> RLConfig:
    """Return the configuration with what the lost attempt chose for ``auto``, if it got so far."""
    file = Path(config.run.output_dir) / CONFIG
    if not file.is_file():
        return config
    before = flatten(yaml.safe_load(file.read_text(encoding="utf-8")))
    kept, _ = keep(config, before, CONFIG)
    assert isinstance(kept, RLConfig)
    return kept
