"""``launcher: ray``: the loop in this process, everything heavy on the cluster, again from the last checkpoint when that breaks."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.placement.ray.calls import WorkerLost
from engine_trainer.placement.ray.cluster import connected
from engine_trainer.placement.ray.launcher import OnRay
from engine_trainer.rl.loop import train_rl
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.run.run import Outcome

log = logging.getLogger("engine_trainer")


def train_on_ray(config: RLConfig) -> Outcome:
    """``train_rl`` with its engines and rollouts on a Ray cluster.

    When a worker or a node is lost, or a worker falls silent, all workers are ended, and the run goes on from its last
    checkpoint with new ones, at most ``ray.restarts`` times. With synchronous rollouts it ends as one that was left alone.

    Raises ``EngineError`` as ``train_rl``; ``WorkerLost`` when there are no restarts left.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "launcher",
            "ray, but torchrun has started this process",
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
                    "%s\nbeginning again from the last checkpoint; restarts left: %d",
                    error,
                    left - 1,
                )
            patience_s = config.ray.start_timeout_s  # a lost node may come back
            if Checkpoints(
                Path(config.run.output_dir) / "checkpoints", keep=config.run.keep
            ).steps():
                # What this run has saved is its own now, also where it was told to begin anew or elsewhere.
                config = replace(config, run=replace(config.run, resume="auto"))
    raise AssertionError("unreachable: the last attempt returns or raises")
